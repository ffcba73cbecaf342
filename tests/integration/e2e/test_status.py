"""What people are told: `mobula status` in words and as JSON, the hints of `mobula start`, an empty --load."""

import json
import os
import pathlib
import re
import shlex
import tempfile
import unittest

import s3
from cluster import Cluster, NoCluster, iterations_of, mini_model, train_command, wait_until

VALIDATION = re.compile(r"validation loss at iteration (\d+)( on validation set)? \| lm loss value: (\S+)")


def status_of(cluster):
    """(the words, the JSON) of `mobula status`."""
    told = []
    for more in ((), ("--json",)):
        done = cluster.mobula("status", "--address", cluster.address, *more)
        assert done.returncode == 0, done.stdout
        told.append(done.stdout)
    return told[0], json.loads(told[1])


def lines_of(words, job_id):
    """The line of a job and those below it."""
    lines = words.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  ") and line.split()[1] == job_id)
    end = next((i for i in range(at + 1, len(lines)) if not lines[i].startswith("      ")), len(lines))
    return [line.strip() for line in lines[at:end]]


def job_of(facts, job_id):
    return next(job for job in facts["jobs"] if job["submission_id"] == job_id)


class StatusTest(unittest.TestCase):
    def setUp(self):
        self.cluster = self.enterContext(Cluster(nodes=2))

    def test_no_jobs_then_one_that_succeeds_and_one_that_fails(self):
        words, facts = status_of(self.cluster)
        self.check_nodes(words, facts)
        self.assertEqual((words.splitlines()[-1], facts["jobs"]), ("jobs: 0", []), words)
        self.finished_training()
        self.failed_job()
        words, facts = status_of(self.cluster)
        self.assertIn("jobs: 2", words.splitlines())
        self.assertEqual(len(facts["jobs"]), 2)

    def check_nodes(self, words, facts):
        lines = words.splitlines()
        self.assertEqual(lines[0], "nodes: 2")
        for node in facts["nodes"]:
            line = next(line for line in lines if node["node_id"][:12] in line)
            slots = node["resources_total"]["mobula_slot"]
            for word in ("ALIVE", node["ip"], node["node_name"], f"slot 0/{slots:g} used"):
                self.assertIn(word, line)
            self.assertEqual(" head" in line, node["is_head"], line)
        self.assertEqual({n["node_name"] for n in facts["nodes"]}, {"node-0", "node-1"})

    def finished_training(self):
        """The last numbers are those of the end: the loss of the last iteration, and the validation
        loss of the evaluation that comes after it."""
        empty, store = (f"file://{self.cluster.dir}/{name}" for name in ("empty", "store"))
        os.mkdir(f"{self.cluster.dir}/empty")
        self.cluster.submit(train_command(store, 12, "--save-interval", "5", "--load", empty),
                            submission_id="good")
        job = self.cluster.wait_job("good", timeout_s=120)
        log = self.cluster.logs("good")
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertIn(f"mobula: there is no checkpoint in {empty}: training starts from random",
                      log.splitlines())
        trained = iterations_of(log)
        self.assertEqual([i for i, _, _ in trained], list(range(1, 13)), "it began at the beginning")
        evaluated = VALIDATION.findall(log)
        self.assertEqual([(i, bool(last)) for i, last, _ in evaluated], [("10", False), ("12", True)])
        self.assertNotEqual(evaluated[0][2], evaluated[1][2])

        words, facts = status_of(self.cluster)
        gang = job_of(facts, "good")["gang"]
        self.assertEqual((gang["state"], gang["error"]), ("SUCCEEDED", ""))
        self.assertEqual((gang["iteration"], gang["train_iters"]), (12, 12))
        self.assertAlmostEqual(gang["loss"], float(trained[-1][2]), delta=1e-5)
        self.assertAlmostEqual(gang["validation_loss"], float(evaluated[1][2]), delta=1e-5)
        self.assertGreater(gang["tokens_per_s"], 0)
        kept = gang["checkpoint"]
        self.assertEqual((kept["saved_iteration"], kept["durable_iteration"], kept["url"]),
                         (12, 12, store))
        self.assertEqual(lines_of(words, "good")[1:], [
            f"gang: SUCCEEDED, 2 ranks on 2 nodes, attempt 1, iteration 12/12, "
            f"loss {gang['loss']:.4f}, {gang['tokens_per_s']:.0f} tokens/s, "
            f"validation loss {gang['validation_loss']:.4f}",
            f"checkpoint: saved iteration 12, durable iteration 12 in {store}"])
        self.assertRegex(lines_of(words, "good")[0], r"^SUCCEEDED +good +mobula train --num-nodes 2 ")

    def failed_job(self):
        self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sh", "-c",
                             "[ $RANK = 0 ] || exit 7; sleep 1000"], submission_id="bad")
        self.assertEqual(self.cluster.wait_job("bad")["status"], "FAILED")
        words, facts = status_of(self.cluster)
        job = job_of(facts, "bad")
        self.assertEqual((job["status"], job["gang"]["state"], job["gang"]["error"]),
                         ("FAILED", "FAILED", "rank 1 exited with status 7"))
        self.assertEqual(lines_of(words, "bad")[1:], [
            "Job entrypoint command failed with exit code 1",
            "cause: rank 1 exited with status 7",
            "gang: FAILED, 2 ranks on 2 nodes, attempt 1"])

    def test_load_of_a_store_that_is_not_there(self):
        """Outside a job: the directory of the URL does not even exist."""
        url = f"file://{self.cluster.dir}/nothing"
        done = self.cluster.mobula("train", "--load", url, *mini_model(2), timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(f"mobula: there is no checkpoint in {url}: training starts from random",
                      done.stdout.splitlines())
        self.assertEqual([i for i, _, _ in iterations_of(done.stdout)], [1, 2])
        self.assertFalse(os.path.exists(f"{self.cluster.dir}/nothing"))


class UploadState(unittest.TestCase):
    def test_saved_but_not_yet_durable(self):
        with tempfile.TemporaryDirectory(prefix="mb-s3-") as directory, \
                s3.server(directory) as port, \
                s3.Gate(port, r"\.mobula/part-") as gate, \
                Cluster(nodes=2, env=s3.environment(gate.port)) as cluster:
            url = f"s3://{s3.BUCKET}/run"
            cluster.submit(train_command(url, 6, "--save-interval", "6"), submission_id="upload")
            try:
                wait_until(lambda: len(gate.held) == 2, lambda: cluster.logs("upload")[-3000:], 60)

                # Every node speaks for its own files, in its own time: the gang's figure is their sum.
                saved = [sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
                         for directory in pathlib.Path(cluster.temp).glob(
                             "checkpoints/upload/node-*/iter_*")]
                self.assertEqual(len([n for n in saved if n > 0]), 2, saved)

                def told():
                    gang = cluster.gang_of("upload")
                    return gang and gang["checkpoint"]["saved_iteration"] == 6 \
                        and gang["checkpoint"]["total_bytes"] == sum(saved)

                wait_until(told, lambda: cluster.gang_of("upload"))
                words, facts = status_of(cluster)
                kept = job_of(facts, "upload")["gang"]["checkpoint"]
                self.assertEqual((kept["durable_iteration"], kept["url"]), (-1, url))
                self.assertRegex(
                    lines_of(words, "upload")[2],
                    rf"^checkpoint: saved iteration 6, none durable yet in {url}$")
                self.assertRegex(lines_of(words, "upload")[3], r"^uploading iteration 6: \d+ of \d+ parts")
            finally:
                gate.open()  # or the end of the cluster would wait for the upload
            self.assertEqual(cluster.wait_job("upload")["status"], "SUCCEEDED")
            words, _ = status_of(cluster)
            self.assertEqual(lines_of(words, "upload")[2],
                             f"checkpoint: saved iteration 6, durable iteration 6 in {url}")


class StartHints(unittest.TestCase):
    """What `mobula start` prints as the next step works as it is printed."""

    def start(self, cluster, *where, env=None):
        done = cluster.mobula("start", *where, env=env)
        self.assertEqual(done.returncode, 0, done.stdout)
        return re.search(r"mobula (stop\b.*)$", done.stdout, re.M).group(1)

    def stop(self, cluster, hint, env=None):
        self.assertNotEqual(cluster.own_pids(), [])
        done = cluster.mobula(*shlex.split(hint), env=env)
        self.assertEqual(done.returncode, 0, done.stdout)
        wait_until(lambda: not cluster.own_pids(), "nothing is left", 30)

    HEAD = ("--head", "--port", "0", "--dashboard-port", "0", "--dashboard-agent-listen-port", "0")

    def test_a_given_directory_is_named(self):
        with NoCluster() as cluster:
            where = ("--temp-dir", cluster.temp)
            self.assertEqual(self.start(cluster, *self.HEAD, *where), f"stop --temp-dir {cluster.temp}")
            joined = self.start(cluster, "--address", cluster.nodes()[0]["gcs_address"],
                                "--dashboard-agent-listen-port", "0", *where)
            self.assertEqual(joined, f"stop --temp-dir {cluster.temp}")
            self.assertEqual(len(cluster.nodes()), 2)
            self.stop(cluster, joined)

    def test_a_directory_is_quoted_for_the_shell(self):
        with NoCluster() as cluster:
            where = f"{cluster.dir}/it's $HOME"
            hint = self.start(cluster, *self.HEAD, "--temp-dir", where)
            self.assertEqual(shlex.split(hint), ["stop", "--temp-dir", where])
            self.assertNotIn(where, hint)
            self.stop(cluster, hint)

    def test_the_usual_directory_is_not(self):
        with NoCluster() as cluster:
            env = {"MOBULA_TEMP_DIR": cluster.temp}
            hint = self.start(cluster, *self.HEAD, env=env)
            self.assertEqual(hint, "stop")
            self.assertTrue(list(pathlib.Path(cluster.temp).glob("node_*")))
            self.stop(cluster, hint, env=env)


if __name__ == "__main__":
    unittest.main()
