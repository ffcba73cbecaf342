"""--min-nodes: a gang that lost a node goes on with fewer, and takes it back when it returns."""

import os
import pathlib
import re
import shutil
import signal
import time
import unittest

import checkpoints
from cluster import Cluster, Joined, environment_of, iterations_of, kill_all, mini_model, wait_until
from ray_head import RayHead


def lose_a_node(cluster):
    """A machine loses its power: everything on it is gone at once. Not the head's."""
    victim = next(n for n in cluster.nodes() if not n["is_head"] and
                  any(pathlib.Path(n["dir"]).glob("gangs/*/gang.json")))
    pids = [p for p in cluster.own_pids() if str(victim["dir"]) in environment_of(p)
            or p in (victim["pid_agent"], victim["pid_init"])]
    kill_all(pids)
    return victim


class Train(unittest.TestCase):
    ITERATIONS = 1500

    def model(self, *more):
        return mini_model(self.ITERATIONS, "--global-batch-size", "12", *more)

    def test_goes_on_with_fewer_and_learns_the_same(self):
        self.goes_on_with_fewer(1)

    def test_ranks_that_share_a_model_go_on_with_fewer(self):
        """Each node has a model of two ranks, and fetches of the store what their numbers need."""
        self.goes_on_with_fewer(2, "--tensor-model-parallel-size", "2")

    def test_ranks_that_are_stages_go_on_with_fewer(self):
        """The stages of a model lie on different nodes: any node's loss is all models'."""
        self.goes_on_with_fewer(2, "--pipeline-model-parallel-size", "2")

    def goes_on_with_fewer(self, ranks, *more):
        """The losses are those of a run that had two nodes from that checkpoint on."""
        with Cluster(nodes=3) as cluster:
            store = f"{cluster.dir}/rough"
            job_id = cluster.submit(
                ["mobula", "train", "--num-nodes", "3", "--min-nodes", "2", "--gpus-per-node", str(ranks),
                 "--elastic-wait", "1s", "--max-restarts", "2", "--restart-delay", "50ms",
                 "--checkpoint-url", f"file://{store}", *self.model("--save-interval", "50", *more)])
            wait_until(lambda: os.path.exists(f"{store}/latest_checkpointed_iteration.txt"),
                       lambda: cluster.logs(job_id), 60)
            victim = lose_a_node(cluster)
            killed = time.monotonic()
            wait_until(lambda: "attempt 2 goes on" in cluster.logs(job_id),
                       lambda: cluster.logs(job_id), 60)
            print(f"on fewer nodes {time.monotonic() - killed:.1f} s after the loss, 1 s of them "
                  "waiting for all")
            job = cluster.wait_job(job_id, timeout_s=120)
            log = cluster.logs(job_id)
            self.assertEqual(job["status"], "SUCCEEDED", log)
            self.assertIn("asking for 2 of 3", log)
            gang = cluster.gang_of(job_id)
            self.assertEqual((gang["world_size"], gang["num_nodes"], gang["max_nodes"]), (2 * ranks, 2, 3))
            checkpoints.assert_complete(store, self.ITERATIONS)
            files = {f["path"] for f in checkpoints.manifest(store, self.ITERATIONS)["files"]}
            self.assertEqual({p for p in files if p.startswith("optim")},
                             {f"optim_dp_{r:03}_of_{2 * ranks:03}.safetensors" for r in range(2 * ranks)})

            began = int(re.search(r"attempt 2 goes on from iteration (\d+)", log)[1])
            self.assertGreaterEqual(began, 50)
            first = {f["path"] for f in checkpoints.manifest(store, began)["files"]}
            self.assertIn(f"optim_dp_002_of_{3 * ranks:03}.safetensors", first, "it was saved on three nodes")
            shutil.copytree(f"{store}/iter_{began:07d}", f"{cluster.dir}/start/iter_{began:07d}")
            pathlib.Path(f"{cluster.dir}/start/latest_checkpointed_iteration.txt").write_text(
                str(began))
            calm = cluster.submit(
                ["mobula", "train", "--num-nodes", "2", "--gpus-per-node", str(ranks), "--load",
                 f"file://{cluster.dir}/start", *self.model(*more)])
            self.assertEqual(cluster.wait_job(calm, timeout_s=120)["status"], "SUCCEEDED",
                             cluster.logs(calm))
            expected = iterations_of(cluster.logs(calm))
            self.assertEqual([i for i, _, _ in expected],
                             list(range(began + 1, self.ITERATIONS + 1)))
            # Iteration, consumed samples and loss, digit for digit.
            self.assertEqual(iterations_of(log)[-len(expected):], expected)
            cluster.forget_node(victim)

    def test_a_node_that_is_drained_is_done_without(self):
        """Its notice is used: no interval saves here, and no iteration is done twice."""
        with Cluster(nodes=3) as cluster:
            url = f"{cluster.dir}/run"
            job_id = cluster.submit(
                ["mobula", "train", "--num-nodes", "3", "--min-nodes", "1", "--gpus-per-node", "1",
                 "--elastic-wait", "200ms", "--max-restarts", "1", "--restart-delay", "50ms",
                 "--checkpoint-url", f"file://{url}", *self.model("--save-interval", "100000")])
            wait_until(lambda: len(iterations_of(cluster.logs(job_id))) > 5,
                       lambda: cluster.logs(job_id), 60)
            victim = next(n for n in cluster.nodes() if not n["is_head"])
            os.kill(victim["pid_init"], signal.SIGTERM)
            job = cluster.wait_job(job_id, timeout_s=120)
            log = cluster.logs(job_id)
            self.assertEqual(job["status"], "SUCCEEDED", log)
            self.assertEqual([(i, n) for i, n, _ in iterations_of(log)],
                             [(i, 12 * i) for i in range(1, self.ITERATIONS + 1)],
                             "every iteration once, with the same number of samples")
            self.assertEqual(cluster.gang_of(job_id)["world_size"], 2)
            checkpoints.assert_complete(url, self.ITERATIONS)

    def test_a_size_that_does_not_divide_is_waited_for(self):
        """It says what it waits for, and goes on when the node is there."""
        with Cluster(nodes=3) as cluster:
            job_id = cluster.submit(
                ["mobula", "train", "--num-nodes", "3", "--min-nodes", "2", "--gpus-per-node", "1",
                 "--elastic-wait", "200ms", "--max-restarts", "2", "--restart-delay", "50ms",
                 "--checkpoint-url", f"file://{cluster.dir}/run",
                 *mini_model(4000, "--global-batch-size", "6", "--save-interval", "100")])
            wait_until(lambda: os.path.exists(f"{cluster.dir}/run/latest_checkpointed_iteration.txt"),
                       lambda: cluster.logs(job_id), 60)
            victim = lose_a_node(cluster)
            said = ("2 nodes are there, but neither 2 ranks nor fewer on at least 2 nodes divide "
                    "--global-batch-size 6 by --micro-batch-size 2: waiting for 1 more node")
            wait_until(lambda: said in cluster.logs(job_id), lambda: cluster.logs(job_id), 60)
            cluster.forget_node(victim)
            cluster.start_node(7)
            job = cluster.wait_job(job_id, timeout_s=120)
            self.assertEqual(job["status"], "SUCCEEDED", cluster.logs(job_id))
            self.assertEqual(cluster.gang_of(job_id)["world_size"], 3)

    def test_what_it_needs_is_said_at_once(self):
        with Cluster(nodes=1) as cluster:
            for more, said in ((["--min-nodes", "3"], "--min-nodes 3: there are only 2"),
                               (["--min-nodes", "1"], "--min-nodes needs --max-restarts"),
                               (["--min-nodes", "1", "--max-restarts", "1"],
                                "--min-nodes needs --global-batch-size N and")):
                done = cluster.mobula("train", "--num-nodes", "2", *more)
                self.assertEqual(done.returncode, 64, done.stdout)
                self.assertIn(said, done.stdout)


