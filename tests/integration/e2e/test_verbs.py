"""`mobula job submit|list|status|logs|stop|delete`: exit statuses that tell the truth, and --json.

The rows of docs/operations.md, "Exit statuses", as far as the job verbs can end with them; the
others are in the tests of what they are about. kuberay#3257: a job that FAILED is no success.
"""

import json
import pathlib
import re
import subprocess
import unittest

from cluster import Cluster, NoCluster


class Verbs(unittest.TestCase):
    def verb(self, *argv, status=0, **more):
        verb, *rest = argv
        done = self.cluster.mobula("job", verb, "--address", self.cluster.address, *rest, **more)
        self.assertEqual(done.returncode, status, (argv, done.stdout))
        return done.stdout


class VerbsTest(Verbs):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=1))

    def submit(self, job_id, *command, status=0, options=()):
        return self.verb("submit", "--submission-id", job_id, *options, "--", *command, status=status)

    def lines(self, text):
        return [json.loads(line) for line in text.splitlines()]

    def test_succeeds(self):
        said = self.submit("good", "echo", "hello")
        self.assertIn("\nhello\n", said)
        self.assertIn("Job 'good' succeeded", said)
        self.assertIn("Job 'good' succeeded", self.verb("status", "good"))
        self.assertTrue(self.verb("logs", "good").endswith("\nhello\n"))
        self.assertIn("Job 'good' succeeded", self.verb("logs", "-f", "good"))
        self.assertRegex(self.verb("list"), r"(?m)^SUCCEEDED +good +echo hello$")
        self.assertIn("succeeded", self.verb("stop", "good"))
        self.assertIn("deleted", self.verb("delete", "good"))
        self.verb("status", "good", status=66)

    def test_fails(self):
        self.assertIn("Job 'bad' failed", self.submit("bad", "sh", "-c", "echo oh; exit 9", status=1))
        self.verb("status", "bad")  # the question was answered
        self.assertTrue(self.verb("logs", "bad").endswith("\noh\n"))
        self.verb("logs", "-f", "bad", status=1)
        self.verb("delete", "bad")

    def test_a_job_has_no_power_over_a_terminal(self):
        """Its message has its last lines: whoever looked had his screen cleared and a title set."""
        said = self.submit("esc", "printf", "over\\n\\033[2J\\033]0;title\\007", status=0)
        self.assertIn("\x1b[2J\x1b]0;title\x07", said)  # a log is what it is
        said = self.submit("esc-3", "sh", "-c", "printf 'over\\n\\033[2J\\033]0;title\\007'; exit 3",
                           status=1)
        shown = "over\n\\x1b[2J\\x1b]0;title\\x07\n"
        self.assertIn(shown, said.split("Job 'esc-3' failed: ")[1])
        for text in (self.verb("status", "esc-3"), self.verb("stop", "esc-3")):
            self.assertIn(shown, text)
            self.assertNotIn("\x1b", text)
        said = self.verb("logs", "-f", "esc-3", status=1)
        self.assertIn(shown, said.split("Job 'esc-3' failed: ")[1])
        self.assertNotIn("\x1b", self.verb("status", "\x1b[2J", status=66))
        for job_id in ("esc", "esc-3"):
            self.verb("delete", job_id)

    def test_is_stopped(self):
        self.submit("long", "sleep", "600", options=("--no-wait",))
        with self.cluster.running("job", "logs", "-f", "--address", self.cluster.address,
                                  "long") as follower:
            self.cluster.wait_job("long", ("RUNNING",))
            self.verb("delete", "long", status=71)
            self.submit("long", "true", status=72)
            self.assertIn("was stopped", self.verb("stop", "long"))
            self.assertEqual(follower.wait(60), 130, follower.output())
        self.verb("logs", "-f", "long", status=130)
        self.verb("delete", "long")

    def test_json(self):
        told = json.loads(self.submit("j1", "sleep", "600", options=("--no-wait", "--json")))
        self.assertEqual(told["submission_id"], "j1")
        self.cluster.wait_job("j1", ("RUNNING",))
        self.assertEqual(json.loads(self.verb("status", "--json", "j1"))["status"], "RUNNING")
        self.assertIn("j1", [job["submission_id"] for job in json.loads(self.verb("list", "--json"))])
        self.assertEqual(json.loads(self.verb("stop", "--no-wait", "--json", "j1")), {"stopped": True})
        self.assertEqual(json.loads(self.verb("stop", "--json", "j1"))["status"], "STOPPED")
        self.assertEqual(json.loads(self.verb("delete", "--json", "j1")), {"deleted": True})

        first, *log, last = self.lines(self.submit("j2", "sh", "-c", "echo a; echo b; exit 2",
                                                   status=1, options=("--json",)))
        self.assertEqual(first["submission_id"], "j2")
        self.assertEqual([line["line"] for line in log][-2:], ["a", "b"])
        self.assertEqual((last["status"], last["driver_exit_code"]), ("FAILED", 2))
        self.assertEqual([row["line"] for row in self.lines(self.verb("logs", "--json", "j2"))][-2:],
                         ["a", "b"])
        self.verb("delete", "j2")

    def failed_as_json(self, *argv):
        """The one line that stderr has, and nothing on stdout."""
        done = self.cluster.mobula(*argv, stderr=subprocess.PIPE)
        with self.subTest(argv=argv):
            self.assertEqual(done.stdout, "")
            line, = done.stderr.splitlines()
            told = json.loads(line)
            self.assertEqual(list(told), ["error"])
            self.assertEqual(sorted(told["error"]), ["code", "message", "name"])
            self.assertEqual(told["error"]["code"], done.returncode)
        return told["error"]

    def test_errors_as_json(self):
        """The statuses are those without --json, wherever it stands."""
        at = ("--address", self.cluster.address)
        for verb in ("status", "logs", "stop", "delete"):
            for words in (("nobody", "--json"), ("--json", "nobody")):
                error = self.failed_as_json("job", verb, *at, *words)
                self.assertEqual((error["code"], error["name"]), (66, "ENOENT"))
                self.assertIn("nobody", error["message"])
        away = ("--address", "http://127.0.0.1:1")
        for argv in (("job", "list"), ("job", "status", "a"), ("status",)):
            error = self.failed_as_json(*argv, *away, "--json")
            self.assertEqual((error["code"], error["name"]), (69, "EUNAVAIL"))
        for argv in (("job", "stop", "--forse", "a", "--json"), ("job", "stop", "--json", "--forse", "a"),
                     ("job", "list", "--json", "word"), ("job", "submit", "--json"), ("job", "lits", "--json"),
                     ("jbo", "list", "--json"), ("version", "--json", "word")):
            error = self.failed_as_json(*argv)
            self.assertEqual((error["code"], error["name"]), (64, "EINVAL"))
        self.assertIn("unknown flag --forse", self.failed_as_json("job", "stop", "--forse", "--json", "a")["message"])
        told = self.verb("submit", "--forse", "--", "true", "--json", status=64)
        self.assertTrue(told.startswith("mobula: "), told)  # that --json is the command's

    def test_an_answer_that_cannot_be_written(self):
        """/dev/full takes nothing; what is larger than a buffer fails before the end, the rest at it."""
        long = "true " + "x" * 20000
        self.submit("unwritten", *long.split())
        with open("/dev/full", "w") as full:
            for options in ([], ["--json"]):
                for words in (["job", "list"], ["job", "status", "unwritten"], ["job", "stop", "unwritten"],
                              ["job", "submit", "--no-wait"],
                              ["job", "logs", "-f", "unwritten"], ["status"], ["status", "--watch"]):
                    command = ["--", "true"] if "submit" in words else []
                    done = subprocess.run(
                        self.cluster.command([*words, "--address", self.cluster.address, *options, *command]),
                        env=self.cluster.env, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE,
                        text=True, timeout=60, check=False)
                    with self.subTest(words=words, options=options):
                        self.assertEqual(done.returncode, 74, done.stderr)
                        self.assertRegex(done.stderr, "closed")

    def test_unknown_job(self):
        for verb in ("status", "logs", "stop", "delete"):
            self.assertIn("nobody", self.verb(verb, "nobody", status=66))
        self.verb("logs", "-f", "nobody", status=66)

    def test_wrong_words(self):
        for argv in (("status",), ("logs", "a", "b"), ("stop", "--forse", "a"), ("list", "a"),
                     ("submit",), ("submit", "--runtime-env-json", "[", "--", "true")):
            self.verb(*argv, status=64)
        self.assertEqual(self.cluster.mobula("job", "sumbit").returncode, 64)

    def test_a_limit_out_of_bounds_is_refused_before_the_job_is_taken(self):
        for flag, value, bounds in (("--memory-limit", "12", "at least 1MiB"),
                                    ("--memory-limit", "0", "at least 1MiB"),
                                    ("--memory-limit", "much", "a size like"),
                                    ("--log-max-bytes", "1000", "0 (no cap) or at least 256KiB"),
                                    ("--nofile", "9", "16 to 1073741824"),
                                    ("--nofile", "2G", "16 to 1073741824")):
            told = self.verb("submit", "--submission-id", "bounds", flag, value, "--", "true", status=64)
            self.assertIn(flag, told)
            self.assertIn(bounds, told)
        self.verb("status", "bounds", status=66)
        self.assertIn("\n262144 2147483648 77\n", self.submit(
            "limits", "sh", "-c", "echo $MOBULA_LOG_MAX_BYTES $MOBULA_JOB_MEMORY_LIMIT $(ulimit -n)",
            options=("--log-max-bytes", "256KiB", "--memory-limit", "2GiB", "--nofile", "77")))

    def test_no_head(self):
        for argv in (("list",), ("status", "a"), ("logs", "a"), ("stop", "a"), ("delete", "a")):
            done = self.cluster.mobula("job", *argv, "--address", "http://127.0.0.1:1")
            self.assertEqual(done.returncode, 69, done.stdout)

    def test_the_table_names_every_status(self):
        """Those that a verb can end with are rows of the table."""
        page = pathlib.Path(__file__).parents[3] / "docs" / "operations.md"
        table = page.read_text().split("## Exit statuses")[1].split("\n## ")[0]
        rows = set(re.findall(r"(?m)^\| (\d+)", table))
        self.assertLessEqual({"0", "1", "64", "66", "69", "71", "72", "73", "77", "130"}, rows)


