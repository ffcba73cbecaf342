"""Who has keys of an object store in memory leaves no core dump: signals that make one, with no limit to its size.

The kernel has to write cores into the working directory (core_pattern "core" or so, no pipe): a process of another kind
shows that it does, or the test is skipped."""

import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

from cluster import Cluster, is_alive, wait_until

SECRET = "a-secret-that-no-core-has"
KEYS = {"BUCKET_STORAGE_ACCESS_KEY": "tester", "BUCKET_STORAGE_SECRET_KEY": SECRET, "AWS_REGION": "us-east-1"}
SIGNALS = (signal.SIGABRT, signal.SIGSEGV)


def cores(directory):
    return sorted(p.name for p in pathlib.Path(directory).glob("core*"))


def end(process, signum):
    """Non-zero: it left a core."""
    process.send_signal(signum)
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -signum
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signum, status
    return os.WCOREDUMP(status)


def why_not():
    """Why this machine cannot show it; None: it can."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, PermissionError) as e:
        return f"no core may be large here: {e}"
    with tempfile.TemporaryDirectory() as directory:
        with subprocess.Popen(["sleep", "60"], cwd=directory) as other:
            has_core = end(other, signal.SIGABRT)
        if not has_core or not cores(directory):
            return "the kernel writes no core into the working directory (core_pattern)"
    return None


def copies(pid, word):
    """Of a word in what a process may write to: (in pages that core dumps leave out, names of others that have it)."""
    hidden, others = 0, []
    with open(f"/proc/{pid}/smaps") as smaps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in smaps:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line):
                begin, stop, rights, name = int(match[1], 16), int(match[2], 16), match[3], match[4]
            elif line.startswith("VmFlags:") and rights.startswith("rw"):
                memory.seek(begin)
                n = memory.read(stop - begin).count(word.encode())
                if "dd" in line.split():
                    hidden += n
                else:
                    others += [name] * n
    return hidden, others


class CoresTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2, env=KEYS))

    def setUp(self):
        self.dir = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-cores-"))

    def start(self, *words, **env):
        full = {k: v for k, v in {**self.cluster.env, **env}.items() if v is not None}
        process = subprocess.Popen(self.cluster.command(words), env=full, cwd=self.dir, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(lambda: process.poll() is None and (process.kill(), process.wait()))
        return process

    def test_push(self):
        """It waits for a store that takes connections and answers nothing."""
        top = pathlib.Path(self.dir, "ckpt")
        (top / "iter_0000001").mkdir(parents=True)
        (top / "iter_0000001/x").write_bytes(b"x")
        (top / "latest_checkpointed_iteration.txt").write_text("1")
        with socket.create_server(("127.0.0.1", 0)) as store:
            store.settimeout(60)
            for signum in SIGNALS:
                process = self.start("checkpoint", "push", top, "s3://bucket/run",
                                     BUCKET_STORAGE_HOST=f"http://127.0.0.1:{store.getsockname()[1]}")
                connection, _ = store.accept()
                with connection:
                    self.assertIn(b"tester", connection.recv(4096))  # it is signed: the key was read
                    hidden, others = copies(process.pid, SECRET)
                    self.assertEqual((hidden, others), (1, ["[stack]"]))  # and the environment it was given
                    self.assertFalse(end(process, signum))
                    self.assertEqual(cores(self.dir), [])

    def run_and_end(self, signum, **env):
        mark = pathlib.Path(self.dir, "started")
        mark.unlink(missing_ok=True)
        process = self.start("run", "--lease", "5s", "--", "sh", "-c", f"touch {mark}; exec sleep 600", **env)
        wait_until(lambda: mark.exists() or process.poll() is not None, "the rank runs", 60)
        has_core = end(process, signum)
        self.cluster.assert_all_free(120)
        return has_core

    def test_run(self):
        for signum in SIGNALS:
            self.assertFalse(self.run_and_end(signum))
            self.assertEqual(cores(self.dir), [])
        nothing = {name: None for name in KEYS}
        self.assertTrue(self.run_and_end(signal.SIGABRT, **nothing), "so that this test can fail")

    def test_z_agent_and_its_front_process(self):
        node = self.cluster.node("node-1")
        for signum in SIGNALS:
            pid = self.cluster.node("node-1")["pid_agent"]
            where = os.readlink(f"/proc/{pid}/cwd")
            before = cores(where)
            os.kill(pid, signum)
            wait_until(lambda pid=pid: not is_alive(pid), "the agent ends", 30)
            self.assertEqual(cores(where), before)
            wait_until(lambda pid=pid: self.cluster.node("node-1")["pid_agent"] != pid, "its front process starts another", 60)
        pid = node["pid_init"]
        where = os.readlink(f"/proc/{pid}/cwd")
        before = cores(where)
        os.kill(pid, signal.SIGSEGV)
        wait_until(lambda: not is_alive(pid), "the front process ends", 30)
        self.assertEqual(cores(where), before)
        os.kill(self.cluster.node("node-1")["pid_agent"], signal.SIGKILL)
        self.cluster.forget_node(node)


if __name__ == "__main__":
    if reason := why_not():
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main()
