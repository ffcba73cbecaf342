"""A program is run twice as a gang of two nodes with two ranks each, whose checkpoint directories are
not shared: undisturbed, and with a rank that is killed. Both end with the same weights."""

import os
import pathlib
import re
import shutil
import signal
import unittest

import checkpoints
from cluster import Cluster, wait_until

HERE = pathlib.Path(__file__).resolve().parent
TORCH = HERE.parent / "torch-python"


class TorchCase(unittest.TestCase):
    def start(self, cluster, name, *program):
        store = f"{cluster.dir}/{name}"
        cluster.submit(["mobula", "run", "--num-nodes", "2", "--ranks-per-node", "2",
                        "--max-restarts", "2", "--restart-delay", "50ms",
                        "--save", f"{cluster.dir}/{name}-disk-%n", "--checkpoint-url",
                        f"file://{store}", "--", TORCH, *program], submission_id=name,
                       runtime_env={"env_vars": {"TORCHINDUCTOR_CACHE_DIR": f"{cluster.dir}/torch"}})
        return store

    def finish(self, cluster, name):
        job = cluster.wait_job(name, timeout_s=300)
        log = cluster.logs(name)
        self.assertEqual(job["status"], "SUCCEEDED", log[-5000:])
        return log, re.search(r"final (\S+)", log)[1]

    def check(self, program, iterations, stop_at):
        """ray#46814: what was killed ends like what was not."""
        with Cluster(nodes=2) as cluster:
            store = self.start(cluster, "calm", program, iterations, 0)
            log, calm = self.finish(cluster, "calm")
            checkpoints.assert_complete(store, iterations)
            files = {f["path"] for f in checkpoints.manifest(store, iterations)["files"]}
            self.assertTrue(any(p.endswith(".metadata") for p in files), files)
            for node in (0, 1):  # each disk has its own ranks' files and no other
                disk = pathlib.Path(f"{cluster.dir}/calm-disk-{node}/iter_{iterations:07d}")
                self.assertEqual(sorted(p.name for p in disk.glob("rank_*")),
                                 [f"rank_{2 * node:02d}.pt", f"rank_{2 * node + 1:02d}.pt"])

            store = self.start(cluster, "rough", program, iterations, stop_at)
            wait_until(lambda: f"rank 2 waits at iteration {stop_at}" in cluster.logs("rough"),
                       lambda: cluster.logs("rough")[-4000:], 240)
            durable = stop_at // 10 * 10
            wait_until(lambda: os.path.exists(f"{store}/latest_checkpointed_iteration.txt") and
                       checkpoints.latest(store) == durable,
                       lambda: cluster.logs("rough")[-4000:], 120)
            for node in (0, 1):  # what it goes on from is in the store alone
                shutil.rmtree(f"{cluster.dir}/rough-disk-{node}")
            os.kill(cluster.rank_pids(program.name)[2], signal.SIGKILL)
            log, rough = self.finish(cluster, "rough")
            self.assertIn("rank 2 was killed by signal 9", log)
            began = re.findall(r"attempt (\d) begins after iteration (\d+) with master port (\d+)", log)
            self.assertEqual({(a, i) for a, i, _ in began}, {("1", "0"), ("2", str(durable))})
            self.assertEqual(len({port for _, _, port in began}), 2, began)
            self.assertEqual(rough, calm)
            checkpoints.assert_complete(store, iterations)
            done = cluster.mobula("checkpoint", "verify", f"file://{store}")
            self.assertEqual(done.returncode, 0, done.stdout)
