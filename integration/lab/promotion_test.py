#!/usr/bin/env python3
"""Tests of promotion.py's judgement on made-up facts: a promoted run passes, and each way of not being one fails."""
import copy
import pathlib
import runpy
import unittest

judge = runpy.run_path(str(pathlib.Path(__file__).with_name("promotion.py")))["judge"]


def facts(name, pid, peer, link=1_000_000, tcp=20_000):
    instance = {
        "pid": pid, "program": name, "peers": [peer] if link else [], "fabrics": ["verbs"] if link else [],
        "links": int(link > 0), "twice": 0, "why": [], "promoted": int(link > 0), "demoted": 0, "streams": 1,
        "tx_tcp_bytes": tcp, "rx_tcp_bytes": 0, "tx_link_bytes": link, "rx_link_bytes": 0,
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
        self.assertEqual(len(judge("both", self.a, self.b)[1]), 4)

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


unittest.main()
