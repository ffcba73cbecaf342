"""SIGKILL of the head at random moments, under writes through gRPC and REST: what was acknowledged is
there, and a running job goes on with its log.

kuberay#1489, kuberay#3903, kuberay#2161, kuberay#4217: a restarted head has its jobs.
"""

import json
import os
import pathlib
import random
import re
import signal
import threading
import time
import unittest
import urllib.error
import urllib.request

from cluster import Cluster, is_alive, wait_until
from ray._raylet import GcsClient

KILLS = 20
SEED = int(os.environ.get("MB_SEED", "20260"))


class Writer(threading.Thread):
    """Writes one after the other; `kept` is what was acknowledged."""

    def __init__(self, write):
        super().__init__(daemon=True)
        self.write = write
        self.kept = []
        self.refused = 0
        self.ends = threading.Event()
        self.start()

    def run(self):
        n = 0
        while not self.ends.is_set():
            try:
                self.write(n)
                self.kept.append(n)
            except Exception:  # whatever the client raises: it was not acknowledged
                self.refused += 1
                self.ends.wait(0.02)
            n += 1

    def stop(self):
        self.ends.set()
        self.join(120)
        assert not self.is_alive(), "a writer hangs"


class StoreKill(unittest.TestCase):
    def test_acknowledged_writes_survive(self):
        print(f"MB_SEED={SEED}")
        dice = random.Random(SEED)
        with Cluster(nodes=1) as cluster:
            cluster.submit("i=0; while :; do echo line $i; i=$((i+1)); sleep 0.05; done",
                           submission_id="goes-on")
            cluster.wait_job("goes-on", ("RUNNING",))
            clients = {}

            def put(n):
                key = threading.get_ident()
                if key not in clients:
                    clients[key] = GcsClient(address=cluster.gcs)
                clients[key].internal_kv_put(b"%d-%d" % (key, n), b"value %d" % n, True,
                                             namespace=b"test", timeout=2)

            def submit(n):
                body = json.dumps({"entrypoint": "true", "submission_id": f"job-{n}"}).encode()
                request = urllib.request.Request(f"{cluster.address}/api/jobs/", data=body,
                                                 headers={"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=5) as reply:
                    assert reply.status == 200
                time.sleep(0.05)

            puts = [Writer(put) for _ in range(3)]
            submits = Writer(submit)
            with cluster.running("job", "logs", "--follow", "goes-on",
                                 env={"RAY_API_SERVER_ADDRESS": cluster.address}) as follower:
                for _ in range(KILLS):
                    self.kill_head(cluster, dice)
                for writer in (*puts, submits):
                    writer.stop()
                last = len(follower.output())
                wait_until(lambda: len(follower.output()) > last, "the follower goes on", 120)
                self.check(cluster, puts, submits)
                self.assertEqual(cluster.job("goes-on")["status"], "RUNNING")
                cluster.call("POST", "/api/jobs/goes-on/stop")
                self.assertEqual(cluster.wait_job("goes-on")["status"], "STOPPED")
                follower.wait(120)
                lines = [int(n) for n in re.findall(r"^line (\d+)$", follower.output(), re.M)]
                self.assertEqual(lines, list(range(len(lines))), "lines are missing or twice")
            for n in submits.kept:
                cluster.wait_job(f"job-{n}", timeout_s=60)

    def kill_head(self, cluster, dice):
        def serves():
            try:
                return cluster.get("/api/jobs/goes-on")["status"] == "RUNNING"
            except (OSError, AssertionError, ValueError):
                return False

        wait_until(serves, "the head serves", 60)
        time.sleep(dice.uniform(0, 0.4))  # the random moment
        pid = cluster.node("node-0")["pid_agent"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the head is gone")
        wait_until(lambda: cluster.node("node-0")["pid_agent"] != pid, "it is started again", 60)

    def check(self, cluster, puts, submits):
        gcs = GcsClient(address=cluster.gcs)
        for writer in puts:
            for n in writer.kept:
                key = b"%d-%d" % (writer.ident, n)
                self.assertEqual(gcs.internal_kv_get(key, namespace=b"test"), b"value %d" % n)
        known = {job["submission_id"] for job in cluster.get("/api/jobs/")}
        missing = [n for n in submits.kept if f"job-{n}" not in known]
        self.assertEqual(missing, [], "acknowledged submissions are gone")
        n_puts = sum(len(w.kept) for w in puts)
        refused = sum(w.refused for w in (*puts, submits))
        print(f"{KILLS} kills: {n_puts} puts and {len(submits.kept)} submissions acknowledged and "
              f"found, {refused} refused")
        self.assertGreater(n_puts, 100)
        self.assertGreater(len(submits.kept), 10)
        log = (pathlib.Path(cluster.node("node-0")["dir"]) / "agent.log").read_text()
        self.assertNotIn("damaged", log)


if __name__ == "__main__":
    unittest.main(verbosity=2)
