"""Ten thousand connections that send nothing, a thousand that read nothing: the head answers as before, and
its memory stays small."""

import os
import pathlib
import re
import resource
import socket
import time
import unittest

from cluster import Cluster, wait_until
from tail import Tail

IDLE = 10_000
MEMORY_MAX_KIB = 16 * 1024  # of all of them; a buffer of 128 KiB for each would be 1.2 GiB
ANSWER_MAX_S = 2.0

SLOW = 1000
# 8 MiB for the frames of all of them, and what each connection is besides: its buffer of 64 KiB that
# libmicrohttpd has touched for the request, its state. It was 270 KiB for each, of frames alone.
SLOW_MEMORY_MAX_KIB = 12 * 1024 + SLOW * 88
SLOW_LEFT_MAX_KIB = 8 * 1024
SLOW_ANSWER_MAX_S = 5.0


def private_kib(pid):
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    raise AssertionError("no Private_Dirty")


def rss_kib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])


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

    def test_readers_that_read_nothing(self):
        slow = []
        with Cluster(nodes=1) as cluster:
            self.addCleanup(lambda: [c.close() for c in slow])
            pid = cluster.node("node-0")["pid_agent"]
            host, port = cluster.address[7:].split(":")
            job_id = cluster.submit("seq -f '%099.0f' 200000")
            self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED")
            request = Tail.request(f"{host}:{port}", f"/api/jobs/{job_id}/logs/tail")
            self.assertGreater(len(Tail(cluster.address, job_id).read()), 20_000_000)
            memory, files = rss_kib(pid), n_files(pid)
            for _ in range(SLOW):
                c = socket.socket()
                c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                c.connect((host, int(port)))
                c.sendall(request)
                slow.append(c)
            log = cluster.node("node-0")["dir"] / "agent.log"
            said = "clients that read slowly hold"
            wait_until(lambda: said in log.read_text(), lambda: rss_kib(pid) - memory)
            began = time.monotonic()
            self.assertIn("ray_version", cluster.get("/api/version"))
            self.assertLess(time.monotonic() - began, SLOW_ANSWER_MAX_S)
            self.assertGreater(len(Tail(cluster.address, job_id).read()), 20_000_000)
            for c in slow:  # each has had its first bytes, so nobody is still to come
                self.assertIn(b"101", c.recv(16, socket.MSG_PEEK))
            self.assertLess(rss_kib(pid) - memory, SLOW_MEMORY_MAX_KIB)
            for c in slow:
                c.close()
            wait_until(lambda: n_files(pid) < files + 50, lambda: n_files(pid))
            wait_until(lambda: rss_kib(pid) - memory < SLOW_LEFT_MAX_KIB, lambda: rss_kib(pid) - memory)
            warnings = [line for line in log.read_text().splitlines() if " WARN " in line]
            self.assertEqual([said in line for line in warnings], [True], warnings)


if __name__ == "__main__":
    unittest.main()
