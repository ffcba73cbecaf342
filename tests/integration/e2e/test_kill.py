"""SIGKILL of a worker, of an agent in the middle of an upload, and of the head."""

import contextlib
import os
import pathlib
import random
import signal
import socket
import tempfile
import time
import unittest

import checkpoints
import s3
from cluster import TERMINAL, Cluster, is_alive, iterations_of, train_command, wait_until
from ray._raylet import GcsClient


class KillWorker(unittest.TestCase):
    def test_gang_ends_job_fails_checkpoint_stays(self):
        with Cluster(nodes=2) as cluster:
            directory = f"{cluster.dir}/store"
            cluster.submit(train_command(f"file://{directory}", 100000, "--save-interval", "20"),
                           submission_id="victim")
            wait_until(lambda: os.path.exists(f"{directory}/latest_checkpointed_iteration.txt"),
                       lambda: cluster.logs("victim")[-3000:], 60)
            ranks = cluster.rank_pids("mobula-worker")
            self.assertEqual(sorted(ranks), [0, 1])
            killed = time.monotonic()
            os.kill(ranks[1], signal.SIGKILL)
            wait_until(lambda: not is_alive(ranks[0]), "the peer of the killed rank ends", 20)
            job = cluster.wait_job("victim", timeout_s=20)
            self.assertLess(time.monotonic() - killed, 20)
            self.assertEqual(job["status"], "FAILED")
            self.assertIn("rank 1 was killed by signal 9", cluster.logs("victim"))
            self.assertIn("rank 1 was killed by signal 9", job["message"])
            newest = checkpoints.latest(directory)
            checkpoints.assert_complete(directory, newest)
            done = cluster.mobula("checkpoint", "verify", f"file://{directory}")
            self.assertEqual(done.returncode, 0, done.stdout)
            cluster.assert_all_free()
            # And it goes on from there.
            cluster.submit(train_command(f"file://{directory}", 100000, "--load",
                                         f"file://{directory}", "--exit-interval",
                                         str(newest + 20), "--save-interval", "20"),
                           submission_id="again")
            self.assertEqual(cluster.wait_job("again", timeout_s=120)["status"], "SUCCEEDED",
                             cluster.logs("again"))
            self.assertGreater(checkpoints.latest(directory), newest)


