"""A head that was killed as a whole, with its front process, goes on: `mobula start --head --resume`.

A reboot, or a pod whose container is started again: the directory is there, nothing runs any more.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import unittest

from cluster import Cluster, command_of, environment_of, is_alive, kill_all, tree, wait_until
from ray._raylet import GcsClient


def kill_whole(cluster):
    """As the power does: nobody hears of anything. The driver's own processes included."""
    head = cluster.node("node-0")
    os.kill(head["pid_init"], signal.SIGSTOP)  # it starts nothing again
    for pid in cluster.own_pids():
        with contextlib.suppress(ProcessLookupError):  # it went with another one of them
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not cluster.own_pids(), lambda: cluster.own_pids())
    wait_until(lambda: not is_alive(head["pid_init"]), "the end of the front process")  # without its memory nobody's own any more
    return head


class Resume(unittest.TestCase):
    def start(self, cluster, *options):
        return cluster.mobula("start", "--head", "--temp-dir", cluster.temp, "--port", "0", "--dashboard-port",
                              "0", "--dashboard-agent-listen-port", "0", "--node-name", "node-0", *options)

    def go_on(self, cluster, former):
        done = self.start(cluster, "--resume")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(f"going on from {former['dir']}\n", done.stdout)
        head, = cluster.nodes()
        self.assertEqual((head["state"], head["dir"]), ("ALIVE", former["dir"]))
        self.assertNotEqual(head["pid_init"], former["pid_init"])
        cluster.address = f"http://127.0.0.1:{head['dashboard_port']}"
        cluster.env["RAY_ADDRESS"] = head["gcs_address"]

    def test_every_job_is_there(self):
        with Cluster(nodes=1) as cluster:
            cluster.submit(["sh", "-c", "echo one; exit 3"], submission_id="ended")
            self.assertEqual(cluster.wait_job("ended")["status"], "FAILED")
            cluster.submit(["sleep", "1000"], submission_id="ran")
            wait_until(lambda: cluster.job("ran")["status"] == "RUNNING", lambda: cluster.job("ran"))
            for _ in range(2):  # a second time is as the first
                self.go_on(cluster, kill_whole(cluster))
                self.assertEqual(cluster.wait_job("ended")["driver_exit_code"], 3)
                self.assertIn("\none\n", cluster.logs("ended"))
                self.assertEqual(cluster.wait_job("ran")["status"], "FAILED")
            cluster.submit(["true"], submission_id="later")
            self.assertEqual(cluster.wait_job("later")["status"], "SUCCEEDED")
            again = cluster.mobula("job", "submit", "--submission-id", "ended", "--", "true")
            self.assertEqual(again.returncode, 72, again.stdout)

    def test_the_logs_of_ranks_are_there(self):
        """The node is the head before's under another id: it has the files, and nobody else does."""
        with Cluster(nodes=1) as cluster:
            cluster.submit(["mobula", "run", "--ranks-per-node", "2", "--", "sh", "-c", "echo I am rank $RANK"],
                           submission_id="gang")
            self.assertEqual(cluster.wait_job("gang")["status"], "SUCCEEDED")
            for _ in range(2):
                self.go_on(cluster, kill_whole(cluster))
                for words, told in ((["--rank", "1"], "I am rank 1\n"),
                                    (["--merge"], "[rank 0] I am rank 0\n[rank 1] I am rank 1\n"),
                                    (["-f", "--rank", "0"], "I am rank 0\n")):
                    done = cluster.mobula("job", "logs", "--address", cluster.address, *words, "gang")
                    self.assertEqual(done.returncode, 0, done.stdout)
                    self.assertIn(told, done.stdout)

    def test_the_head_before_is_dead_and_no_standby(self):
        """It left the cluster, and nobody shares its store."""
        with Cluster(nodes=1) as cluster:
            former = cluster.node("node-0")
            os.kill(former["pid_init"], signal.SIGTERM)
            wait_until(lambda: not cluster.own_pids(), lambda: cluster.own_pids(), 60)
            self.go_on(cluster, former)
            dead, alive = sorted(cluster.status()["nodes"], key=lambda n: n["state"] == "ALIVE")
            self.assertEqual([(n["state"], n["is_head"], n["is_standby"]) for n in (dead, alive)],
                             [("DEAD", True, False), ("ALIVE", True, False)])
            told = cluster.mobula("status", "--address", cluster.address).stdout
            self.assertRegex(told, fr"DEAD +{dead['node_id'][:12]} +127.0.0.1 +node-0 +slot ")
            self.assertRegex(told, fr"ALIVE +{alive['node_id'][:12]} +127.0.0.1 +node-0 +head ")

    def test_a_store_that_was_emptied_is_named(self):
        with Cluster(nodes=1) as cluster:
            former = kill_whole(cluster)
            for file in former["dir"].glob("gcs.sqlite-*"):
                file.unlink()
            (former["dir"] / "gcs.sqlite").write_bytes(b"")
            done = self.start(cluster, "--resume")
            self.assertEqual(done.returncode, 65, done.stdout)
            self.assertIn("the store is empty, but this node belongs to cluster", done.stdout)
            shutil.rmtree(former["dir"])

    def test_a_store_that_goes_under_a_crashed_agent_is_named(self):
        with Cluster(nodes=1) as cluster:
            head = cluster.node("node-0")
            os.kill(head["pid_init"], signal.SIGSTOP)  # it starts the agent again when it goes on
            os.kill(head["pid_agent"], signal.SIGKILL)
            for file in head["dir"].glob("gcs.sqlite*"):
                file.unlink()
            os.kill(head["pid_init"], signal.SIGCONT)
            log = head["dir"] / "agent.log"
            wait_until(lambda: "the store is empty, but this node belongs to cluster" in log.read_text(), log.read_text)

    def lose_records(self, cluster, set_back):
        """A polite driver and a stubborn one, with a child in a session of its own; then the agent dies, and what it comes back
        with has no record of them. Each ends as by a stop, and its id is free again."""
        head, others = cluster.node("node-0"), set(cluster.own_pids())
        cluster.submit(f"trap 'touch {cluster.dir}/saved; exit 0' TERM; echo up; while :; do sleep 0.1; done", submission_id="polite")
        cluster.submit("trap '' TERM; setsid sleep 987 & echo up; while :; do sleep 0.1; done", submission_id="stubborn",
                       runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "1"}})
        for job_id in ("polite", "stubborn"):
            wait_until(lambda: "\nup\n" in cluster.logs(job_id), "it runs")
        drivers = [p for p in set(cluster.own_pids()) - others if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environment_of(p)]
        self.assertGreaterEqual(len(drivers), 3)
        os.kill(head["pid_init"], signal.SIGSTOP)  # it starts the agent again when it goes on
        try:
            os.kill(head["pid_agent"], signal.SIGKILL)
            wait_until(lambda: not is_alive(head["pid_agent"]), "the agent is gone")
            set_back(head)
        finally:
            os.kill(head["pid_init"], signal.SIGCONT)
        wait_until(lambda: not any(map(is_alive, drivers)), lambda: [p for p in drivers if is_alive(p)], 20)
        self.assertTrue(os.path.exists(f"{cluster.dir}/saved"))
        wait_until(lambda: not [p for p in head["dir"].glob("jobs/*/s") if p.parent.name != "stays"], "their sockets go")
        log = (head["dir"] / "agent.log").read_text()
        for job_id in ("polite", "stubborn"):
            self.assertRegex(log, fr"WARN .*job={job_id} is no running job of the head's.* its driver is stopped; what it wrote stays in ")
            self.assertIn("up\n", (head["dir"] / "logs" / f"job-driver-{job_id}.log").read_text())
        wait_until(cluster.is_up, "the head serves", 60)
        self.assertFalse({"polite", "stubborn"} & {j["submission_id"] for j in cluster.get("/api/jobs/")})
        cluster.submit("echo again", submission_id="polite")
        self.assertEqual(cluster.wait_job("polite")["status"], "SUCCEEDED")

    def test_a_driver_without_a_record_is_stopped(self):
        """The store is an older copy: what that does not know is nobody's, also on the head's own node."""
        with Cluster(nodes=1) as cluster:
            cluster.submit("true", submission_id="old")
            cluster.wait_job("old")
            cluster.submit("exec sleep 1000", submission_id="stays")
            cluster.wait_job("stays", ("RUNNING",))
            head = cluster.node("node-0")
            os.kill(head["pid_agent"], signal.SIGSTOP)
            copy = {f.name: f.read_bytes() for f in head["dir"].glob("gcs.sqlite*")}
            os.kill(head["pid_agent"], signal.SIGCONT)

            def set_back(head):
                for file in head["dir"].glob("gcs.sqlite*"):
                    file.unlink()
                for name, data in copy.items():
                    (head["dir"] / name).write_bytes(data)

            self.lose_records(cluster, set_back)
            self.assertEqual(cluster.job("old")["status"], "SUCCEEDED")
            self.assertEqual(cluster.job("stays")["status"], "RUNNING")
            cluster.call("POST", "/api/jobs/stays/stop")
            cluster.wait_job("stays", ("STOPPED",))

    def test_so_is_one_of_a_head_whose_store_is_memory(self):
        with Cluster(nodes=1, start_args=["--store", "memory"]) as cluster:
            self.lose_records(cluster, lambda head: None)

    def test_one_whose_record_cannot_be_read_stays(self):
        with Cluster(nodes=1) as cluster:
            cluster.submit("exec sleep 987", submission_id="odd")
            cluster.wait_job("odd", ("RUNNING",))
            pid = wait_until(lambda: next((p for p in cluster.own_pids() if "sleep 987" in command_of(p)), 0), "it runs")
            head = cluster.node("node-0")
            GcsClient(address=head["gcs_address"]).internal_kv_put(
                b"_ray_internal_job_info_odd", json.dumps({"status": "SUSPENDED", "entrypoint": "x"}).encode(), True, b"job", timeout=20)
            os.kill(head["pid_agent"], signal.SIGKILL)
            log = head["dir"] / "agent.log"
            wait_until(lambda: log.read_text().count("head started") > 1, log.read_text, 30)
            wait_until(cluster.is_up, "the head serves", 60)
            self.assertIn("it is left alone", log.read_text())
            self.assertNotIn("its driver is stopped", log.read_text())
            self.assertTrue(is_alive(pid))
            os.kill(pid, signal.SIGKILL)

    def test_without_it_a_new_cluster_and_a_word(self):
        with Cluster(nodes=1) as cluster:
            former = kill_whole(cluster)
            done = self.start(cluster)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn(f"mobula: this is a new cluster; --resume would go on from {former['dir']}\n", done.stdout)
            self.assertEqual(len(cluster.nodes()), 2)

    def test_a_gang_of_the_former_cluster_ends_late(self):
        """On a node that has joined the new cluster, which counts its jobs from 1 again: the one with that number there is none of its."""
        with Cluster(nodes=2) as cluster:
            ranks = ["sh", "-c", 'trap "" TERM; echo rank runs; while :; do sleep 0.1; done']
            cluster.submit(["mobula", "run", "--num-nodes", "2", "--lease", "2s", "--stop-grace", "8s", "--", *ranks], submission_id="former")
            worker, head = cluster.node("node-1"), cluster.node("node-0")
            wait_until(lambda: any("rank runs" in p.read_text() for p in worker["dir"].glob("gangs/*/rank-*.log")), "ranks run", 60)
            kill_all(lost := tree(head["pid_init"]))
            wait_until(lambda: not any(map(is_alive, lost)), "the head's machine is gone")
            cluster.forget_node(head)
            done = cluster.mobula("start", "--head", "--temp-dir", cluster.temp, "--port", cluster.gcs.rsplit(":", 1)[1], "--dashboard-port",
                                  "0", "--dashboard-agent-listen-port", "0", "--node-name", "node-0")
            self.assertEqual(done.returncode, 0, done.stdout)
            cluster.address = f"http://127.0.0.1:{cluster.node('node-0')['dashboard_port']}"
            cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", f"until test -e {cluster.dir}/go; do sleep 0.1; done"],
                           submission_id="later")
            log = worker["dir"] / "agent.log"
            wait_until(lambda: re.search(r"job=former .*-> ENDED", log.read_text()), lambda: log.read_text()[-3000:], 60)
            wait_until(lambda: re.search(r"job=later .*-> RUNNING", log.read_text()), lambda: cluster.job("later"), 60)
            open(f"{cluster.dir}/go", "w").close()
            self.assertEqual(cluster.wait_job("later")["status"], "SUCCEEDED", cluster.logs("later"))

    def test_two_heads_never_share_a_store(self):
        with Cluster(nodes=1) as cluster:  # the head runs: there is nothing to go on from
            done = self.start(cluster, "--resume")
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertNotIn("going on", done.stdout)
            self.assertEqual(len(cluster.nodes()), 2)

    def test_where_it_cannot_mean_anything(self):
        with Cluster(nodes=1) as cluster:
            for options in (("--store", "memory"), ("--store", "redis://127.0.0.1:1")):
                done = self.start(cluster, "--resume", *options)
                self.assertEqual(done.returncode, 64, done.stdout)
                self.assertRegex(done.stdout, re.escape("--resume goes with --head and the sqlite store"))


if __name__ == "__main__":
    sys.exit(unittest.main())