class Run(unittest.TestCase):
    def test_a_node_that_returns_is_taken_back_by_the_next_restart(self):
        with Cluster(nodes=3) as cluster:
            job_id = cluster.submit(
                ["mobula", "run", "--num-nodes", "3", "--min-nodes", "2", "--elastic-wait", "500ms",
                 "--max-restarts", "4", "--restart-delay", "50ms", "--", "sh", "-c",
                 "echo attempt $MOBULA_ATTEMPT is rank $RANK of $WORLD_SIZE; "
                 "[ $MOBULA_ATTEMPT -lt 4 ] || exit 0; exec sleep 1000"])

            def is_up(attempt, world):
                wait_until(lambda: len(re.findall(f"attempt {attempt} is rank . of {world}",
                                                  cluster.logs(job_id))) == world and
                           len(cluster.rank_pids("sleep")) == world,
                           lambda: f"{cluster.rank_pids('sleep')} {cluster.logs(job_id)}")

            is_up(1, 3)
            victim = lose_a_node(cluster)
            is_up(2, 2)
            wait_until(lambda: len(cluster.gang_of(job_id)["nodes"]) == 2,
                       lambda: cluster.gang_of(job_id))
            # Nobody else is there: a rank that dies costs no wait, the nodes stay.
            group = cluster.gang_of(job_id)["placement_group_id"]
            os.kill(cluster.rank_pids("sleep")[0], signal.SIGKILL)
            is_up(3, 2)
            self.assertEqual(cluster.gang_of(job_id)["placement_group_id"], group)
            cluster.forget_node(victim)
            cluster.start_node(7)
            os.kill(cluster.rank_pids("sleep")[1], signal.SIGKILL)
            job = cluster.wait_job(job_id)
            log = cluster.logs(job_id)
            self.assertEqual(job["status"], "SUCCEEDED", log)
            self.assertEqual(sorted(re.findall(r"attempt 4 is (rank . of .)", log)),
                             [f"rank {r} of 3" for r in range(3)], log)
            self.assertEqual(len(cluster.gang_of(job_id)["nodes"]), 3)
            cluster.assert_all_free()


class StockHead(unittest.TestCase):
    def test_the_next_smaller_size_is_tried(self):
        """Ray's GCS says who is alive, not who is free."""
        with RayHead() as head, Joined(head.address, 3) as cluster:
            with cluster.running("run", "--num-nodes", "3", "--min-nodes", "2", "--elastic-wait",
                                 "2s", "--max-restarts", "1", "--restart-delay", "50ms", "--", "sh",
                                 "-c", "echo attempt $MOBULA_ATTEMPT of $WORLD_SIZE; "
                                 "[ $MOBULA_ATTEMPT = 2 ] || exec sleep 1000") as driver:
                wait_until(lambda: driver.output().count("attempt 1 of 3") == 3, driver.output, 60)
                os.kill(cluster.nodes()[0]["pid_init"], signal.SIGTERM)
                self.assertEqual(driver.wait(90), 0, driver.output())
                self.assertEqual(driver.output().count("attempt 2 of 2"), 2, driver.output())
                self.assertIn("asking for 2 of 3", driver.output())


if __name__ == "__main__":
    unittest.main()
