"""`mobula status --watch`: on a terminal (a real pty), on a pipe, as JSON lines."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import termios
import threading
import time
import unittest

from cluster import MOBULA, Cluster, mini_model, wait_until

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
SEQUENCE = re.compile(r"\x1b\[\??\d*[A-Za-z]")


class Terminal:
    """A child on a pty of its own; what it wrote so far is in .seen."""

    def __init__(self, cluster, *argv, rows=30, columns=100, env=None):
        self.seen = b""
        begins, go = os.pipe()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.close(go)
            os.read(begins, 1)  # not before the window has its size
            os.execve(MOBULA, [str(MOBULA), *argv], {**cluster.env, "TERM": "xterm", **(env or {})})
        self.resize(rows, columns)
        self.modes = termios.tcgetattr(self.fd)
        os.close(begins)
        os.close(go)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def resize(self, rows, columns):
        """The kernel sends SIGWINCH, as for a window."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, timeout_s=0.1):
        if select.select([self.fd], [], [], timeout_s)[0]:
            try:
                self.seen += os.read(self.fd, 65536)
            except OSError:  # EIO: the child has closed it
                return False
        return True

    def drain(self):
        """What is there already: of a moment before this one."""
        while select.select([self.fd], [], [], 0)[0] and self.read(0):
            pass

    def frames(self):
        """The whole pictures so far, each a list of lines without escape sequences."""
        parts = self.seen.decode(errors="replace").split("\x1b[H")[1:]
        return [[SEQUENCE.sub("", line) for line in re.split(r"\r+\n", part.split("\x1b[J")[0])]
                for part in parts if "\x1b[J" in part]

    def wait(self, look, what, timeout_s=60):
        def looked():
            self.read()
            return look()
        return wait_until(looked, lambda: f"{what}: {self.seen[-3000:]!r}", timeout_s)

    def wait_frame(self, look, what, timeout_s=60):
        """Of the frames that come from now on."""
        n = len(self.frames())
        return self.wait(lambda: next((f for f in self.frames()[n:] if look("\n".join(f))), None),
                         what, timeout_s)

    def end(self):
        """Reads to the end; the exit status."""
        status = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not status:
            self.read()
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status.append(os.waitstatus_to_exitcode(code))
                self.pid = 0
        self.drain()
        return status[0] if status else None


class WatchTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, start_args=("--num-gpus", "2")))

    def watch(self, *more, **options):
        return self.enterContext(Terminal(self.cluster, "status", "--watch", "--address",
                                          self.cluster.address, *more, **options))

    def test_redraws_in_place_and_leaves_a_clean_terminal(self):
        t = self.watch()
        t.wait_frame(lambda f: "nodes: 1" in f and "gpu 0/2 used" in f, "the first picture")
        name = self.id().rsplit(".", 1)[1]
        self.cluster.submit(shlex.join(["mobula", "run", "--gpus-per-node", "2", "--", "sleep", "600"]),
                            submission_id=name)
        t.wait_frame(lambda f: "gpu 2/2 used" in f and f"RUNNING   {name}" in f and
                     "gang: RUNNING, 2 ranks on 1 nodes" in f, "the job")
        self.cluster.submit("mobula run --gpus-per-node 1 -- true", submission_id=f"{name}2")
        t.wait_frame(lambda f: "queue: 1 gang waits, backfill order" in f and
                     "waiting for 1 more mobula_gpu on 1 node: node node-0 has 0 free of 2" in f,
                     "the queue")
        self.assertEqual(t.seen.count(ENTER), 1)
        self.assertNotIn(b"\n\n", t.seen.replace(b"\r", b""), "nothing scrolls")
        for job in (name, f"{name}2"):
            self.cluster.call("POST", f"/api/jobs/{job}/stop")
            self.cluster.wait_job(job)
        t.wait_frame(lambda f: "gpu 0/2 used" in f and "queue" not in f, "the end of the job")
        os.write(t.fd, b"\x03")  # as it is typed: the terminal makes it SIGINT
        self.assertEqual(t.end(), 130)
        self.assertTrue(t.seen.rstrip().endswith(LEAVE), t.seen[-200:])
        for on, off in ((b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?7l", b"\x1b[?7h"), (ENTER, LEAVE)):
            self.assertEqual((t.seen.count(on), t.seen.count(off)), (1, 1))
        self.assertEqual(termios.tcgetattr(t.fd), t.modes)

    def test_every_second(self):
        t = self.watch()
        t.wait(lambda: len(t.frames()) >= 4, "four pictures")
        clocks = [re.search(r"(\d\d:\d\d:\d\d)", f[0]).group(1) for f in t.frames()[:4]]
        self.assertEqual(clocks, sorted(clocks))
        self.assertGreaterEqual(len(set(clocks)), 3, clocks)

    def test_a_window_that_changes(self):
        t = self.watch(rows=30, columns=100)
        t.wait_frame(lambda f: "jobs:" in f, "the first picture")
        for rows, columns in ((4, 20), (2, 7), (50, 200), (1, 1), (24, 80)):
            t.resize(rows, columns)
            t.drain()  # of what comes now one at most was begun before
            shown = t.wait_frame(lambda f: True, f"a picture of {rows} x {columns}")
            shown = t.wait_frame(lambda f: True, f"another of {rows} x {columns}")
            self.assertLessEqual(len(shown), rows)
            self.assertLessEqual(max(map(len, shown)), columns, shown)
            if (rows, columns) == (4, 20):
                self.assertRegex(shown[-1], r"^\.\.\. \d+ more lines$")

    def test_ends_by_other_signals_and_stops_for_a_while(self):
        for number in (signal.SIGTERM, signal.SIGHUP):
            t = self.watch()
            t.wait_frame(lambda f: "jobs:" in f, "the first picture")
            os.kill(t.pid, number)
            self.assertEqual(t.end(), 128 + number)
            self.assertTrue(t.seen.rstrip().endswith(LEAVE))
        t = self.watch()
        t.wait_frame(lambda f: "jobs:" in f, "the first picture")
        os.write(t.fd, b"\x1a")  # Ctrl-Z
        t.wait(lambda: t.seen.endswith(LEAVE), "the screen is given back")
        self.assertTrue(os.WIFSTOPPED(os.waitpid(t.pid, os.WUNTRACED)[1]))
        os.kill(t.pid, signal.SIGCONT)
        t.wait_frame(lambda f: "jobs:" in f, "it goes on")
        self.assertEqual(t.seen.count(ENTER), 2)
        os.write(t.fd, b"\x03")
        self.assertEqual(t.end(), 130)

    def test_loss_and_upload(self):
        t = self.watch(columns=200)  # the whole line, whatever speed this machine trains at
        url = f"file://{self.cluster.dir}/store"
        self.cluster.submit(["mobula", "train", "--gpus-per-node", "1", "--checkpoint-url", url,
                             *mini_model(100000, "--save-interval", "1000")], submission_id="learns")
        t.wait_frame(lambda f: re.search(r"iteration \d+/100000, loss \d\.\d{4}, \d+ tokens/s", f) and
                     re.search(rf"durable iteration \d+ in {re.escape(url)}", f), "loss and upload", 120)
        self.cluster.call("POST", "/api/jobs/learns/stop")
        self.cluster.wait_job("learns")

    def test_a_dumb_terminal_gets_blocks(self):
        t = self.watch(env={"TERM": "dumb"})
        t.wait(lambda: b"jobs:" in t.seen, "a block")
        self.assertNotIn(b"\x1b", t.seen)

    # ---- pipes ----

    def piped(self, *more):
        """A reader's view: the lines so far, appended by a thread."""
        process = subprocess.Popen(
            [MOBULA, "status", "--watch", "--address", self.cluster.address, *more],
            env=self.cluster.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))

        def close():
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()
            process.stderr.close()

        # extend() of an iterator appends one by one
        reader.start()
        self.addCleanup(close)
        return process, lines

    def test_a_pipe_gets_a_block_per_change(self):
        process, lines = self.piped()
        wait_until(lambda: any(line.startswith("jobs: ") for line in lines), lambda: lines)
        self.assertRegex(lines[0], r"^---- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$")
        self.cluster.submit("true", submission_id="in-a-pipe")
        self.cluster.wait_job("in-a-pipe")
        wait_until(lambda: any("SUCCEEDED in-a-pipe" in line for line in lines), lambda: lines)
        self.assertNotIn("\x1b", "".join(lines))
        blocks = "".join(lines).split("---- ")[1:]
        bodies = [block.split("\n", 1)[1] for block in blocks]
        for a, b in zip(bodies, bodies[1:]):
            self.assertNotEqual(a, b, "a block without a change")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(60), 130)

    def test_json_lines(self):
        process, lines = self.piped("--json")
        wait_until(lambda: lines, lambda: lines)
        self.cluster.submit("true", submission_id="as-json")
        self.cluster.wait_job("as-json")

        def told():
            facts = [json.loads(line) for line in lines if line.endswith("\n")]
            return any(job["submission_id"] == "as-json" and job["status"] == "SUCCEEDED"
                       for job in facts[-1]["jobs"])

        wait_until(told, lambda: lines[-1])
        self.assertEqual(set(json.loads(lines[0])), {"cluster", "nodes", "queue", "jobs"})
        quiet = [len(lines), time.monotonic()]

        def is_quiet():  # two looks without a change say nothing
            if len(lines) != quiet[0]:
                quiet[:] = len(lines), time.monotonic()
            return time.monotonic() - quiet[1] > 2.5

        wait_until(is_quiet, lambda: lines[-3:])
        for a, b in zip(lines, lines[1:]):
            self.assertNotEqual(a, b, "a line without a change")
        process.terminate()
        self.assertEqual(process.wait(60), 143)

    def test_json_on_a_terminal_is_lines_too(self):
        t = self.watch("--json")
        t.wait(lambda: b"\n" in t.seen, "a line")
        self.assertIn("nodes", json.loads(t.seen.split(b"\r\n")[0]))
        self.assertNotIn(b"\x1b", t.seen)

    def test_a_reader_that_goes_away(self):
        process = subprocess.Popen(
            [MOBULA, "status", "--watch", "--address", self.cluster.address], env=self.cluster.env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            process.stdout.readline()
            process.stdout.close()
            self.cluster.submit("true", submission_id="unread")
            self.assertEqual(process.wait(60), 74)
            self.assertIn("closed", process.stderr.read())

    def test_no_head(self):
        done = self.cluster.mobula("status", "--watch", "--address", "http://127.0.0.1:1")
        self.assertEqual(done.returncode, 69, done.stdout)


class HeadThatComesBack(unittest.TestCase):
    def test_the_picture_stays_and_goes_on(self):
        with Cluster(nodes=1) as cluster, \
                Terminal(cluster, "status", "--watch", "--address", cluster.address) as t:
            t.wait_frame(lambda f: "jobs: 0" in f, "the first picture")
            head = cluster.node("node-0")
            init = int((head["dir"] / "init.pid").read_text().split()[0])
            os.kill(init, signal.SIGSTOP)  # or it would start the next head at once
            try:
                os.kill(head["pid_agent"], signal.SIGKILL)
                t.wait_frame(lambda f: "the head does not answer, asking again" in f and
                             "nodes: 1" in f, "the last facts, and that they are old")
            finally:
                os.kill(init, signal.SIGCONT)
            t.wait_frame(lambda f: "does not answer" not in f and "jobs: 0" in f, "new facts", 60)
            os.write(t.fd, b"\x03")
            self.assertEqual(t.end(), 130)


if __name__ == "__main__":
    unittest.main()
