"""Runs the unittest cases of a module and tells of each in a file: "began NAME", then "passed", "failed" or "skipped NAME".

    cases.py FILE MODULE [--only NAMES | --except NAMES]

What a case prints goes where it goes; the file is opened for each line only, so that no descriptor of ours is in the program's table.
"""

import logging
import os
import sys
import unittest


class Teller(unittest.TestResult):
    """Writes each outcome as it is known. A case that fails in its cleanup has failed, whatever was said before."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.pid = os.getpid()
        self.outcome = None

    def tell(self, word, test):
        # A child that a case has forked may come here too, and is none of the cases.
        if os.getpid() == self.pid:
            name = test.id().replace("\n", " ")
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{word} {name}\n")

    def startTest(self, test):
        super().startTest(test)
        self.outcome = "passed"
        self.tell("began", test)

    def stopTest(self, test):
        super().stopTest(test)
        self.tell(self.outcome, test)
        self.outcome = None

    def set(self, outcome, test):
        # Outside of a case it is a fixture of a class or module.
        if self.outcome is None:
            self.tell(outcome, test)
        elif self.outcome != "failed":
            self.outcome = outcome

    def addError(self, test, err):
        self.report(test, err)
        self.set("failed", test)

    def addFailure(self, test, err):
        self.report(test, err)
        self.set("failed", test)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.report(subtest, err)
            self.set("failed", test)

    def addSkip(self, test, reason):
        self.set("skipped", test)

    def addUnexpectedSuccess(self, test):
        self.set("failed", test)

    def report(self, test, err):
        text = self._exc_info_to_string(err, test) if isinstance(err, tuple) else str(err)
        print(f"---- {test.id()}\n{text}", file=sys.stderr, flush=True)


def flat(tests):
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def as_its_runner(module):
    """Sets what the suite's own runner sets before the cases."""
    if module.startswith("test."):
        from test import support

        # But for what needs a screen or much room. What needs another network than loopback fails.
        support.use_resources = ["cpu", "network", "subprocess", "walltime"]
    elif module.startswith("tornado."):
        # Cases fail for log lines that they do not expect, and these tell of each request.
        logging.getLogger("tornado.access").setLevel(logging.CRITICAL)


def main():
    path, module, *selection = sys.argv[1:]
    sys.argv[1:] = []
    as_its_runner(module)
    tests = list(flat(unittest.defaultTestLoader.loadTestsFromName(module)))
    if selection:
        with open(selection[1], encoding="utf-8") as file:
            names = set(file.read().split("\n"))
        tests = [test for test in tests if (test.id() in names) == (selection[0] == "--only")]
    unittest.TestSuite(tests).run(Teller(path))


if __name__ == "__main__":
    main()
