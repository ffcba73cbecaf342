"""The logs of a node that is gone come from the job's store.

kuberay#1047, ray#44561: driver logs are lost when the head's machine is.
"""

import asyncio
import json
import pathlib
import tempfile
import unittest

from cluster import Cluster, kill_node, train_command, wait_until
from ray.job_submission import JobStatus, JobSubmissionClient
from shared_store import Redis, SharedCluster
from tail import BINARY, TEXT, Tail


def whole(folder):
    return b"".join(p.read_bytes() for p in sorted(pathlib.Path(folder).glob("*.log"))).decode()


class LostRanks(unittest.TestCase):
    def test_a_rank_whose_node_is_gone(self):
        with tempfile.TemporaryDirectory() as store, Cluster(nodes=2) as cluster:
            url = f"file://{store}"
            stored = cluster.submit(train_command(url, 2, "--save-interval", "2"))
            bare = cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "echo", "gone"])
            for job_id in (stored, bare):
                self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED")
            ranks = [cluster.get(f"/api/jobs/{stored}/logs?rank={r}")["logs"] for r in (0, 1)]
            gang = next(j["gang"] for j in cluster.get("/api/mobula/status")["jobs"]
                        if j.get("submission_id") == stored)
            lost = cluster.node("node-1")
            rank = gang["nodes"].index(lost["node_id"])
            want, there = ranks[rank], f"{url}/logs/{stored}/rank-{rank}/1/"
            kill_node(lost)
            path = f"/api/jobs/{stored}/logs?rank={rank}"
            piece = wait_until(lambda: (p := cluster.call("GET", path))[0] == 200
                               and "source" in (p := json.loads(p[1])) and p,
                               lambda: cluster.call("GET", path), 60)
            size = len(want.encode())
            self.assertEqual(piece, {"offset": 0, "logs": want, "next_offset": size,
                                     "first_offset": 0, "size": size, "attempt": 1,
                                     "newest_attempt": 1, "world_size": 2, "complete_to": size,
                                     "source": there})
            last = want.splitlines(True)[-1]
            self.assertEqual(cluster.get(path + "&tail=1")["logs"], last)
            self.assertEqual(cluster.get(path + "&offset=5&limit=9")["logs"], want[5:14])
            status, text = cluster.call("GET", path + "&since_ms=1")
            self.assertEqual(status, 501, text)
            self.assertIn("not when they were written", text)
            self.assertEqual(cluster.get(path + "&times=1")["times"], [])
            self.check_tails(cluster, stored, rank, lost, want, there)
            self.check_commands(cluster, stored, rank, ranks, there)
            self.check_without_a_store(cluster, bare, rank, lost)
            cluster.forget_node(lost)

    def test_a_rank_whose_node_has_removed_its_log(self):
        with tempfile.TemporaryDirectory() as store, Cluster(nodes=1) as cluster:
            for url in (f"file://{store}", None):
                command = ["mobula", "run", "--num-nodes", "1", "--", "echo", "kept"]
                if url:
                    command[4:4] = ["--checkpoint-url", url, "--save", f"{cluster.dir}/ckpt"]
                job_id = cluster.submit(command)
                self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED", cluster.logs(job_id))
                path = f"/api/jobs/{job_id}/logs?rank=0"
                self.assertEqual(cluster.get(path)["logs"], "kept\n")
                for log in pathlib.Path(cluster.temp).glob("node_*/gangs/*/rank-0.log"):
                    log.unlink()
                self.assertEqual(cluster.get(path)["logs"], "kept\n" if url else "")
                text = Tail(cluster.address, job_id, "?rank=0").read().decode()
                self.assertEqual(text.splitlines()[1:], ["kept"] if url else [])
                self.assertEqual("has removed it" in text, bool(url))

    def check_tails(self, cluster, job_id, rank, lost, want, there):
        line = (f"[mobula: node {lost['node_id'][:8]}, which had this log, is gone: it is read from "
                f"{there}, which has it up to byte {len(want)}; what was written after that is lost]\n")
        tail = Tail(cluster.address, job_id, f"?rank={rank}")
        self.assertEqual(tail.read().decode(), line + want)
        self.assertEqual(tail.closed, (1000, "SUCCEEDED"))
        frames = list(Tail(cluster.address, job_id, f"?rank={rank}&format=bytes").frames())
        self.assertEqual(json.loads(frames[0][1]), {"offset": 0, "lost": 0, "source": there,
                                                    "complete_to": len(want)})
        self.assertEqual(b"".join(p for o, p in frames if o == BINARY).decode(), want)
        self.assertEqual([o for o, _ in frames].count(TEXT), 2)

    def check_commands(self, cluster, job_id, rank, ranks, there):
        note = f"the node of this log does not have it any more: it is read from {there}, which has it up to byte"
        for more in ((), ("-f",)):
            done = cluster.mobula("job", "logs", "--rank", str(rank), *more, job_id)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertEqual(done.stdout.count(note), 1, done.stdout)
            self.assertIn(ranks[rank], done.stdout)
            done = cluster.mobula("job", "logs", "--rank", str(rank), "--since", "1h", *more, job_id)
            self.assertEqual(done.returncode, 78, done.stdout)
            self.assertIn("not when they were written", done.stdout)
        done = cluster.mobula("job", "logs", "--merge", "--since", "1h", job_id)
        self.assertEqual(done.returncode, 78, done.stdout)
        merged = cluster.mobula("job", "logs", "--merge", job_id)
        self.assertEqual(merged.returncode, 0, merged.stdout)
        self.assertIn(f"the node of the log of rank {rank} does not have it any more", merged.stdout)
        for r in (0, 1):
            for line in ranks[r].splitlines():
                self.assertIn(f"[rank {r}] {line}\n", merged.stdout)

    def check_without_a_store(self, cluster, job_id, rank, lost):
        status, text = cluster.call("GET", f"/api/jobs/{job_id}/logs?rank={rank}")
        self.assertEqual(status, 503)
        self.assertIn(f"node {lost['node_id'][:8]}, which is gone, and nowhere else", text)
        self.assertIn("no --checkpoint-url", text)
        done = cluster.mobula("job", "logs", "--rank", str(rank), job_id)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no --checkpoint-url", done.stdout)


