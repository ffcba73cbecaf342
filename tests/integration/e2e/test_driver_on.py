"""`--driver-on gpu-node`: the command of a job runs where the GPUs are, not on the head."""

import os
import pathlib
import signal
import tempfile
import unittest

from cluster import Cluster, is_alive, wait_until


class DriverOnTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=1))
        cls.waited = cls.submit("early", "--no-wait", "--", "echo", "at last")
        cls.early = cls.cluster.job("early")
        started = cls.cluster.mobula(
            "start", "--address", cls.cluster.gcs, "--temp-dir", cls.cluster.temp, "--node-name",
            "gpu-node", "--num-gpus", "2", "--dashboard-agent-listen-port", "0")
        assert started.returncode == 0, started.stdout

    @classmethod
    def submit(cls, name, *more):
        return cls.cluster.mobula("job", "submit", "--address", cls.cluster.address,
                                  "--driver-on", "gpu-node", "--submission-id", name, *more)

    def test_it_waits_for_a_node_with_gpus(self):
        """kuberay#962: no sleep until the workers have joined; it waits, and says for what."""
        self.assertEqual(self.waited.returncode, 0, self.waited.stdout)
        self.assertEqual((self.early["status"], self.early["message"]), (
            "PENDING", "Job has not started yet. It is number 1 of 1 in the queue: it waits for a "
            "node with GPUs that has what it needs."))
        self.assertEqual(self.cluster.wait_job("early")["status"], "SUCCEEDED")
        self.assertIn("\nat last\n", self.cluster.logs("early"))

    def test_output_and_exit_status(self):
        """ray#23010, ray#42432: the driver's place is a choice, and the log names the node."""
        done = self.submit("there", "--", "sh", "-c",
                           "echo 'it is' here; mobula version >&2; exit 7")
        self.assertEqual(done.returncode, 1, done.stdout)
        log = self.cluster.logs("there")
        self.assertIn("\nit is here\n", log)
        node = self.cluster.node("gpu-node")
        self.assertIn("it is here",
                      (pathlib.Path(node["dir"]) / "logs/job-driver-there.log").read_text())
        job = self.cluster.job("there")
        self.assertEqual(job["driver_node_id"], node["node_id"])
        self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 7))
        self.assertEqual(job["metadata"]["mobula_driver_on"], "gpu-node")

    def test_a_gang_gets_every_gpu_and_slot(self):
        """The driver that starts it takes neither."""
        done = self.submit("nested", "--", "mobula", "run", "--gpus-per-node", "2", "--", "sh", "-c",
                           "echo rank $RANK of $WORLD_SIZE sees $CUDA_VISIBLE_DEVICES")
        self.assertEqual(done.returncode, 0, done.stdout)
        for rank in (0, 1):
            self.assertIn(f"rank {rank} of 2 sees {rank}\n", done.stdout)
        self.assertEqual(self.cluster.gang_of("nested")["world_size"], 2)
        self.cluster.assert_all_free()

    def test_gpus_of_its_own(self):
        done = self.submit("own", "--entrypoint-num-gpus", "2", "--pipefail", "--",
                           "echo sees $CUDA_VISIBLE_DEVICES | cat")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("\nsees 0,1\n", done.stdout)
        done = self.submit("none", "--", "sh", "-c", "echo sees ${CUDA_VISIBLE_DEVICES-all}")
        self.assertIn("\nsees\n", done.stdout)

    def test_working_dir(self):
        folder = pathlib.Path(self.cluster.dir, "work")
        folder.mkdir()
        (folder / "main.sh").write_text("echo ran in $PWD\n")
        done = self.submit("packed", "--working-dir", str(folder), "--", "sh", "main.sh")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(f"ran in {self.cluster.node('gpu-node')['dir']}/jobs/packed/working_dir\n",
                      done.stdout)

    def test_as_driver(self):
        """What --driver-on makes of the entrypoint for a stock Ray head: a gang of one."""
        self.cluster.submit("exec mobula run --as-driver --driver-gpus 2 -- sh -c "
                            "'echo sees $CUDA_VISIBLE_DEVICES; exit 7'", submission_id="stock")
        job = self.cluster.wait_job("stock")
        self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 7), job["message"])
        log = self.cluster.logs("stock")
        self.assertIn("the driver runs on node gpu-node (127.0.0.1)\n", log)
        self.assertIn("\nsees 0,1\n", log)

    def test_stop(self):
        pid_file = pathlib.Path(self.cluster.dir, "pid")
        sent = self.submit("stops", "--no-wait", "--", "sh", "-c",
                           f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 1000")
        self.assertEqual(sent.returncode, 0, sent.stdout)
        wait_until(pid_file.exists, lambda: self.cluster.logs("stops"))
        pid = int(pid_file.read_text())
        self.assertTrue(is_alive(pid))
        stopped = self.cluster.mobula("job", "stop", "--address", self.cluster.address, "stops")
        self.assertEqual(stopped.returncode, 0, stopped.stdout)
        self.assertEqual(self.cluster.wait_job("stops")["status"], "STOPPED")
        wait_until(lambda: not is_alive(pid), "the command ends", 60)

    def test_agents_that_die(self):
        """Neither the head's nor the node's takes the driver with it, nor a line of its log."""
        gate = pathlib.Path(self.cluster.dir, "gate")
        sent = self.submit("lives", "--no-wait", "--", "sh", "-c",
                           f"i=0; until [ -e {gate} ]; do echo line $i; i=$((i+1)); sleep 0.01; done;"
                           "echo lines $i")
        self.assertEqual(sent.returncode, 0, sent.stdout)
        wait_until(lambda: "line 5\n" in self.cluster.logs("lives"), "it runs")
        for name in ("gpu-node", "node-0"):
            agent = self.cluster.node(name)["pid_agent"]
            os.kill(agent, signal.SIGKILL)
            wait_until(lambda n=name, a=agent: self.cluster.node(n)["pid_agent"] != a and
                       self.cluster.node(n)["state"] == "ALIVE", f"{name} is back")
        gate.touch()
        self.assertEqual(self.cluster.wait_job("lives")["status"], "SUCCEEDED")
        log = self.cluster.logs("lives")
        n = int(log.rsplit("lines ", 1)[1])
        lines = [int(line[5:]) for line in log.splitlines() if line.startswith("line ")]
        self.assertEqual(lines, list(range(n)))

    def test_what_is_refused(self):
        done = self.submit("refused", "--driver-on", "moon", "--", "true")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("head or gpu-node", done.stdout)
        self.assertEqual(self.cluster.call("GET", "/api/jobs/refused")[0], 404)


class TokenTest(unittest.TestCase):
    def test_the_driver_may_start_a_gang(self):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "token")
            path.write_text("secret-of-this-cluster\n")
            path.chmod(0o600)
            env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
            with Cluster(nodes=1, start_args=["--token-file", str(path)]) as cluster:
                started = cluster.mobula(
                    "start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--num-gpus",
                    "1", "--dashboard-agent-listen-port", "0", "--token-file", path)
                self.assertEqual(started.returncode, 0, started.stdout)
                done = cluster.mobula("job", "submit", "--address", cluster.address, "--driver-on",
                                      "gpu-node", "--", "mobula", "run", "--gpus-per-node", "1",
                                      "--", "echo", "in the gang", env=env)
                self.assertEqual(done.returncode, 0, done.stdout)
                self.assertIn("in the gang\n", done.stdout)
                self.assertNotIn("secret-of-this-cluster", done.stdout)


if __name__ == "__main__":
    unittest.main()