class KillAgentDuringUpload(unittest.TestCase):
    def test_restart_finishes_and_repeats_nothing(self):
        with tempfile.TemporaryDirectory(prefix="mb-s3-") as directory, \
                s3.server(directory) as port, \
                s3.Gate(port, r"\.mobula/part-") as gate, \
                Cluster(nodes=2, env=s3.environment(gate.port)) as cluster:
            url = f"s3://{s3.BUCKET}/run"
            cluster.submit(train_command(url, 6, "--save-interval", "6"), submission_id="upload")
            # Every file is in the store, both parts are on their way: nothing counts yet.
            wait_until(lambda: len(gate.held) == 2, lambda: (gate.held, gate.acknowledged,
                                                              cluster.logs("upload")[-3000:]), 60)
            # A log grows; the claim of the iteration is replaced by its manifest.
            before = [p for p in gate.acknowledged if "/logs/" not in p and "/.mobula/" not in p]
            self.assertTrue(all(".safetensors" in p or p.endswith("state.json") for p in before),
                            before)
            self.assertEqual(cluster.job("upload")["status"], "RUNNING")
            node = cluster.node("node-1")
            os.kill(node["pid_agent"], signal.SIGKILL)
            restarted = wait_until(
                lambda: cluster.node("node-1")["pid_agent"] != node["pid_agent"] and
                cluster.node("node-1")["state"] == "ALIVE" and cluster.node("node-1"),
                "init starts the agent again", 60)
            self.assertEqual(restarted["pid_init"], node["pid_init"])
            gate.open()
            job = cluster.wait_job("upload", timeout_s=90)
            self.assertEqual(job["status"], "SUCCEEDED", cluster.logs("upload"))
            self.assertEqual([p for p in set(before) if gate.acknowledged.count(p) > 1], [],
                             "sent again although it was acknowledged")
            run = pathlib.Path(directory, "s3", s3.BUCKET, "run")
            self.assertEqual(checkpoints.latest(run), 6)
            checkpoints.assert_complete(run, 6)
            done = cluster.mobula("checkpoint", "verify", url)
            self.assertEqual(done.returncode, 0, done.stdout)
            cluster.assert_all_free()

    def test_restart_resumes_a_large_file(self):
        """A file in parts: only those that the server lacks are sent by the new agent."""
        with tempfile.TemporaryDirectory(prefix="mb-s3-") as directory, \
                s3.server(directory) as port, \
                s3.Gate(port, r"partNumber=([5-9]|\d\d)") as gate, \
                Cluster(nodes=1, env=s3.environment(gate.port)) as cluster:
            url, save = f"s3://{s3.BUCKET}/large", f"{cluster.dir}/save"
            cluster.submit(["mobula", "run", "--save", save, "--checkpoint-url", url, "--", "sh", "-c",
                            f"mkdir -p {save}/iter_0000001; "
                            f"head -c 150000000 /dev/urandom > {save}/iter_0000001/big.bin; "
                            f"echo 1 > {save}/latest_checkpointed_iteration.txt"],
                           submission_id="large")
            parts = wait_until(
                lambda: (found := [p for p in gate.acknowledged if "partNumber=" in p]) and
                len(found) == 4 and gate.held and found,
                lambda: (gate.held, gate.acknowledged, cluster.logs("large")), 60)
            node = cluster.node("node-0")
            os.kill(node["pid_agent"], signal.SIGKILL)
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != node["pid_agent"] and
                       cluster.node("node-0")["state"] == "ALIVE", "init starts the agent again", 60)
            gate.open()
            self.assertEqual(KillHead.wait_over(cluster, "large")["status"], "SUCCEEDED",
                             cluster.logs("large"))
            self.assertEqual([p for p in parts if gate.acknowledged.count(p) > 1], [],
                             "sent again although it was acknowledged")
            stored = pathlib.Path(directory, "s3", s3.BUCKET, "large/iter_0000001/big.bin")
            self.assertEqual(stored.read_bytes(),
                             pathlib.Path(save, "iter_0000001/big.bin").read_bytes())
            done = cluster.mobula("checkpoint", "verify", url)
            self.assertEqual(done.returncode, 0, done.stdout)


class KillAgentsWhosePortsAreTaken(unittest.TestCase):
    """While the agents are away somebody gets their ports, and keeps them: the nodes are the same at
    others, the driver finds them there, and the ranks do not notice."""

    def test_gang_goes_on(self):
        with Cluster(nodes=2) as cluster, contextlib.ExitStack() as taken:
            url = f"file://{cluster.dir}/store"
            cluster.submit([*train_command(url, 3000, "--save-interval", "1000"), "--lease", "60s"],
                           submission_id="moved")
            ranks = wait_until(lambda: len(found := cluster.rank_pids("mobula-worker")) == 2 and found,
                               lambda: cluster.logs("moved"), 60)
            os.kill(ranks[0], signal.SIGSTOP)  # the run is not over before the agents are back
            before = {name: cluster.node(name) for name in ("node-0", "node-1")}
            for node in before.values():
                os.kill(node["pid_init"], signal.SIGSTOP)
                os.kill(node["pid_agent"], signal.SIGKILL)
            for node in before.values():
                taken.enter_context(occupied(node["grpc_port"]))
                os.kill(node["pid_init"], signal.SIGCONT)
            for name, node in before.items():
                now = wait_until(
                    lambda: (n := cluster.node(name))["pid_agent"] != node["pid_agent"] and
                    n["state"] == "ALIVE" and n, "the agent is back", 60)
                self.assertEqual(now["node_id"], node["node_id"])
                self.assertNotEqual(now["grpc_port"], node["grpc_port"])
            self.assertEqual(cluster.rank_pids("mobula-worker"), ranks)
            os.kill(ranks[0], signal.SIGCONT)
            self.assertEqual(cluster.wait_job("moved", timeout_s=120)["status"], "SUCCEEDED",
                             cluster.logs("moved")[-5000:])
            self.assertEqual(cluster.logs("moved").count(" now\n"), 2)
            self.assertEqual(checkpoints.latest(f"{cluster.dir}/store"), 3000)
            cluster.assert_all_free()