class LostDriver(unittest.TestCase):
    def test_the_head_is_gone_with_its_drivers_logs(self):
        with tempfile.TemporaryDirectory() as store, Redis() as redis, \
                SharedCluster(redis) as cluster:
            env = {"env_vars": {"MOBULA_LOG_URL": f"file://{store}",
                                "MOBULA_LOG_MAX_BYTES": "2M"}}  # pieces of 256 KiB
            cluster.submit("echo kept; seq 1 1000", submission_id="ended", runtime_env=env)
            cluster.submit("echo begun; seq 1 300000; sleep 600", submission_id="ran",
                           runtime_env=env)
            cluster.submit("echo begun; sleep 600", submission_id="bare")
            cluster.wait_job("ended", ("SUCCEEDED",))
            ended = cluster.logs("ended")
            wait_until(lambda: "\n170000\n" in whole(f"{store}/logs/ran/driver"),
                       "the first MiB of the running job is in the store", 60)
            node = cluster.kill("node-0")
            cluster.use("node-1")
            wait_until(cluster.answers, "the standby is the head", 10)
            cluster.tails = {name: Tail(cluster.address, name) for name in ("ran", "bare")}
            for name in ("ran", "bare"):
                self.assertEqual(cluster.wait_job(name, timeout_s=40)["status"], "FAILED")
            log = cluster.logs("ended")
            self.assertEqual(log.split("\n", 1)[1], ended)
            self.assertIn(f"node {node['node_id'][:8]}, which had this log, is gone", log)
            self.assertIn(f"up to byte {len(ended)};", log)
            kept = whole(f"{store}/logs/ran/driver")
            self.assertEqual(cluster.logs("ran").split("\n", 1)[1], kept)
            # Followers came before the job was FAILED: they are held until that can be read.
            self.assertTrue(cluster.tails["ran"].read().decode().endswith("]\n" + kept))
            self.assertEqual(cluster.tails["ran"].closed, (1000, "FAILED"))
            text = cluster.tails["bare"].read().decode()
            self.assertIn("which is gone, and nowhere else", text)
            self.assertEqual(cluster.tails["bare"].closed, (1000, "FAILED"))
            status, text = cluster.call_once("GET", "/api/jobs/bare/logs")
            self.assertEqual(status, 503)
            self.assertIn("no MOBULA_LOG_URL", text)
            self.stock_client(cluster, kept)

    def stock_client(self, cluster, kept):
        client = JobSubmissionClient(cluster.address)

        async def tail():
            return "".join([part async for part in client.tail_job_logs("ran")])

        self.assertTrue(asyncio.run(asyncio.wait_for(tail(), 60)).endswith(kept))
        self.assertTrue(client.get_job_logs("ran").endswith(kept))
        self.assertEqual(client.get_job_status("ran"), JobStatus.FAILED)


if __name__ == "__main__":
    unittest.main(verbosity=2)
