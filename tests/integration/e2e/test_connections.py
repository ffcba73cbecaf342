"""Ten thousand connections that send nothing: the head answers as before, and its memory stays small."""

import os
import pathlib
import resource
import socket
import time
import unittest

from cluster import Cluster, wait_until

IDLE = 10_000
MEMORY_MAX_KIB = 16 * 1024  # of all of them; a buffer of 128 KiB for each would be 1.2 GiB
ANSWER_MAX_S = 2.0


def private_kib(pid):
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    raise AssertionError("no Private_Dirty")


def n_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Connections(unittest.TestCase):
    def setUp(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self.assertGreaterEqual(hard, 2 * IDLE, "this test needs `ulimit -Hn` of 20000")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def test_idle(self):
        idle = []
        with Cluster(nodes=1) as cluster:
            self.addCleanup(lambda: [c.close() for c in idle])
            pid = cluster.node("node-0")["pid_agent"]
            host, port = cluster.address[7:].split(":")
            cluster.get("/api/version")
            memory, files = private_kib(pid), n_files(pid)
            for _ in range(IDLE):
                idle.append(socket.create_connection((host, int(port)), timeout=10))
            wait_until(lambda: n_files(pid) >= IDLE, lambda: n_files(pid))  # earlier ones may be gone
            self.assertLess(private_kib(pid) - memory, MEMORY_MAX_KIB)
            began = time.monotonic()
            self.assertIn("ray_version", cluster.get("/api/version"))
            self.assertLess(time.monotonic() - began, ANSWER_MAX_S)
            job_id = cluster.submit("echo still here")
            self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED")
            self.assertIn("still here", cluster.logs(job_id))
            for c in idle:
                c.close()
            wait_until(lambda: n_files(pid) < files + 50, lambda: n_files(pid))


if __name__ == "__main__":
    unittest.main()
