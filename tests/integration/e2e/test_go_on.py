"""--resume: a run that begins where an earlier one, of another cluster perhaps, has ended."""

import json
import os
import pathlib
import re
import signal
import tempfile
import unittest

import s3
from cluster import Cluster, iterations_of, mini_model, wait_until
from ports import free_port

TRACKER = "latest_checkpointed_iteration.txt"


class GoOnTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2))

    def tearDown(self):
        self.cluster.assert_all_free()

    def path(self, name):
        return pathlib.Path(self.cluster.dir, name)

    def train(self, name, iterations, *more, before=(), status=0):
        done = self.cluster.mobula("train", "--num-nodes", "2", "--gpus-per-node", "1", "--checkpoint-url",
                                   f"file://{self.path(name)}", *before, *mini_model(iterations, *more))
        self.assertEqual(done.returncode, status, done.stdout)
        return done.stdout

    def losses(self, text):
        return {i: loss for i, _, loss in iterations_of(text)}

    def test_auto_goes_on_and_ends_the_same(self):
        save = ("--save-interval", "20")
        calm = self.losses(self.train("calm", 40, *save))
        first = self.train("two", 20, *save, before=("--resume", "auto"))
        self.assertNotIn("goes on", first)
        second = self.train("two", 40, *save, before=("--resume", "auto"))
        self.assertIn("attempt 1 goes on from iteration 20", second)
        self.assertEqual(sorted(self.losses(second)), list(range(21, 41)))
        self.assertEqual(self.losses(first) | self.losses(second), calm)
        # Another time there is nothing left to do, and that is no failure.
        third = self.train("two", 40, *save, before=("--resume", "required"))
        self.assertEqual(self.losses(third), {})

    def test_never_is_the_default(self):
        save = ("--save-interval", "5")
        self.train("anew", 5, *save)
        for before in ((), ("--resume", "never")):
            self.assertEqual(sorted(self.losses(self.train("anew", 5, *save, before=before))), [1, 2, 3, 4, 5])

    def test_required(self):
        text = self.train("empty", 5, "--save-interval", "5", before=("--resume", "required"), status=66)
        self.assertIn(f"--resume required: there is no checkpoint in file://{self.path('empty')}", text)
        self.assertEqual(self.losses(text), {})

    def test_damage_is_not_begun_over(self):
        self.train("bad", 5, "--save-interval", "5")
        (self.path("bad") / TRACKER).write_text("soon")
        text = self.train("bad", 5, "--save-interval", "5", before=("--resume", "auto"), status=65)
        self.assertIn("the pointer in", text)
        (self.path("bad") / TRACKER).write_text("5")
        largest = max((f for f in self.path("bad").rglob("iter_0000005/*.safetensors")), key=lambda f: f.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 1)
        text = self.train("bad", 5, "--save-interval", "5", before=("--resume", "auto"), status=65)
        self.assertIn("names iteration 5, and none up to it is whole", text)

    def test_what_is_asked_for_makes_sense(self):
        done = self.cluster.mobula("train", "--resume", "auto", *mini_model(1))
        self.assertEqual(done.returncode, 64, done.stdout)
        self.assertIn("--resume auto needs --checkpoint-url", done.stdout)
        text = self.train("x", 1, "--save-interval", "1", before=("--resume", "yes"), status=64)
        self.assertIn("--resume yes: must be auto, never or required", text)

    def test_the_base_model_is_where_it_began_only(self):
        """--load URL --finetune: another attempt, and another run, go on from what this one saved."""
        self.train("base", 10, "--save-interval", "10")
        words = ("--load", f"file://{self.path('base')}", "--finetune", "--save-interval", "50")
        job = self.cluster.submit(
            ["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1", "--checkpoint-url",
             f"file://{self.path('tuned')}", "--max-restarts", "2", "--restart-delay", "50ms", "--resume", "auto",
             *mini_model(1500, *words)])
        wait_until((self.path("tuned") / TRACKER).exists, lambda: self.cluster.logs(job), 60)
        os.kill(self.cluster.rank_pids("mobula-worker")[1], signal.SIGKILL)
        end = self.cluster.wait_job(job, timeout_s=120)
        log = self.cluster.logs(job)
        self.assertEqual(end["status"], "SUCCEEDED", log)
        began = int(re.search(r"attempt 2 goes on from iteration (\d+)", log)[1])
        self.assertGreaterEqual(began, 50)
        seen = [i for i, _, _ in iterations_of(log)]
        self.assertEqual(seen[0], 1)
        self.assertEqual(seen[-(1500 - began):], list(range(began + 1, 1501)))
        text = self.train("tuned", 1510, *words, before=("--resume", "auto"))
        self.assertEqual(sorted(self.losses(text)), list(range(1501, 1511)))

    def test_without_saved_moments(self):
        save = ("--save-interval", "10", "--no-save-optim")
        self.train("light", 10, *save)
        text = self.train("light", 20, *save, before=("--resume", "auto"))
        self.assertIn("attempt 1 goes on from iteration 10, its optimizer anew: --no-save-optim", text)
        self.assertEqual(sorted(self.losses(text)), list(range(11, 21)))

    def test_any_program(self):
        """`mobula run`: what the store has lies in --save before the ranks start."""
        # As programs have it, the tracker is written when all files are whole.
        script = ('D={0}/save-$NODE_RANK; B=$(cat $D/{1} 2>/dev/null || echo 0); echo "begins at $B"; '
                  'N=$((B + 10)); W=iter_00000$N; mkdir -p $D/$W && echo $RANK > {0}/part-$RANK && mv {0}/part-$RANK $D/$W/rank$RANK.pt && '
                  'if [ $RANK = 0 ]; then until [ -e {0}/save-1/$W/rank1.pt ]; do sleep 0.05; done; printf $N > $D/{1}; fi'
                  ).format(self.cluster.dir, TRACKER)
        for begin in (0, 10, 20):
            done = self.cluster.mobula(
                "run", "--num-nodes", "2", "--save", f"{self.cluster.dir}/save-%n", "--resume", "auto",
                "--checkpoint-url", f"file://{self.path('foreign')}", "--", "sh", "-c", script)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertEqual(done.stdout.count(f"begins at {begin}\n"), 2, done.stdout)
            for rank in (0, 1):
                for entry in sorted(self.path(f"save-{rank}").rglob("*"), reverse=True):
                    entry.rmdir() if entry.is_dir() else entry.unlink()


