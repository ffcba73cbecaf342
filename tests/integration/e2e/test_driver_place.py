"""Where the driver of a job runs: on the head's node, or on another that has what it asks for."""

import json
import os
import pathlib
import signal
import unittest

from cluster import Cluster, is_alive, wait_until
from tail import Tail
from test_packages import MAIN, zip_of


class Place(unittest.TestCase):
    """node-0 is the head, with 2 CPUs and a whale; `big` has 4 CPUs, sharks and a label."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, start_args=[
            "--num-cpus", "2", "--num-gpus", "0", "--resources", '{"whale": 1}']))
        started = cls.cluster.mobula(
            "start", "--address", cls.cluster.gcs, "--temp-dir", cls.cluster.temp, "--node-name",
            "big", "--num-cpus", "4", "--num-gpus", "2", "--resources", '{"shark": 2}', "--labels",
            '{"zone": "b"}', "--dashboard-agent-listen-port", "0")
        assert started.returncode == 0, started.stdout
        cls.head, cls.big = (cls.cluster.node(n)["node_id"] for n in ("node-0", "big"))

    def tearDown(self):
        for job in self.jobs():
            self.cluster.call("POST", f"/api/jobs/{job}/stop")
        for job in self.jobs():
            self.cluster.wait_job(job)
            self.cluster.call("DELETE", f"/api/jobs/{job}")

    def jobs(self):
        return [j["submission_id"] for j in json.loads(self.cluster.call("GET", "/api/jobs/")[1])]

    def gate(self, name):
        return pathlib.Path(self.cluster.dir, f"gate-{name}")

    def gated(self, name, **fields):
        return self.cluster.submit(f"until [ -e {self.gate(name)} ]; do sleep 0.02; done",
                                   submission_id=name, **fields)

    def test_what_is_asked_for_says_where(self):
        for name, fields, place in (
                ("nothing", {}, self.head),
                ("whale", {"entrypoint_resources": {"whale": 1}}, self.head),
                ("cpus", {"entrypoint_num_cpus": 2}, self.head),
                ("wide", {"entrypoint_num_cpus": 3}, self.big),
                ("shark", {"entrypoint_resources": {"shark": 1}}, self.big),
                ("gpus", {"entrypoint_num_gpus": 1}, self.big),
                ("zone", {"entrypoint_label_selector": {"zone": "in(a, b)"}}, self.big),
                ("not", {"entrypoint_label_selector": {"zone": "!b"}}, self.head)):
            with self.subTest(name):
                self.cluster.submit("echo it is here; exit 3", submission_id=name, **fields)
                job = self.cluster.wait_job(name)
                self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 3), job)
                self.assertIn("it is here", job["message"])  # the log's last lines
                self.assertEqual(job["driver_node_id"], place)
                node = self.cluster.node("big" if place == self.big else "node-0")
                self.assertEqual(job["driver_agent_http_address"],
                                 f"http://127.0.0.1:{node['http_port']}")
                self.assertIn("it is here\n", self.cluster.logs(name))
                self.assertEqual(Tail(self.cluster.address, name).read().decode(),
                                 self.cluster.logs(name))

    def nodes_show_what_is_used(self, cpus):
        words = self.cluster.mobula("status", "--address", self.cluster.address).stdout
        for node in self.cluster.status()["nodes"]:
            used, total = cpus[node["node_id"]]
            self.assertEqual(node["for_drivers"]["CPU"], {"used": used, "total": total}, node)
            line = next(line for line in words.splitlines() if node["node_id"][:12] in line)
            self.assertIn(f" CPU {used}/{total} used ", line)

    def test_a_full_head_sends_it_elsewhere_and_a_full_cluster_lets_it_wait(self):
        places = {}
        for i, name in enumerate(("a", "b", "c")):
            self.gated(name, entrypoint_num_cpus=2)
            places[name] = self.cluster.wait_job(name, ("RUNNING",))["driver_node_id"]
        self.assertEqual(places, {"a": self.head, "b": self.big, "c": self.big})
        self.gated("d", entrypoint_num_cpus=2)
        where = {self.head: r"0 of 2 free on the head's node",
                 self.big: fr"0 of 4 free on node {self.big[:12]}"}
        self.assertRegex(self.cluster.job("d")["message"],
                         rf"It is number 1 of 1 in the queue: it needs 2 CPUs, ({'|'.join(where.values())}), "
                         r"one of 2 that could take it\.$")
        self.nodes_show_what_is_used({self.head: (2, 2), self.big: (4, 4)})
        self.cluster.wait_job(self.cluster.submit("true"), ("SUCCEEDED",))
        self.gate("c").touch()
        wait_until(lambda: self.cluster.job("d")["status"] == "RUNNING" or
                   self.cluster.job("c")["status"] == "RUNNING", "c ends")
        for name in "abd":
            self.gate(name).touch()
        for name in "abcd":
            self.assertEqual(self.cluster.wait_job(name)["status"], "SUCCEEDED")
        self.nodes_show_what_is_used({self.head: (0, 2), self.big: (0, 4)})

    def test_what_no_node_has_fails_and_says_so(self):
        for name, fields, why in (
                ("cpus", {"entrypoint_num_cpus": 5}, "It needs 5 CPUs, the cluster has 4 on one node."),
                ("both", {"entrypoint_resources": {"whale": 1, "shark": 1}},
                 "No node has all together that it needs."),
                ("zone", {"entrypoint_label_selector": {"zone": "c"}},
                 "It needs a node that matches the label selector zone=c, the cluster has none.")):
            with self.subTest(name):
                self.cluster.submit("true", submission_id=name, **fields)
                self.assertIn(why, self.cluster.job(name)["message"])
                job = self.cluster.wait_job(name)
                self.assertEqual((job["status"], job["error_type"]),
                                 ("FAILED", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"))
                self.assertIn(why, job["message"])

    def test_stop_ends_it_there(self):
        pid_file = pathlib.Path(self.cluster.dir, "pid")
        self.cluster.submit(f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 999",
                            submission_id="stops", entrypoint_resources={"shark": 2})
        wait_until(pid_file.exists, lambda: self.cluster.logs("stops"))
        pid = int(pid_file.read_text())
        self.assertTrue(is_alive(pid))
        self.cluster.call("POST", "/api/jobs/stops/stop")
        self.assertEqual(self.cluster.wait_job("stops")["status"], "STOPPED")
        self.assertFalse(is_alive(pid))
        # What it held is free at once.
        self.cluster.submit("true", submission_id="next", entrypoint_resources={"shark": 2})
        self.assertEqual(self.cluster.wait_job("next")["status"], "SUCCEEDED")

    def test_packages_go_there(self):
        name, module = "_ray_pkg_00000000000000c1.zip", "_ray_pkg_00000000000000c2.zip"
        big = os.urandom(3 << 20).hex()  # several pieces
        for n, files in ((name, {"main.py": MAIN + "print(len(open('big').read()))\n", "big": big}),
                         (module, {"mod/__init__.py": "NAME = 'a package'\n"})):
            self.assertEqual(self.cluster.call("PUT", f"/api/packages/gcs/{n}",
                                               raw=zip_of(files))[0], 200)
        env = {"working_dir": f"gcs://{name}", "py_modules": [f"gcs://{module}"]}
        self.cluster.submit("python3 main.py; pwd", submission_id="packed", runtime_env=env,
                            entrypoint_resources={"shark": 1})
        job = self.cluster.wait_job("packed")
        self.assertEqual((job["status"], job["driver_node_id"]), ("SUCCEEDED", self.big),
                         job["message"])
        log = self.cluster.logs("packed")
        self.assertIn(f"from a package\n{len(big)}\n", log)
        self.assertIn(f"{self.cluster.node('big')['dir']}/jobs/packed/working_dir\n", log)

    def test_agents_that_die_take_nothing_along(self):
        gate = self.gate("lives")
        self.cluster.submit(f"i=0; until [ -e {gate} ]; do echo line $i; i=$((i+1)); sleep 0.01; "
                            "done; echo lines $i", submission_id="lives", entrypoint_num_gpus=2)
        wait_until(lambda: "line 5\n" in self.cluster.logs("lives"), "it runs")
        wait_until(lambda: self.cluster.available("mobula_gpu") == 0, "its GPUs are its own")
        for name in ("big", "node-0"):
            agent = self.cluster.node(name)["pid_agent"]
            os.kill(agent, signal.SIGKILL)
            wait_until(lambda n=name, a=agent: self.cluster.node(n)["pid_agent"] != a and
                       self.cluster.node(n)["state"] == "ALIVE", f"{name} is back")
            self.assertEqual(self.cluster.job("lives")["status"], "RUNNING")
        wait_until(lambda: self.cluster.available("mobula_gpu") == 0, "they still are")
        gate.touch()
        self.assertEqual(self.cluster.wait_job("lives")["status"], "SUCCEEDED")
        log = self.cluster.logs("lives")
        n = int(log.rsplit("lines ", 1)[1])
        lines = [int(line[5:]) for line in log.splitlines() if line.startswith("line ")]
        self.assertEqual(lines, list(range(n)))
        wait_until(lambda: self.cluster.available("mobula_gpu") == 2, "they are back")


class LostNode(unittest.TestCase):
    def test_its_jobs_fail_and_name_it(self):
        with Cluster(nodes=1, start_args=["--num-cpus", "1"]) as cluster:
            started = cluster.mobula(
                "start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--node-name", "gone",
                "--num-cpus", "2", "--dashboard-agent-listen-port", "0")
            self.assertEqual(started.returncode, 0, started.stdout)
            cluster.submit("sleep 999", submission_id="lost", entrypoint_num_cpus=2)
            cluster.wait_job("lost", ("RUNNING",))
            node = cluster.node("gone")
            os.kill(node["pid_init"], signal.SIGTERM)
            job = cluster.wait_job("lost")
            self.assertEqual(job["status"], "FAILED")
            self.assertIn(f"node {node['node_id']}, where it ran, is dead", job["message"])
            wait_until(lambda: not is_alive(node["pid_init"]), "the node ends")
            cluster.submit("true", submission_id="never", entrypoint_num_cpus=2)
            self.assertIn("It needs 2 CPUs, the cluster has 1", cluster.job("never")["message"])
            self.assertEqual(cluster.wait_job("never")["status"], "FAILED")


if __name__ == "__main__":
    unittest.main(verbosity=2)
