"""The head answers within two seconds, whatever else it does: KubeRay's operator waits no longer for an answer.

Each test makes one bad moment and lets another process ask the head, and a node, all the while."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

import s3
from cluster import MOBULA, Cluster, is_alive, train_command, wait_until
from tail import Tail

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "s3"))
from faults import FaultProxy  # noqa: E402

BOUND_S = 2
SLOW_DISK = MOBULA.parents[1] / "tests/integration/e2e/libslow_disk.so"


def ask(urls):
    """In turn until stdin ends, a line when each has answered once; then the slowest answer of each."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    slowest, rounds = dict.fromkeys(urls, 0.0), 0
    while not over.wait(0.02):
        for url in urls:
            began = time.monotonic()
            with urllib.request.urlopen(url, timeout=60) as reply:
                reply.read()
            slowest[url] = max(slowest[url], time.monotonic() - began)
        rounds += 1
        if rounds == 1:
            print("asking", flush=True)
    print(json.dumps([rounds, slowest]))


def at_once(calls):
    """Each in a thread of its own; what one raises is raised here."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(c) for c in calls]:
            future.result()


class Answers(unittest.TestCase):
    @contextlib.contextmanager
    def answers(self, cluster, *paths):
        """All that KubeRay and kubelets ask, and these paths of the head."""
        head = cluster.node("node-0")
        urls = [cluster.address + p for p in ("/api/version", "/api/gcs_healthz", *paths)]
        urls += [f"http://127.0.0.1:{head['http_port']}/api/healthz"]
        p = subprocess.Popen([sys.executable, __file__, "--ask", *urls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.assertEqual(p.stdout.readline(), "asking\n")
            yield
            out, _ = p.communicate(timeout=100)
        finally:
            p.kill()
            p.communicate()
        self.assertEqual(p.returncode, 0)
        rounds, slowest = json.loads(out)
        self.assertGreater(rounds, 1)
        print(self.id().split(".")[-1], {url.split("/", 3)[3]: round(s, 2) for url, s in slowest.items()}, flush=True)
        for url, seconds in slowest.items():
            self.assertTrue(0 < seconds < BOUND_S, f"{url}: {seconds:.2f} s")

    def test_thousands_of_jobs(self):
        """In line, listed by four at a time."""
        with Cluster(nodes=1) as cluster:
            for i in range(3000):
                cluster.submit("true", submission_id=f"waits-{i}", entrypoint_resources={"nowhere": 1}, metadata={"note": "x" * 500})
            with self.answers(cluster, "/api/jobs/waits-0"):
                at_once([lambda: [cluster.get("/api/jobs/") for _ in range(3)]] * 4)
            self.assertEqual(len(cluster.get("/api/jobs/")), 3000)

    def test_packages_come_while_logs_are_followed(self):
        """Forty follow what a job writes as fast as it can, and half of them do not read."""
        package = os.urandom(1 << 20) * 90
        with Cluster(nodes=1) as cluster:
            cluster.submit("yes 'a line of some length that is written again and again' | head -c 100000000; sleep 1000", submission_id="talks")
            cluster.wait_job("talks", ("RUNNING",))
            with contextlib.ExitStack() as stack:
                tails = [Tail(cluster.address, "talks") for _ in range(40)]
                for t in tails:
                    stack.callback(t.socket.close)
                    stack.callback(t.file.close)
                stack.enter_context(self.answers(cluster, "/api/jobs/talks"))
                readers = [lambda t=t: [t.frame() for _ in range(200)] for t in tails[::2]]
                puts = [lambda i=i: self.assertEqual(cluster.call(
                    "PUT", f"/api/packages/gcs/_ray_pkg_{i:040x}.zip", raw=package)[0], 200) for i in range(3)]
                at_once(readers + puts)

    def test_a_store_that_is_away_and_the_end(self):
        """A checkpoint cannot be sent; then the head's node is told to go, and has time for it."""
        with tempfile.TemporaryDirectory(prefix="mb-answers-") as top, s3.server(top) as port, FaultProxy(port) as proxy, \
                Cluster(env={**s3.environment(proxy.port), "MOBULA_GRACE_SECONDS": "60"}) as cluster:
            pid = cluster.node("node-0")["pid_init"]
            cluster.submit(train_command(f"s3://{s3.BUCKET}/away", 100_000, "--save-interval", "300", "--log-interval", "50",
                                         "--eval-interval", "100000"), submission_id="away")
            wait_until(lambda: "successfully saved" in cluster.logs("away"), "a first save", 60)
            proxy.silent = True
            wait_until(lambda: cluster.logs("away").count("successfully saved") > 1, "a save that cannot be sent", 60)
            with self.answers(cluster, "/api/jobs/away"):
                os.kill(pid, signal.SIGTERM)
                end = time.monotonic() + 10
                wait_until(lambda: time.monotonic() > end, "", 20)
                self.assertTrue(is_alive(pid))
            proxy.silent = False
            proxy.cut()
            wait_until(lambda: not is_alive(pid), "the node has gone", 60)

    def test_a_slow_disk(self):
        """Each flush takes longer than the bound, as beside ranks that write checkpoints: what waits for one waits alone."""
        with tempfile.TemporaryDirectory(prefix="mb-answers-") as top:
            slow = pathlib.Path(top, "slow")
            with Cluster(nodes=2, env={"LD_PRELOAD": str(SLOW_DISK), "SLOW_DISK_WHILE": str(slow), "SLOW_DISK_MS": "2500"}) as cluster:
                for node in cluster.nodes():
                    self.assertIn(SLOW_DISK.name, pathlib.Path(f"/proc/{node['pid_agent']}/maps").read_text())
                cluster.submit("sleep 1000", submission_id="sleeps")
                cluster.wait_job("sleeps", ("RUNNING",))
                with self.answers(cluster, "/api/jobs/sleeps"):
                    slow.touch()
                    cluster.submit(train_command(f"file://{top}/store", 20, "--save-interval", "20", "--save", f"{top}/saves",
                                                 "--eval-interval", "100000"), submission_id="trains")
                    self.assertEqual(cluster.wait_job("trains", timeout_s=200)["status"], "SUCCEEDED", cluster.logs("trains"))
                slow.unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ask"]:
        ask(sys.argv[2:])
    else:
        unittest.main()