class StoreTest(unittest.TestCase):
    def test_a_retry_of_a_job(self):
        """A job's driver has no keys of the store: an agent looks. Two clusters, as KubeRay's retry makes them."""
        directory = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-go-on-"))
        env = s3.environment(self.enterContext(s3.server(directory)))
        for iterations, begin in ((10, None), (20, 10)):
            with Cluster(nodes=2, env=env) as cluster:
                job = cluster.submit(["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1", "--checkpoint-url",
                                      f"s3://{s3.BUCKET}/run", "--resume", "auto",
                                      *mini_model(iterations, "--save-interval", "10")])
                end = cluster.wait_job(job)
                log = cluster.logs(job)
                self.assertEqual(end["status"], "SUCCEEDED", log)
                self.assertEqual([i for i, _, _ in iterations_of(log)], list(range((begin or 0) + 1, iterations + 1)))
                self.assertEqual(re.findall(r"attempt 1 goes on from iteration (\d+)", log),
                                 [str(begin)] if begin else [])

    def test_files_of_megatron(self):
        """--ckpt-format torch: a manifest names the files of rank 0's node, and they are what another cluster goes on from."""
        directory = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-go-on-"))
        env = s3.environment(self.enterContext(s3.server(directory)))
        bucket, losses = pathlib.Path(directory, "s3", s3.BUCKET), {}
        layout = ("--pipeline-model-parallel-size", "2", "--save-interval", "10", "--ckpt-format", "torch")
        for name, iterations, begin in (("calm", 20, 0), ("two", 10, 0), ("two", 20, 10)):
            with Cluster(nodes=2, env=env) as cluster:
                job = cluster.submit(["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1", "--checkpoint-url",
                                      f"s3://{s3.BUCKET}/{name}", "--resume", "auto", *mini_model(iterations, *layout)])
                end, log = cluster.wait_job(job), cluster.logs(job)
                self.assertEqual(end["status"], "SUCCEEDED", log)
                now = {i: loss for i, _, loss in iterations_of(log)}
                self.assertEqual(sorted(now), list(range(begin + 1, iterations + 1)))
                losses.setdefault(name, {}).update(now)
                done = cluster.mobula("checkpoint", "verify", f"s3://{s3.BUCKET}/{name}")
                self.assertEqual(done.returncode, 0, done.stdout)
                there = pathlib.Path(cluster.dir, "pulled")
                done = cluster.mobula("checkpoint", "pull", f"s3://{s3.BUCKET}/{name}", str(there))
                self.assertEqual(done.returncode, 0, done.stdout)
                done = cluster.mobula("checkpoint", "verify", str(there))
                self.assertIn(f"verified: iteration {iterations} in {there}, Megatron-LM checkpoint, 2 files", done.stdout)
            self.assertEqual((bucket / name / TRACKER).read_text(), str(iterations))
            manifest = json.loads((bucket / name / f"iter_{iterations:07}/.mobula/manifest.json").read_text())
            self.assertEqual(sorted(f["path"] for f in manifest["files"]),
                             [f"mp_rank_00_00{stage}/model_optim_rng.pt" for stage in (0, 1)])
        self.assertEqual(losses["two"], losses["calm"])

    def test_a_retry_beside_the_run_of_before(self):
        """KubeRay tells the former pods to go and starts the next ones at once: who began last has the store, and what the former one
        had not made durable by then never is, however long it lives."""
        directory = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-go-on-"))
        port = self.enterContext(s3.server(directory))
        gate = self.enterContext(s3.Gate(port, r"run/iter_0000010/[^.]*\.safetensors"))
        bucket = pathlib.Path(directory, "s3", s3.BUCKET, "run")

        def submit(cluster, name, iterations):
            return cluster.submit(["mobula", "train", "--num-nodes", "1", "--gpus-per-node", "2", "--checkpoint-url", f"s3://{s3.BUCKET}/run",
                                   "--resume", "auto", *mini_model(iterations, "--save-interval", "10")], submission_id=name)

        with Cluster(nodes=1, env=s3.environment(gate.port)) as before, Cluster(nodes=1, env=s3.environment(port)) as after:
            submit(before, "before", 10)
            wait_until(lambda: gate.waiting, "its checkpoint is on its way", 60)
            submit(after, "after", 20)
            end = after.wait_job("after")
            self.assertEqual(end["status"], "SUCCEEDED", after.logs("after"))
            gate.open()
            end = before.wait_job("before")
            self.assertEqual(end["status"], "FAILED", before.logs("before"))
            self.assertIn("iteration 10 is not durable", end["message"])
            self.assertEqual((bucket / "latest_checkpointed_iteration.txt").read_text(), "20")
            for iteration in (10, 20):
                manifest = json.loads((bucket / f"iter_{iteration:07}/.mobula/manifest.json").read_text())
                self.assertEqual(manifest["job_id"], "after")
            done = after.mobula("checkpoint", "verify", f"s3://{s3.BUCKET}/run")
            self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_store_that_is_away(self):
        """Nobody answers there: the run fails and says so; it does not begin anew."""
        with Cluster(nodes=1, env=s3.environment(free_port())) as cluster:
            done = cluster.mobula("train", "--gpus-per-node", "1", "--checkpoint-url", f"s3://{s3.BUCKET}/run",
                                  "--resume", "auto", *mini_model(1, "--save-interval", "1"), timeout=200)
            self.assertNotEqual(done.returncode, 0, done.stdout)
            self.assertIn("mobula: --resume: ", done.stdout)
            self.assertEqual(iterations_of(done.stdout), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
