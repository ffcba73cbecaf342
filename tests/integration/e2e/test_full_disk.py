"""Filesystems that a job may meet: no room, and no holes in files.

A full disk under the save directory: the job FAILED with one clear line, nothing that looks whole.

The small filesystem is a tmpfs of this test's own mount namespace: as root, or in a user namespace.
Where the kernel allows neither, ctest counts the test as skipped.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from cluster import Cluster, NoCluster, train_command, wait_until

SKIPPED = 77  # SKIP_RETURN_CODE of this test
INSIDE = "MOBULA_TEST_MAY_MOUNT"
SIZE = "128k"  # one checkpoint of the model below needs more


class FullDisk(unittest.TestCase):
    def test_checkpoint(self):
        self.fill()

    def test_asynchronous_checkpoint(self):
        self.fill("--async-save")

    def test_checkpoint_of_megatron(self):
        self.fill("--ckpt-format", "torch")

    def fill(self, *more):
        with Cluster() as c:
            small = pathlib.Path(c.dir) / "small"
            small.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", small], check=True)
            try:
                job_id = c.submit(train_command(f"file://{c.dir}/store", 4, "--save-interval", "4",
                                                "--save", str(small), *more))
                job, log = c.wait_job(job_id), c.logs(job_id)
                self.assertEqual(job["status"], "FAILED", log)
                self.assertRegex(log[-3000:], r"mobula: rank \d .*" + str(small))
                self.assertIn("No space left", log[-3000:])
                self.assertFalse((small / "latest_checkpointed_iteration.txt").exists())
                self.assertEqual([p.name for p in small.glob("iter_*")], [], "looks like a checkpoint")
            finally:
                subprocess.run(["umount", small], check=True)


class Head(unittest.TestCase):
    """The head's own directory is full: it says so, keeps what it has confirmed, and goes on when there is room."""

    def test_no_room_for_records(self):
        small = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-full-", dir="/tmp")))
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", small], check=True)
        self.addCleanup(subprocess.run, ["umount", small], check=True)
        c = Cluster(nodes=1)
        c.temp = str(small / "c")
        with c:
            self.try_it(c, small)

    def try_it(self, c, small):
        c.submit("sleep 1000", submission_id="stopped")
        c.wait_job("stopped", ("RUNNING",))
        with open(small / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
            while f.write(bytes(4096)):
                pass
        status, answer = c.call("POST", "/api/jobs/", {"entrypoint": "true", "submission_id": "refused"})
        self.assertEqual(status, 500, answer)
        self.assertEqual(c.call("GET", "/api/jobs/refused")[0], 404)
        for _ in range(50):  # KubeRay's operator waits no longer for an answer
            began = time.monotonic()
            self.assertEqual(c.job("stopped")["status"], "RUNNING")
            self.assertLess(time.monotonic() - began, 2)
        c.call("POST", "/api/jobs/stopped/stop")  # takes effect, whether it is written down or not
        c.wait_job("stopped", ("STOPPED",), timeout_s=60)
        pid = c.node("node-0")["pid_agent"]
        os.kill(pid, signal.SIGKILL)
        (small / "filler").unlink()
        wait_until(lambda: c.node("node-0")["pid_agent"] != pid and c.is_up(), "the agent is back", 60)
        job = c.wait_job("stopped", timeout_s=60)
        self.assertEqual(job["status"], "STOPPED", job)
        self.assertEqual(c.wait_job(c.submit("true"), timeout_s=60)["status"], "SUCCEEDED")


class NoHoles(unittest.TestCase):
    def test_a_cap_that_cannot_be_kept_is_refused(self):
        with NoCluster() as c:
            ram = pathlib.Path(c.dir) / "ram"
            ram.mkdir()
            subprocess.run(["mount", "-t", "ramfs", "ramfs", ram], check=True)
            start = ("start", "--head", "--temp-dir", str(ram / "c"), "--port", "0",
                     "--dashboard-port", "0", "--dashboard-agent-listen-port", "0")
            try:
                done = c.mobula(*start, "--log-max-bytes", "1M")
                self.assertEqual(done.returncode, 78, done.stdout)
                self.assertIn("cannot release the front of a file", done.stdout)
                done = c.mobula(*start)
                self.assertEqual(done.returncode, 0, done.stdout)
                log = "".join(p.read_text() for p in (ram / "c").glob("node_*/agent.log"))
                self.assertEqual(log.count("LOGS ARE NOT CAPPED"), 1, log)
                done = c.mobula("stop", "--temp-dir", str(ram / "c"))
                self.assertEqual(done.returncode, 0, done.stdout)
            finally:
                subprocess.run(["umount", ram], check=True)


def main():
    if os.environ.get(INSIDE):
        unittest.main()
    ways = [["unshare", "--map-root-user", "--mount"]]
    if os.geteuid() == 0:
        # In a chroot the root is no mount point, whose propagation could be changed.
        ways = [["unshare", "--mount"], *ways, ["unshare", "--mount", "--propagation", "unchanged"]]
    for prefix in ways:
        tried = subprocess.run([*prefix, "sh", "-c", "mount -t tmpfs tmpfs /mnt && umount /mnt"],
                               capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return subprocess.run([*prefix, sys.executable, *sys.argv],
                                  env={**os.environ, INSIDE: "1"}, check=False).returncode
    print(f"skipped: no filesystem can be mounted here: {tried.stderr.strip()}")
    return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
