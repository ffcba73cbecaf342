#!/usr/bin/env python3
"""docs/complaints.md: each row says what was asked for and done, and names tests that exist and run.

Usage: test_complaints.py BUILD-DIR CTEST
"""

import json
import pathlib
import re
import subprocess
import sys
import unittest

CTEST = sys.argv.pop(2)
BUILD = sys.argv.pop(1)
ROOT = pathlib.Path(__file__).resolve().parents[3]
ROWS = 27
# Where a test named "FOLDER/FILE" lies.
FOLDERS = {"unit": "tests", "gpu": "tests"}


def rows():
    for line in (ROOT / "docs/complaints.md").read_text().splitlines():
        if re.match(r"\| \d+ \|", line):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def registered():
    """File names in the commands of ctest: sources of programs, and scripts."""
    done = subprocess.run([CTEST, "--test-dir", BUILD, "--show-only=json-v1"], check=True,
                          stdout=subprocess.PIPE)
    words = [w for t in json.loads(done.stdout)["tests"] for w in t.get("command", [])]
    return {pathlib.Path(w).name for w in words}


class Complaints(unittest.TestCase):
    def test_rows(self):
        found = list(rows())
        self.assertEqual([int(r[0]) for r in found], list(range(1, ROWS + 1)))
        for number, threads, behaviour, tests in found:
            with self.subTest(row=number):
                for thread in threads.split(", "):
                    self.assertRegex(thread, r"^[a-z][a-z-]*#\d+$")
                self.assertGreater(len(behaviour), 20)
                self.assertTrue(tests)

    def test_every_test_exists_and_is_run(self):
        scripts = registered()
        for number, _, _, tests in rows():
            for test in tests.split(", "):
                with self.subTest(row=number, test=test):
                    path, _, name = test.partition(" ")
                    base = FOLDERS.get(path.split("/")[0], "tests/integration")
                    file = ROOT / base / path
                    text = file.read_text()
                    if name:
                        self.assertRegex(text, rf"(?m)^\s*(class|def|static void) {name}\b")
                    if file.name.startswith("test_") and file.suffix == ".py":
                        self.assertIn(file.name, scripts)
                    elif file.suffix == ".c":  # its program is registered beside it
                        self.assertIn(file.name, (file.parent / "CMakeLists.txt").read_text())


if __name__ == "__main__":
    unittest.main()