@contextlib.contextmanager
def occupied(port):
    """Somebody has the port, as soon as the last thread of a killed process let go of it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def bound():
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", port))
                other.listen()
                return True

        wait_until(bound, f"port {port}")
        yield


class KillAtRandom(unittest.TestCase):
    """Agents are killed at random moments of a run that saves all the time. A reader that looks
    whenever it can never sees a pointer to an incomplete checkpoint, and the job still succeeds."""

    KILLS = 8

    def test_agents(self):
        seed = int(os.environ.get("MOBULA_TEST_SEED", "0")) or random.randrange(1, 1 << 31)
        print(f"seed {seed} (MOBULA_TEST_SEED repeats it)")
        rng = random.Random(seed)
        with Cluster(nodes=2) as cluster:
            directory = f"{cluster.dir}/store"
            cluster.submit(train_command(f"file://{directory}", 3000, "--save-interval", "10"),
                           submission_id="random")
            wait_until(lambda: os.path.exists(f"{directory}/latest_checkpointed_iteration.txt"),
                       lambda: cluster.logs("random")[-3000:], 60)
            kills = 0
            while kills < self.KILLS and cluster.job("random")["status"] == "RUNNING":
                pid = cluster.node("node-1")["pid_agent"]
                until = time.monotonic() + rng.uniform(0, 0.6)
                while time.monotonic() < until:
                    checkpoints.assert_complete(directory, checkpoints.latest(directory))
                os.kill(pid, signal.SIGKILL)
                kills += 1
                # At first the run stands still meanwhile, or a quick one might be over before it was much tried.
                held = cluster.rank_pids("mobula-worker").get(1) if kills < 3 else None
                if held:
                    os.kill(held, signal.SIGSTOP)
                wait_until(lambda: cluster.node("node-1")["pid_agent"] != pid and
                           cluster.node("node-1")["state"] == "ALIVE", "init starts the agent again", 60)
                if held:
                    os.kill(held, signal.SIGCONT)
            self.assertGreater(kills, 2, "the run was over before anything was killed")
            job = cluster.wait_job("random", timeout_s=200)
            self.assertEqual(job["status"], "SUCCEEDED", (seed, cluster.logs("random")[-5000:]))
            self.assertEqual(checkpoints.latest(directory), 3000)
            done = cluster.mobula("checkpoint", "verify", f"file://{directory}")
            self.assertEqual(done.returncode, 0, done.stdout)


class KillHead(unittest.TestCase):
    def test_restarted_head_knows_nodes_kv_and_jobs(self):
        with Cluster(nodes=2) as cluster:
            done = cluster.submit("echo before", submission_id="before")
            self.assertEqual(cluster.wait_job(done)["status"], "SUCCEEDED")
            marker = f"{cluster.dir}/go-on"
            running = cluster.submit(f"echo started; until test -e {marker}; do sleep 0.1; done; "
                                     "echo ended", submission_id="running")
            cluster.wait_job(running, ("RUNNING",))
            gcs = GcsClient(address=cluster.gcs)
            gcs.internal_kv_put(b"the key", b"the value", True, namespace=b"test")
            head = cluster.node("node-0")
            ids = {n["node_id"] for n in cluster.status()["nodes"]}
            self.assertEqual(len(ids), 2)
            os.kill(head["pid_agent"], signal.SIGKILL)

            def back():
                try:
                    nodes = cluster.status()["nodes"]
                except (OSError, AssertionError):
                    return False
                return sum(n["state"] == "ALIVE" for n in nodes) == 2 and nodes

            wait_until(lambda: cluster.node("node-0")["pid_agent"] != head["pid_agent"],
                       "init starts the head again", 60)
            nodes = wait_until(back, "the head is back with both nodes ALIVE", 60)
            other = cluster.node("node-1")["node_id"]
            self.assertIn(other, {n["node_id"] for n in nodes})
            self.assertIn(other, ids, "the second node keeps its id")
            gcs = GcsClient(address=cluster.gcs)
            self.assertEqual(gcs.internal_kv_get(b"the key", namespace=b"test"), b"the value")
            self.assertEqual(cluster.job("before")["status"], "SUCCEEDED")
            self.assertEqual(cluster.job("running")["status"], "RUNNING")
            open(marker, "w").close()
            job = cluster.wait_job("running", timeout_s=60)
            self.assertEqual(job["status"], "SUCCEEDED", job)
            self.assertIn("ended", cluster.logs("running"))
            new = cluster.submit("mobula run --num-nodes 2 -- echo both of us")
            self.assertEqual(cluster.wait_job(new)["status"], "SUCCEEDED", cluster.logs(new))
            self.assertEqual(cluster.logs(new).count("] both of us\n"), 2)

    def test_a_gang_outlives_its_head_and_agents(self):
        """SIGKILL of both agents, one of them the head, while the ranks train: nobody notices."""
        with Cluster(nodes=2) as cluster:
            directory = f"{cluster.dir}/store"
            cluster.submit(train_command(f"file://{directory}", 100000, "--save-interval", "200",
                                         "--exit-interval", "4000"), submission_id="goes-on")
            ranks = wait_until(lambda: len(found := cluster.rank_pids("mobula-worker")) == 2 and found,
                               lambda: cluster.logs("goes-on")[-3000:])

            def trained():
                return max((i for log in pathlib.Path(cluster.temp).glob("node_*/gangs/*/rank-*.log")
                            for i, _, _ in iterations_of(log.read_text())), default=0)

            # A rank stands still while a next agent is waited for, or the run might be over before: it
            # trains when an agent is killed, and goes on for a while.
            wait_until(lambda: trained() >= 200, lambda: cluster.logs("goes-on")[-3000:])
            for name in ("node-0", "node-1"):
                before, at = cluster.node(name)["pid_agent"], trained()
                os.kill(before, signal.SIGKILL)
                wait_until(lambda: trained() > at, "the ranks train on")
                os.kill(ranks[1], signal.SIGSTOP)
                wait_until(lambda: cluster.node(name)["pid_agent"] != before, "init starts the agent again")
                self.assertEqual(cluster.rank_pids("mobula-worker"), ranks)
                at = trained()
                os.kill(ranks[1], signal.SIGCONT)
                wait_until(lambda: trained() > at, "the ranks train on")
            self.assertEqual(self.wait_over(cluster, "goes-on")["status"], "SUCCEEDED",
                             cluster.logs("goes-on")[-3000:])
            seen = [i for i, _, _ in iterations_of(cluster.logs("goes-on"))]
            self.assertEqual(seen, list(range(1, 4001)), "lines of the log are missing or twice")
            self.assertEqual(checkpoints.latest(directory), 4000)
            checkpoints.assert_complete(directory, 4000)
            cluster.assert_all_free()

    @staticmethod
    def wait_over(cluster, job_id):
        """Like wait_job, across the moments in which nobody answers."""
        def look():
            try:
                job = cluster.job(job_id)
            except OSError:
                return None
            return job if job["status"] in TERMINAL else None

        return wait_until(look, lambda: cluster.logs(job_id)[-3000:], 120)


if __name__ == "__main__":
    unittest.main()
