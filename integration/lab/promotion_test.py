#!/usr/bin/env python3
"""Tests of promotion.py: on made-up facts, a promoted run passes and each way of not being one fails; on made-up counters,
nothing that was there at once is missed."""
import copy
import json
import os
import pathlib
import runpy
import signal
import subprocess
import tempfile
import time
import unittest

RULES = pathlib.Path(__file__).with_name("promotion.py")
rules = runpy.run_path(str(RULES))
judge, Watch = rules["judge"], rules["Watch"]


def facts(name, pid, peer, link=1_000_000, tcp=20_000):
    instance = {
        "pid": pid, "program": name, "peers": [peer] if link else [], "fabrics": ["verbs"] if link else [],
        "links": int(link > 0), "twice": 0, "why": [], "promoted": int(link > 0), "demoted": 0, "streams": 1,
        "tx_tcp_bytes": tcp, "rx_tcp_bytes": 0, "tx_link_bytes": link, "rx_link_bytes": 0,
        **dict.fromkeys(rules["EVENTS"], 0),
    }  # fmt: skip
    return {
        "instances": {name: instance},
        "queue_pairs": 1 if link else 0,
        "links": 1 if link else 0,
        "device": {"sent_pkts": link // 1000, "rcvd_pkts": 10},
        "wire": {"of_device": link + link // 10, "of_programs": tcp * 2},
    }


NOTHING = {"instances": {}, "queue_pairs": 0, "links": 0, "device": {}, "wire": {"of_device": 0, "of_programs": 9}}


class Promoted(unittest.TestCase):
    def setUp(self):
        self.a, self.b = facts("server", 10, "client"), facts("client", 20, "server")

    def failed(self):
        wrong, lines = judge("both", self.a, self.b)
        return wrong + [line.split()[0] for line in lines if " FAILED " in line]

    def test_a_promoted_run_passes(self):
        self.assertEqual(self.failed(), [])
        self.assertEqual(len(judge("both", self.a, self.b)[1]), 5)

    def test_each_end_is_judged(self):
        for one in (self.a, self.b):
            whole = copy.deepcopy(one)
            for instance in one["instances"].values():
                instance["tx_link_bytes"] = 1_000
            self.assertIn("counters", self.failed())
            one.clear()
            one.update(whole)

    def test_shared_memory_is_no_link_between_hosts(self):
        self.a["instances"]["server"]["fabrics"] = ["shm"]
        self.assertEqual(self.failed(), ["one-link"])

    def test_two_links_to_one_process(self):
        self.b["instances"]["client"].update(twice=1, links=2)
        self.b["queue_pairs"] = 3
        self.assertEqual(self.failed(), ["one-link"])

    def test_a_queue_pair_too_many_or_none(self):
        for number in (3, 0):
            self.a["queue_pairs"] = number
            self.assertEqual(self.failed(), ["one-link"])

    def test_a_link_to_a_stranger(self):
        self.a["instances"]["server"]["peers"] = ["somebody"]
        self.assertEqual(self.failed(), ["one-link"])

    def test_the_device_has_carried_nothing(self):
        self.a["wire"]["of_device"] = 1000
        self.assertEqual(self.failed(), ["device"])
        self.setUp()
        self.b["device"] = {"sent_pkts": 1, "rcvd_pkts": 1}
        self.assertEqual(self.failed(), ["device"])

    def test_the_payload_is_still_on_tcp(self):
        self.a["wire"]["of_programs"] = 1_500_000
        self.assertEqual(self.failed(), ["tcp-is-empty"])

    def test_nothing_promoted_fails_everything(self):
        self.a, self.b = facts("server", 10, "client", link=0), facts("client", 20, "server", link=0)
        self.assertEqual(self.failed(), ["counters", "one-link", "device", "tcp-is-empty"])


class Direct(unittest.TestCase):
    def setUp(self):
        self.a, self.b = facts("server", 10, "client"), facts("client", 20, "server")
        # Each link has one more.
        self.a["queue_pairs"] = self.b["queue_pairs"] = 2

    def failed(self, *directly, mode="direct"):
        wrong, lines = judge(mode, self.a, self.b, directly)
        return wrong + [line.split()[0] for line in lines if " FAILED " in line]

    def test_what_is_to_go_directly_does_and_nothing_else(self):
        self.assertEqual(self.failed(), [])
        self.assertEqual(self.failed("b-received"), ["direct"])
        self.b["instances"]["client"]["direct_received_bytes"] = 5
        self.assertEqual(self.failed("b-received"), [])
        for other in ((), ("b-sent",), ("a-received",), ("a-sent", "b-received")):
            self.assertEqual(self.failed(*other), ["direct"])
        self.a["instances"]["server"]["direct_sent_bytes"] = 5
        self.assertEqual(self.failed("b-received"), ["direct"])
        self.assertEqual(self.failed("b-received", "a-sent"), [])

    def test_nothing_does_where_nobody_has_asked_for_it(self):
        self.a["queue_pairs"] = self.b["queue_pairs"] = 1
        self.assertEqual(self.failed("b-received", mode="both"), [])
        self.b["instances"]["client"]["direct_received_bytes"] = 5
        self.assertEqual(self.failed("b-received", mode="both"), ["direct"])

    def test_a_link_has_two_queue_pairs_and_no_more(self):
        self.b["queue_pairs"] = 3
        self.assertEqual(self.failed(), [])
        self.b["queue_pairs"] = 4
        self.assertEqual(self.failed(), ["one-link"])

    def test_both_ends_have_the_library(self):
        self.assertTrue(judge("direct", NOTHING, self.b)[0])


class OnTcp(unittest.TestCase):
    def test_one_end_has_it(self):
        plain = facts("server", 10, "client", link=0)
        self.assertEqual(judge("server-only", plain, NOTHING), ([], []))
        self.assertTrue(judge("server-only", facts("server", 10, "client"), NOTHING)[0])
        self.assertTrue(judge("client-only", plain, plain)[0])

    def test_no_end_has_it(self):
        self.assertEqual(judge("kernel", NOTHING, NOTHING), ([], []))
        self.assertTrue(judge("kernel", facts("server", 10, "client", link=0), NOTHING)[0])

    def test_the_library_is_not_loaded(self):
        self.assertTrue(judge("both", NOTHING, NOTHING)[0])


def document(*peers, link_bytes=0, state="up"):
    """What `rdmasock stat --json` says of this process with a link to each of the peers."""
    totals = dict.fromkeys(rules["BYTES"], 0) | {"tx_link_bytes": link_bytes}
    links = [{"peer": peer, "fabric": "verbs", "state": state} for peer in peers]
    events = dict.fromkeys(rules["EVENTS"], 0) | {"direct_sent_bytes": link_bytes}
    own = {"totals": totals, "events": events, "links": links, "streams": []}
    return {"instances": [{"id": "me", "pid": os.getpid(), "program": "x"} | own]}


class Sampled(unittest.TestCase):
    def after(self, *documents):
        watch = Watch()
        watch.follow(json.dumps(one) for one in documents)
        return watch

    def test_the_most_at_once_is_kept(self):
        seen = self.after(document("p"), document("p", "q"), document("q"), document())
        self.assertEqual((seen.links, seen.instances["me"]["links"], seen.instances["me"]["twice"]), (2, 2, 0))
        self.assertEqual(seen.instances["me"]["peers"], ["p", "q"])

    def test_two_links_to_one_process_are_kept(self):
        self.assertEqual(self.after(document("p", "p"), document("p")).instances["me"]["twice"], 1)

    def test_a_link_that_is_down_is_none(self):
        self.assertEqual(self.after(document("p", "p", state="down")).links, 0)

    def test_the_counters_are_the_last_in_whatever_order_they_come(self):
        seen = self.after(document(link_bytes=5), document(link_bytes=7), document(link_bytes=6))
        self.assertEqual(seen.instances["me"]["tx_link_bytes"], 7)
        self.assertEqual(seen.instances["me"]["direct_sent_bytes"], 7)

    def test_other_process_groups_are_not_ours(self):
        strange = document("p")
        strange["instances"][0]["pid"] = 1
        self.assertEqual(self.after(strange).instances, {})


# Prints the file "now": with --watch as often as it changes, until the one who asked is gone. Writes nothing, for its
# directory goes away while a child of it may still live.
STAT = """#!/bin/bash
cd "$(dirname "$0")" && last=$(<now) && echo "$last" || exit
case $* in *--watch*)
    while sleep 0.01 && kill -0 $PPID 2>/dev/null && [ ! -e end ]; do
        text=$(<now) || exit
        [ "$text" = "$last" ] || echo "$text"
        last=$text
    done ;;
esac
"""


class Watching(unittest.TestCase):
    """The whole program, on a node without packets or queue pairs to count."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.build = pathlib.Path(directory.name)
        self.put("rdmasock", STAT).chmod(0o755)
        self.say(document())

    def put(self, name, text):
        new = self.build / f"{name}.new"
        new.write_text(text)
        return new.rename(self.build / name)

    def say(self, one):
        self.put("now", json.dumps(one) + "\n")

    def start(self, *judging):
        environment = os.environ | {"LAB_BUILD": str(self.build), "LAB_DEVICE": "hosts", "LAB_RDMA": ""}
        command = [RULES, self.build / "facts", *judging]
        self.watch = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.watch.communicate)
        self.addCleanup(self.watch.kill)
        self.wait_fresh()

    def wait_fresh(self):
        deadline = time.monotonic() + 60
        while not (self.build / "facts.fresh").exists():
            self.assertLess(time.monotonic(), deadline, "not made")
            time.sleep(0.01)

    def ask(self):
        (self.build / "facts.fresh").unlink()
        self.watch.send_signal(signal.SIGUSR1)
        self.wait_fresh()

    def end(self):
        self.watch.send_signal(signal.SIGTERM)
        _, wrong = self.watch.communicate(timeout=60)
        facts = self.build / "facts"
        return json.loads(facts.read_text()) if facts.exists() else None, wrong

    def test_what_is_asked_for_is_in_the_facts(self):
        self.start()
        self.say(document("p", "q", link_bytes=9))
        self.ask()
        self.say({"instances": []})
        facts, wrong = self.end()
        self.assertEqual(wrong, "")
        self.assertEqual((facts["links"], facts["instances"]["me"]["tx_link_bytes"]), (2, 9))

    def test_the_last_sample_is_in_the_facts(self):
        self.start()
        self.say(document("p", link_bytes=9))
        self.assertEqual(self.end()[0]["instances"]["me"]["tx_link_bytes"], 9)

    def test_it_fails_when_nobody_samples(self):
        self.start()
        (self.build / "end").touch()
        time.sleep(0.5)
        self.assertIn("nobody has sampled", self.end()[1])

    def test_node_a_judges(self):
        other = self.put("other", json.dumps(facts("client", 20, "me")))
        checks = self.build / "checks"
        self.start("both", other, checks)
        self.say(document("client", link_bytes=1_000_000))
        self.end()
        self.assertIn("counters FAILED", checks.read_text())
        self.assertEqual(self.watch.returncode, 0, "the lines are the verdict")

    def test_node_a_fails_what_is_not_to_be_promoted(self):
        other = self.put("other", json.dumps(NOTHING))
        self.start("server-only", other, self.build / "checks")
        self.say(document("client", link_bytes=1_000_000))
        self.assertTrue(self.end()[1])
        self.assertEqual(self.watch.returncode, 1)


unittest.main()