class FullQueue(Verbs):
    def test_it_is_said(self):
        with Cluster(nodes=1, start_args=("--max-running-jobs", "1", "--max-queued-jobs",
                                          "1")) as self.cluster:
            for name in ("runs", "waits"):
                self.verb("submit", "--no-wait", "--submission-id", name, "--", "sleep", "600")
            self.cluster.wait_job("runs", ("RUNNING",))
            said = self.verb("submit", "--no-wait", "--", "true", status=73)
            self.assertIn("1 jobs wait already", said)
            for name in ("waits", "runs"):
                self.verb("stop", name)


class Token(Verbs):
    def test_a_wrong_token(self):
        with Cluster(nodes=1) as self.cluster:
            token = pathlib.Path(self.cluster.dir) / "token"
            token.write_text("0123456789abcdef0123456789abcdef")
            token.chmod(0o600)
            env = {"MOBULA_TEMP_DIR": f"{self.cluster.dir}/with-token"}
            start = self.cluster.mobula(
                "start", "--head", "--port", "0", "--dashboard-port", "0",
                "--dashboard-agent-listen-port", "0", "--token-file", token, env=env)
            self.assertEqual(start.returncode, 0, start.stdout)
            address = re.search(r"job submit --address (\S+)", start.stdout).group(1)
            try:
                self.assertEqual(self.cluster.mobula("job", "list", "--address", address).returncode,
                                 77)
                listed = self.cluster.mobula("job", "list", "--json", "--address", address,
                                             env={"RAY_AUTH_MODE": "token",
                                                  "RAY_AUTH_TOKEN_PATH": str(token)})
                self.assertEqual((listed.returncode, json.loads(listed.stdout)), (0, []))
            finally:
                stopped = self.cluster.mobula("stop", env=env)
                self.assertEqual(stopped.returncode, 0, stopped.stdout)


class StopTest(unittest.TestCase):
    def test_nodes_as_json(self):
        with Cluster(nodes=2) as cluster:
            dirs = sorted(str(n["dir"]) for n in cluster.nodes())
            for expected in (dirs, []):
                done = cluster.mobula("stop", "--json", "--temp-dir", cluster.temp, timeout=120)
                self.assertEqual(done.returncode, 0, done.stdout)
                said = json.loads(done.stdout)
                self.assertEqual((said["ok"], said["killed_processes"]), (True, 0))
                self.assertEqual(sorted(n["dir"] for n in said["nodes"]), expected)
                self.assertEqual([(n["stopped"], n["error"]) for n in said["nodes"]], [(True, "")] * len(expected))

    def test_nothing_runs_there(self):
        with NoCluster() as cluster:
            done = cluster.mobula("stop", "--json", "--temp-dir", cluster.temp)
            self.assertEqual(json.loads(done.stdout), {"ok": True, "nodes": [], "killed_processes": 0})



if __name__ == "__main__":
    unittest.main()
