"""The main job with its checkpoints on a real S3 server, from text to resumed training."""

import contextlib
import json
import os
import pathlib
import tempfile
import unittest

import checkpoints
import s3
from cluster import Cluster, command_of, environment_of, iterations_of, train_command, wait_until

URL = f"s3://{s3.BUCKET}/run"


class S3Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-s3-"))
        port = cls.enterClassContext(s3.server(cls.directory))
        cls.cluster = cls.enterClassContext(Cluster(nodes=2, env=s3.environment(port)))

    def train(self, name, *more):
        self.cluster.submit(train_command(URL, 8, "--save-interval", "2", *more), submission_id=name)
        job = self.cluster.wait_job(name, timeout_s=120)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs(name))
        return iterations_of(self.cluster.logs(name))

    def test_save_verify_resume(self):
        run = pathlib.Path(self.directory, "s3", s3.BUCKET, "run")
        first = self.train("s3-1", "--exit-interval", "4")
        self.assertEqual([i for i, _, _ in first], [1, 2, 3, 4])
        self.assertEqual((run / "latest_checkpointed_iteration.txt").read_text().strip(), "4")
        for iteration in (2, 4):
            manifest = json.loads((run / f"iter_{iteration:07d}/.mobula/manifest.json").read_text())
            for f in manifest["files"]:
                self.assertEqual((run / f"iter_{iteration:07d}" / f["path"]).stat().st_size, f["size"])
        verified = self.cluster.mobula("checkpoint", "verify", URL)
        self.assertEqual(verified.returncode, 0, verified.stdout)
        second = self.train("s3-2", "--load", URL)
        self.assertEqual([i for i, _, _ in second], [5, 6, 7, 8])
        verified = self.cluster.mobula("checkpoint", "verify", "--json", URL)
        self.assertEqual(json.loads(verified.stdout)["iteration"], 8, verified.stdout)

    def test_local_checkpoints_go_when_they_are_durable(self):
        url, save = URL + "-keep", pathlib.Path(self.directory, "keep")
        self.train("s3-keep", "--checkpoint-url", url, "--async-save", "--save", str(save), "--keep-last-k", "1",
                   "--save-interval", "1")
        run = pathlib.Path(self.directory, "s3", s3.BUCKET, "run-keep")
        for iteration in range(1, 9):  # none was removed before it was in the store
            checkpoints.assert_complete(run, iteration)
        self.assertEqual(checkpoints.latest(save), 8)
        self.assertTrue((save / "iter_0000008").is_dir())
        # Another run removes what is durable and older than what it loaded.
        self.cluster.submit(train_command(url, 9, "--load", url, "--save", str(save), "--keep-last-k", "1",
                                          "--save-interval", "1"), submission_id="s3-keep-2")
        job = self.cluster.wait_job("s3-keep-2", timeout_s=120)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs("s3-keep-2"))
        self.assertEqual([p.name for p in save.iterdir() if p.name.startswith("iter_")], ["iter_0000009"])
        # What was loaded from another place is not durable in this one.
        other = URL + "-keep-elsewhere"
        self.cluster.submit(train_command(other, 10, "--load", url, "--save", str(save), "--keep-last-k", "1",
                                          "--save-interval", "1"), submission_id="s3-keep-3")
        job = self.cluster.wait_job("s3-keep-3", timeout_s=120)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs("s3-keep-3"))
        self.assertEqual(sorted(p.name for p in save.iterdir() if p.name.startswith("iter_")),
                         ["iter_0000009", "iter_0000010"])

    def test_a_foreign_trainers_checkpoints_go_when_they_are_durable(self):
        """Each node has a directory of its own: of the newest two is left what is there, and all are in the store."""
        here, run = pathlib.Path(self.directory), pathlib.Path(self.directory, "s3", s3.BUCKET, "run-foreign")
        script = f"""
            D={here}/foreign-$RANK; mkdir -p $D
            for i in 1 2 3 4 5; do
                N=$D/iter_000000$i; mkdir -p $N; echo $i-$RANK > $N/rank$RANK.pt; : > {here}/foreign-$i-$RANK
                until test -e {here}/foreign-$i-0 && test -e {here}/foreign-$i-1; do sleep 0.05; done
                if [ $RANK = 0 ]; then printf $i > $D/latest_checkpointed_iteration.txt; fi
                until [ "$(cat {run}/latest_checkpointed_iteration.txt 2>/dev/null)" = $i ]; do sleep 0.05; done
            done"""
        done = self.cluster.mobula("run", "--num-nodes", "2", "--save", f"{here}/foreign-%n", "--keep-last-k", "2",
                                   "--checkpoint-url", f"{URL}-foreign", "--", "sh", "-c", script)
        self.assertEqual(done.returncode, 0, done.stdout)
        for node in (0, 1):
            self.assertEqual(sorted(p.name for p in (here / f"foreign-{node}").iterdir() if p.is_dir()),
                             ["iter_0000004", "iter_0000005"])
        for iteration in range(1, 6):
            for rank in (0, 1):
                self.assertEqual((run / f"iter_{iteration:07d}/rank{rank}.pt").read_text(), f"{iteration}-{rank}\n")

    def test_damage_is_found(self):
        self.train("s3-3", "--exit-interval", "2", "--checkpoint-url", URL + "-damaged")
        victim = next(pathlib.Path(self.directory, "s3", s3.BUCKET).glob(
            "run-damaged/iter_0000002/model*.safetensors"))
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(data)
        verified = self.cluster.mobula("checkpoint", "verify", URL + "-damaged")
        self.assertEqual(verified.returncode, 65, verified.stdout)
        self.assertIn(victim.name, verified.stdout)

    def test_logs_are_in_the_bucket(self):
        self.train("s3-logs", "--exit-interval", "2", "--checkpoint-url", URL + "-logs")
        logs = pathlib.Path(self.directory, "s3", s3.BUCKET, "run-logs/logs/s3-logs")
        driver = b"".join(p.read_bytes() for p in sorted((logs / "driver").glob("*.log")))
        self.assertEqual(driver.decode(), self.cluster.logs("s3-logs"))
        for rank in "01":
            self.assertTrue(list((logs / f"rank-{rank}/1").glob("0*0.log")))

    def test_keys_reach_neither_jobs_nor_logs(self):
        job_id = self.cluster.submit("env; echo done")
        self.cluster.wait_job(job_id)
        self.assertNotIn(s3.SECRET_KEY, self.cluster.logs(job_id))
        # Supervisors dump cores, and jobs, which are the same user, may look into them: they have none either.
        gang = self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", "echo up; exec sleep 1000"])
        who = {node[which] for node in self.cluster.nodes() for which in ("pid_init", "pid_agent")}

        def others():
            return [command_of(pid) for pid in self.cluster.own_pids() if pid not in who]

        # One of the driver and two of the ranks. The driver's own lines may have "up" in them, at no line's end.
        wait_until(lambda: sum("supervise" in command for command in others()) >= 3, others, 60)
        wait_until(lambda: sum(line.endswith("up") for line in self.cluster.logs(gang).splitlines()) >= 2,
                   lambda: self.cluster.logs(gang), 60)

        def holders():  # what is about to become another program still has the environment of the one that started it
            return [command_of(pid) for pid in self.cluster.own_pids()
                    if pid not in who and s3.SECRET_KEY in environment_of(pid)]

        wait_until(lambda: not holders(), holders, 30)
        self.cluster.call("POST", f"/api/jobs/{gang}/stop")
        self.cluster.wait_job(gang)
        for directory, _, names in os.walk(self.cluster.temp):  # what goes away meanwhile is no error
            for log in (pathlib.Path(directory, name) for name in names if name.endswith(".log")):
                with contextlib.suppress(FileNotFoundError):
                    self.assertNotIn(s3.SECRET_KEY, log.read_text(errors="replace"), str(log))


if __name__ == "__main__":
    unittest.main()
