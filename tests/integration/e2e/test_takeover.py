"""Two heads, one Redis: the standby takes over, and nothing that runs notices.

kuberay#1489, kuberay#3903, kuberay#2161, kuberay#4217: a lost head must not lose its jobs.
ray#65025: a takeover must not fail a healthy job.
"""

import concurrent.futures
import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from cluster import MOBULA, NoCluster, command_of, environment_of, is_alive, kill_node, wait_until
from ray._raylet import GcsClient
from shared_store import Redis, SharedCluster
from tail import Tail
from test_packages import zip_of

TAKEOVER_S = 5


def open_if_read(pipe):
    """A descriptor, as soon as somebody reads from it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as e:
        if e.errno != errno.ENXIO:
            raise
        return None


class Takeover(unittest.TestCase):
    def test_a_standby_refuses_politely(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            head = cluster.gcs
            shown = cluster.mobula("status", "--address", cluster.address).stdout
            self.assertRegex(shown, r"node-0 +head")
            self.assertRegex(shown, r"node-1 +standby")
            cluster.use("node-1")
            status, text = cluster.call_once("GET", "/api/jobs/")
            self.assertEqual((status, text), (503, f"this head is a standby; the head is at {head}"))

    def test_a_gang_does_not_notice_that_its_head_hangs(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            marker = f"{cluster.dir}/go-on"
            # Every start of a rank adds a line: its pid.
            command = (f"echo $$ >> {cluster.dir}/rank-$RANK; "
                       f"until test -e {marker}; do sleep 0.1; done; echo rank $RANK ends")

            def ranks():
                files = sorted(pathlib.Path(cluster.dir).glob("rank-*"))
                return [[int(pid) for pid in f.read_text().split()] for f in files]

            cluster.submit(f"mobula run --num-nodes 2 -- sh -c '{command}'", submission_id="gang")
            first = wait_until(lambda: len(r := ranks()) == 2 and all(r) and r, "both ranks run")
            with cluster.hung("node-0"):
                began = time.monotonic()
                cluster.use("node-1")
                wait_until(cluster.answers, "the standby is the head", 10)
                took = time.monotonic() - began
                self.assertLess(took, TAKEOVER_S)
                print(f"takeover after {took:.2f} s")
                self.assertEqual(cluster.job("gang")["status"], "RUNNING")
            wait_until(lambda: "is deposed" in cluster.agent_log("node-0"),
                       "the old head says that it is deposed")
            wait_until(lambda: "its driver is reported" in cluster.agent_log("node-0"),
                       "the old head's node reports the driver to the new one")
            self.assertEqual(ranks(), first, "a rank was started again")
            self.assertTrue(all(is_alive(pid) for pids in first for pid in pids), "a rank ended")
            self.assertEqual(cluster.job("gang")["status"], "RUNNING")
            open(marker, "w").close()
            job = cluster.wait_job("gang")
            self.assertEqual(job["status"], "SUCCEEDED", job)
            # The driver's log is still on its node: the new head reads it there.
            log = cluster.logs("gang")
            for rank in "01":
                self.assertEqual(log.count(f"rank {rank} ends\n"), 1, log)
            self.assertEqual(Tail(cluster.address, "gang").read().decode(), log)
            new = cluster.submit("mobula run --num-nodes 2 -- echo both of us")
            self.assertEqual(cluster.wait_job(new)["status"], "SUCCEEDED", cluster.logs(new))
            cluster.assert_all_free()

    def test_a_job_whose_node_is_lost_fails_and_names_it(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            cluster.submit("sleep 600", submission_id="lost")
            cluster.wait_job("lost", ("RUNNING",))
            gcs = GcsClient(address=cluster.gcs)
            for i in range(20):
                gcs.internal_kv_put(b"key %d" % i, b"value", True, namespace=b"test")
            node = cluster.node("node-0")
            kill_node(node)
            began = time.monotonic()
            cluster.use("node-1")
            wait_until(cluster.answers, "the standby is the head", 10)
            took = time.monotonic() - began
            self.assertLess(took, TAKEOVER_S)
            print(f"takeover after {took:.2f} s")
            gcs = GcsClient(address=cluster.gcs)
            for i in range(20):
                self.assertEqual(gcs.internal_kv_get(b"key %d" % i, namespace=b"test"), b"value")
            job = cluster.wait_job("lost", timeout_s=90)
            self.assertEqual(job["status"], "FAILED")
            self.assertIn(f"node {node['node_id']}", job["message"])

    def test_a_head_in_order_hands_over_at_once(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            pid = cluster.node("node-0")["pid_init"]
            cluster.use("node-1")
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not is_alive(pid), "the first head ends")
            wait_until(cluster.answers, "the standby is the head", 2)


class Starts(unittest.TestCase):
    """What was under way when the head went is gone on with, once."""

    def add_worker(self, cluster):
        done = cluster.mobula(
            "start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--node-name", "worker",
            "--resources", '{"shark": 1}', "--dashboard-agent-listen-port", "0")
        self.assertEqual(done.returncode, 0, done.stdout)
        return cluster.node("worker")

    def test_a_start_that_nobody_answered_happens_once(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            worker = self.add_worker(cluster)
            cluster.submit("true", submission_id="warm", entrypoint_resources={"shark": 1})
            self.assertEqual(cluster.wait_job("warm")["status"], "SUCCEEDED")
            with cluster.hung("worker"):
                cluster.submit(f"echo $$ >> {cluster.dir}/started; sleep 1; echo over",
                               submission_id="once", entrypoint_resources={"shark": 1})
                wait_until(lambda: "job_start:once" in redis.cli("hkeys", "test:kv"),
                           "number and node are stored")
                self.assertEqual(cluster.job("once")["status"], "PENDING")
                cluster.kill("node-0")
                cluster.use("node-1")
                wait_until(cluster.answers, "the standby is the head", 10)
                self.assertEqual(cluster.job("once")["status"], "PENDING")
            job = cluster.wait_job("once")
            self.assertEqual((job["status"], job["driver_node_id"]),
                             ("SUCCEEDED", worker["node_id"]), job["message"])
            self.assertEqual(len(pathlib.Path(cluster.dir, "started").read_text().split()), 1)
            self.assertIn("over\n", cluster.logs("once"))

    def test_packages_of_jobs_that_wait_outlive_their_head(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            self.add_worker(cluster)
            names = {"small": "_ray_pkg_00000000000000d1.zip", "large": "_ray_pkg_00000000000000d2.zip"}
            folder = pathlib.Path(cluster.dir, "work")
            folder.mkdir()
            (folder / "data").write_bytes(bytes(9 << 20))
            told = cluster.mobula("job", "submit", "--address", cluster.address, "--working-dir",
                                  str(folder), "--", "true").stdout
            self.assertIn("if the head's node is lost before the job starts, the job fails", told)
            for job, filling in (("small", os.urandom(3 << 20)), ("large", os.urandom(9 << 20))):
                status, _ = cluster.call("PUT", f"/api/packages/gcs/{names[job]}", raw=zip_of(
                    {"main.sh": f"echo {job} ran", "filling": filling}))
                self.assertEqual(status, 200)
            cluster.submit("sleep 999", submission_id="holds", entrypoint_resources={"shark": 1})
            cluster.wait_job("holds", ("RUNNING",))
            for job, name in names.items():
                cluster.submit("sh main.sh", submission_id=job, entrypoint_resources={"shark": 1},
                               runtime_env={"working_dir": f"gcs://{name}"})
            cluster.kill("node-0")
            cluster.use("node-1")
            wait_until(cluster.answers, "the standby is the head", 10)
            cluster.call("POST", "/api/jobs/holds/stop")
            job = cluster.wait_job("small")
            self.assertEqual(job["status"], "SUCCEEDED", job["message"])
            self.assertIn("small ran\n", cluster.logs("small"))
            job = cluster.wait_job("large")
            self.assertEqual(job["error_type"], "RUNTIME_ENV_SETUP_FAILURE", job)
            self.assertIn(f"The package gcs://{names['large']} is not on this head. If it was "
                          "uploaded to a head before this one: only packages of at most 8 MiB are "
                          "kept in the store.", job["message"])


class StoreTrouble(unittest.TestCase):
    def test_redis_pauses_and_comes_back(self):
        with Redis() as redis, SharedCluster(redis, nodes=1) as cluster:
            cluster.submit("true", submission_id="before")
            cluster.wait_job("before", ("SUCCEEDED",))
            redis.stop()
            status, text = wait_until(
                lambda: (a := cluster.call_once("GET", "/api/jobs/"))[0] == 503 and a, "the lease ends")
            self.assertIn("lease is in doubt", text)
            redis.start()
            wait_until(cluster.answers, "the head serves again", 60)
            self.assertEqual(cluster.job("before")["status"], "SUCCEEDED")

    def test_what_is_shown_is_committed(self):
        """Every view of jobs: what the store has not taken yet may be gone after a crash."""
        with Redis() as redis, SharedCluster(redis, nodes=1) as cluster, \
                concurrent.futures.ThreadPoolExecutor(8) as pool:
            done = cluster.mobula("run", "--num-nodes", "1", "--", "true")
            self.assertEqual(done.returncode, 0, done.stdout)
            driver = next(j["job_id"] for j in cluster.get("/api/jobs/") if j["type"] == "DRIVER")
            paths = ["/api/jobs/", "/api/jobs/?limit=9", "/api/jobs/?status=PENDING,RUNNING",
                     "/api/v0/jobs", "/api/jobs/new", f"/api/jobs/{driver}"]
            redis.process.send_signal(signal.SIGSTOP)
            try:
                post = pool.submit(cluster.call_once, "POST", "/api/jobs/",
                                   {"entrypoint": "sleep 999", "submission_id": "new"})
                wait_until(lambda: [j for j in cluster.status()["jobs"]
                                    if j["submission_id"] == "new"], "the head has it", 8)
                answers = list(pool.map(lambda path: cluster.call_once("GET", path), paths))
                self.assertFalse(post.done())
            finally:
                redis.process.send_signal(signal.SIGCONT)
            self.assertEqual([a[0] for a in answers], [503] * len(paths), answers)
            self.assertEqual(post.result()[0], 200)
            for path in paths[:-1]:
                self.assertIn('"new"', wait_until(
                    lambda: (a := cluster.call_once("GET", path))[0] == 200 and a[1], path, 15))
            cluster.call("POST", "/api/jobs/new/stop")
            cluster.wait_job("new", ("STOPPED",))

    def test_a_busy_head_keeps_its_lease(self):
        with Redis() as redis, SharedCluster(redis, nodes=1) as cluster:
            gcs = GcsClient(address=cluster.gcs)
            until = time.monotonic() + 5  # the lease is one of 3 s
            while time.monotonic() < until:
                gcs.internal_kv_put(b"key", b"value", True, namespace=b"test")
                self.assertTrue(cluster.answers(), cluster.call("GET", "/api/jobs/"))

    def test_an_emptied_redis_is_named(self):
        with Redis() as redis, SharedCluster(redis, nodes=1) as cluster:
            redis.cli("flushall")
            wait_until(lambda: "was emptied or set back" in cluster.agent_log("node-0"),
                       "the head says what happened")
            wait_until(lambda: "the store is empty, but this node belongs to cluster"
                       in cluster.agent_log("node-0"), "a restarted head says it too")
            self.assertEqual(redis.cli("hlen", "test:kv").strip(), "0", "nothing is begun anew")

    def test_an_emptied_redis_is_named_by_a_standby_too(self):
        """Which would else begin a new cluster, while the old one's jobs run and are nobody's."""
        with Redis("--appendonly", "no") as redis, SharedCluster(redis, nodes=2) as cluster:
            cluster.submit("sleep 1000", submission_id="stays")
            cluster.wait_job("stays", ("RUNNING",))
            redis.cli("save")
            dump = pathlib.Path(redis.dir, "dump.rdb").read_bytes()
            redis.cli("flushall")
            for name in ("node-0", "node-1"):
                wait_until(lambda: "the store is empty, but this node belongs to cluster"
                           in cluster.agent_log(name), f"{name} says what happened")
                cluster.use(name)
                self.assertFalse(cluster.answers())
            self.assertEqual(redis.cli("hlen", "test:kv").strip(), "0", "nothing is begun anew")
            redis.stop()
            pathlib.Path(redis.dir, "dump.rdb").write_bytes(dump)
            redis.start()
            wait_until(lambda: any(cluster.use(name) or cluster.answers() for name in ("node-0", "node-1")),
                       "with its data restored all is as before", 60)
            self.assertEqual(cluster.job("stays")["status"], "RUNNING")
            cluster.call("POST", "/api/jobs/stays/stop")
            cluster.wait_job("stays", ("STOPPED",))

    def test_a_redis_that_was_set_back_is_named_by_a_standby_too(self):
        with Redis("--appendonly", "no") as redis, SharedCluster(redis, nodes=2) as cluster:
            redis.cli("save")
            dump = pathlib.Path(redis.dir, "dump.rdb").read_bytes()
            for i in range(5):
                cluster.submit("true", submission_id=f"newer-{i}")
                cluster.wait_job(f"newer-{i}")
            batches = int(redis.cli("get", "test:batch"))
            with redis.monitored() as told:  # who asks for the lease says how many batches it has heard of
                wait_until(lambda: any(int(n) >= batches for n in re.findall(r'"3000" "(\d+)"$', told(), re.M)),
                           lambda: f"the standby has heard of batch {batches}:\n{told()[-3000:]}")
            head = cluster.node("node-0")
            os.kill(head["pid_init"], signal.SIGSTOP)  # it starts no other head
            os.kill(head["pid_agent"], signal.SIGSTOP)
            try:
                redis.stop()
                pathlib.Path(redis.dir, "dump.rdb").write_bytes(dump)
                redis.start()
                said = wait_until(lambda: re.search(r"was set back: it has batch (\d+), and had (\d+) while",
                                                    cluster.agent_log("node-1")), "the standby says what happened")
                self.assertLess(int(said[1]), batches)
                self.assertGreaterEqual(int(said[2]), batches)
            finally:
                for pid in (head["pid_agent"], head["pid_init"]):
                    os.kill(pid, signal.SIGCONT)

    def test_a_driver_that_a_redis_set_back_does_not_know_is_stopped(self):
        """And its id is free for another job, which waits for it: their starts may have the same number."""
        for driver in ("exec sleep 987", "trap 'sleep 3; exit 0' TERM; sleep 987 & wait"):
            with self.subTest(driver):
                self.set_back(driver)

    def set_back(self, driver):
        with Redis("--appendonly", "no") as redis, SharedCluster(redis, nodes=1) as cluster:
            cluster.submit("true", submission_id="old")
            cluster.wait_job("old")
            redis.cli("save")
            dump = pathlib.Path(redis.dir, "dump.rdb").read_bytes()
            cluster.submit(driver, submission_id="lost")
            cluster.wait_job("lost", ("RUNNING",))
            pid = wait_until(lambda: next((p for p in cluster.own_pids() if "sleep 987" in command_of(p)), 0), "it runs")
            head = cluster.node("node-0")
            os.kill(head["pid_init"], signal.SIGSTOP)  # it starts the next agent when it goes on
            os.kill(head["pid_agent"], signal.SIGKILL)
            redis.stop()
            pathlib.Path(redis.dir, "dump.rdb").write_bytes(dump)
            redis.start()
            os.kill(head["pid_init"], signal.SIGCONT)
            wait_until(cluster.answers, "it is the head again", 60)
            self.assertEqual([j["submission_id"] for j in cluster.get("/api/jobs/")], ["old"])
            self.assertIn("job=lost is no running job of the head's", cluster.agent_log("node-0"))
            cluster.submit("echo another", submission_id="lost")
            self.assertEqual(cluster.wait_job("lost")["status"], "SUCCEEDED", cluster.agent_log("node-0"))
            self.assertIn("another\n", cluster.logs("lost"))
            self.assertFalse(is_alive(pid))

    def test_a_full_redis_is_said_and_waited_for(self):
        with Redis() as redis, SharedCluster(redis, nodes=1) as cluster:
            began = len(cluster.agent_log("node-0"))
            redis.cli("config", "set", "maxmemory", "1")
            wait_until(lambda: "OOM" in cluster.agent_log("node-0"), "the head says what is wrong")
            full = time.monotonic()
            wait_until(lambda: time.monotonic() - full > 6, "it has been full for a while")
            log = cluster.agent_log("node-0")[began:]
            self.assertLess(log.count("connected"), 4, log)
            self.assertLess(log.count("OOM"), 4, log)
            redis.cli("config", "set", "maxmemory", "0")
            wait_until(cluster.answers, "it is the head again", 60)
            self.assertIn("connected", cluster.agent_log("node-0")[began:])
            cluster.submit("true", submission_id="after")
            self.assertEqual(cluster.wait_job("after")["status"], "SUCCEEDED")

    def test_foreign_data_is_left_alone(self):
        with Redis() as redis, NoCluster() as cluster:
            redis.cli("hset", "test:kv", "not ours", "x")
            done = cluster.mobula("start", "--head", "--temp-dir", cluster.temp, "--port", "0",
                                  "--dashboard-port", "0", "--store", redis.url)
            self.assertEqual(done.returncode, 65, done.stdout)
            self.assertIn("test:kv is not one of mobula's", done.stdout)
            self.assertEqual(redis.cli("hgetall", "test:kv").split(), ["not", "ours", "x"])
            redis.cli("del", "test:kv", "test:lease", "test:epoch")
            redis.cli("hset", "test:batch", "not ours", "x")
            done = cluster.mobula("start", "--head", "--temp-dir", cluster.temp, "--port", "0",
                                  "--dashboard-port", "0", "--store", redis.url)
            self.assertEqual(done.returncode, 65, done.stdout)
            self.assertIn("test:batch is not one of mobula's", done.stdout)

    def comes_again(self, cluster):
        """A restarted agent has the password, too; what it starts and its own user do not."""
        (node,) = [n for n in cluster.nodes() if n["state"] == "ALIVE"]
        os.kill(node["pid_agent"], signal.SIGKILL)
        wait_until(lambda: [n for n in cluster.nodes() if n["state"] == "ALIVE" and
                            n["pid_agent"] != node["pid_agent"]], "the next agent", 60)
        wait_until(lambda: cluster.mobula("status", "--address",
                                          f"http://127.0.0.1:{node['dashboard_port']}"
                                          ).returncode == 0, "it is the head again", 60)

    def programs_for_others(self):
        """A folder with copies: where they are built, perhaps in root's home, others see nothing."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-programs-")))
        folder.chmod(0o755)
        for name in ("mobula", "mobula-agent", "mobula-init"):
            shutil.copy(pathlib.Path(MOBULA).parent / name, folder)
        return folder

    def test_another_process_of_the_user_cannot_look(self):
        """What is not dumpable opens its descriptors to nobody but root, and tests may be root."""
        nobody = 65534
        if os.geteuid() != 0:
            self.skipTest("not root: no other user to be")
        mobula = self.programs_for_others() / "mobula"
        secret = "hunter2-very-secret"
        with Redis("--requirepass", secret) as redis, \
                tempfile.TemporaryDirectory(prefix="mb-nobody-") as home:
            os.chown(home, nobody, nobody)

            def run(*argv):
                return subprocess.run([str(a) for a in argv], user=nobody, group=nobody,
                                      extra_groups=[], text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, timeout=60, cwd=home,
                                      env={"PATH": os.environ["PATH"], "HOME": home,
                                           "MOBULA_STORE_PASSWORD": secret})

            temp = ["--temp-dir", f"{home}/t"]
            try:
                done = run(mobula, "start", "--head", *temp, "--port", "0", "--dashboard-port", "0",
                           "--dashboard-agent-listen-port", "0", "--store", redis.url)
                self.assertEqual(done.returncode, 0, done.stdout)
                (path,) = pathlib.Path(home).rglob("node.json")
                node = json.loads(path.read_text())
                fds = [f"/proc/{node[name]}/fd" for name in ("pid_init", "pid_agent")]
                links = []
                for p in pathlib.Path(fds[0]).iterdir():
                    with contextlib.suppress(FileNotFoundError):  # it was just closed
                        links.append(os.readlink(p))
                self.assertEqual([n for n in links if "mobula-store" in n],
                                 ["/memfd:mobula-store (deleted)"])
                for fd in fds:
                    looked = run("ls", fd)
                    self.assertNotEqual(looked.returncode, 0, looked.stdout)
                    self.assertIn("Permission denied", looked.stdout)
            finally:
                done = run(mobula, "stop", *temp)
            self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_process_that_begins_cannot_be_looked_into(self):
        """Jobs run while an agent is restarted: it shuts them out before it does anything else. A
        pipe in the place of a file that is read first holds it there."""
        as_other = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        agent_program = self.programs_for_others() / "mobula-agent"
        with tempfile.TemporaryDirectory(prefix="mb-nobody-") as home:
            if as_other:
                os.chown(home, 65534, 65534)
            pipe = pathlib.Path(home, "node.json")
            subprocess.run(["mkfifo", pipe], check=True, **as_other)
            secret = os.memfd_create("mobula-store", 0)
            agent = subprocess.Popen([str(agent_program), "--head",
                                      "--node-dir", home, "--port", "0", "--dashboard-port", "0"],
                                     pass_fds=[secret], env={"MOBULA_SECRET_FD": str(secret)},
                                     cwd=home, **as_other)
            try:
                writer = wait_until(lambda: open_if_read(pipe), "the agent reads its file", 60)
                looked = subprocess.run(["ls", f"/proc/{agent.pid}/fd"], text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        **as_other)
                self.assertIn("Permission denied", looked.stdout)
            finally:
                agent.kill()
                agent.wait()
                os.close(secret)
            os.close(writer)

    def test_the_password_is_not_seen(self):
        secret = "hunter2-very-secret"
        with Redis("--requirepass", secret) as redis, NoCluster() as cluster:
            url = redis.url.replace("//", f"//:{secret}@")
            start = ["start", "--head", "--temp-dir", cluster.temp, "--port", "0",
                     "--dashboard-port", "0", "--dashboard-agent-listen-port", "0", "--store"]
            done = cluster.mobula(*start, redis.url)
            self.assertEqual(done.returncode, 77, done.stdout)
            self.assertIn("refuses the login", done.stdout)
            file = pathlib.Path(cluster.dir, "secret")
            file.write_text(secret + "\n")
            for argv, env in (([url], {}), ([redis.url], {"MOBULA_STORE_PASSWORD": secret}),
                              ([redis.url, "--store-password-file", file], {})):
                done = cluster.mobula(*start, *argv, env=env)
                self.assertEqual(done.returncode, 0, done.stdout)
                file.unlink()
                self.comes_again(cluster)
                file.write_text(secret + "\n")
                self.assertGreaterEqual(len(pids := cluster.own_pids()), 2)
                for pid in pids:
                    self.assertNotIn(secret, command_of(pid), pid)
                    self.assertNotIn(secret, environment_of(pid), pid)
                for log in pathlib.Path(cluster.temp).rglob("*.log"):
                    self.assertNotIn(secret, log.read_text(errors="replace"))
                n_files = 0
                for directory, _, names in os.walk(cluster.temp):  # what goes away meanwhile is no error
                    for path in (pathlib.Path(directory, name) for name in names):
                        with contextlib.suppress(FileNotFoundError):
                            if path.is_file():
                                self.assertNotIn(secret.encode(), path.read_bytes(), path)
                                n_files += 1
                self.assertGreater(n_files, 3)
                cluster.mobula("stop", "--temp-dir", cluster.temp)
            for argv, env in (([url], {"MOBULA_STORE_PASSWORD": secret}),
                              ([url, "--store-password-file", file], {}),
                              ([redis.url, "--store-password-file", file],
                               {"MOBULA_STORE_PASSWORD": secret})):
                done = cluster.mobula(*start, *argv, env=env)
                self.assertEqual(done.returncode, 64, done.stdout)
                self.assertIn("given more than once", done.stdout)
                self.assertNotIn(secret, done.stdout)
            done = cluster.mobula(*start, "rediss://h")
            self.assertIn("TLS", done.stdout)
            self.assertEqual(done.returncode, 78)


if __name__ == "__main__":
    unittest.main(verbosity=2)
