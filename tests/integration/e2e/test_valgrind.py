"""The agent with its embedded head under valgrind: start, one job, a gang, an upload, stop."""

import pathlib
import shlex
import signal
import subprocess
import unittest

from cluster import MOBULA, NoCluster, mini_model, wait_until

VALGRIND = ["valgrind", "--leak-check=full", "--show-leak-kinds=definite",
            "--errors-for-leak-kinds=definite", "--num-callers=30", "--error-exitcode=97"]


class ValgrindTest(unittest.TestCase):
    def test_agent_is_clean(self):
        with NoCluster() as cluster:
            report = f"{cluster.dir}/valgrind.%p"
            node = pathlib.Path(cluster.temp, "node_00000001")
            node.mkdir(parents=True)
            init = subprocess.Popen(
                [MOBULA.parent / "mobula-init", "agent", "--run-dir", str(node), "--", *VALGRIND,
                 f"--log-file={report}", str(MOBULA.parent / "mobula-agent"), "--head",
                 "--node-dir", str(node), "--temp-dir", cluster.temp, "--port", "0",
                 "--dashboard-port", "0", "--node-name", "node-0"],
                env=cluster.env, stdin=subprocess.DEVNULL)
            try:
                head = wait_until(
                    lambda: next((n for n in cluster.nodes() if n["state"] == "ALIVE"), None),
                    lambda: self.reports(cluster), 90)
                cluster.gcs = head["gcs_address"]
                cluster.address = f"http://127.0.0.1:{head['dashboard_port']}"
                job = cluster.submit("echo one short job")
                self.assertEqual(cluster.wait_job(job)["status"], "SUCCEEDED")
                self.assertIn("one short job", cluster.logs(job))
                url = f"file://{cluster.dir}/store"
                train = cluster.submit(self.train(url), submission_id="train")
                self.assertEqual(cluster.wait_job(train, timeout_s=120)["status"], "SUCCEEDED",
                                 cluster.logs(train))
                bad = cluster.submit("mobula run -- sh -c 'exit 7'")
                self.assertEqual(cluster.wait_job(bad)["status"], "FAILED")
                cluster.status()
                agent = head["pid_agent"]
            finally:
                init.send_signal(signal.SIGTERM)
                status = init.wait(90)
            self.assertIn(status, (0, 128 + signal.SIGTERM), self.reports(cluster))
            text = pathlib.Path(report.replace("%p", str(agent))).read_text()
            self.assertRegex(text, r"ERROR SUMMARY: 0 errors", text[-8000:])

    @staticmethod
    def train(url):
        return shlex.join(["mobula", "train", "--num-nodes", "1", "--gpus-per-node", "2",
                           "--checkpoint-url", url, *mini_model(4, "--save-interval", "2")])

    @staticmethod
    def reports(cluster):
        return "\n".join(p.read_text()[-4000:] for p in pathlib.Path(cluster.dir).glob("valgrind.*"))


if __name__ == "__main__":
    unittest.main()
