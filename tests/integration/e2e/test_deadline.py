"""What was saved is in the store before the deadline: real ranks, a real S3 server, a link with a rate."""

import http.server
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

import s3
from cluster import Cluster, is_alive, iterations_of, kill_all, mini_model, train_command, tree, wait_until

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "s3"))
from faults import FaultProxy, error, hold, stall  # noqa: E402

BUCKET = f"s3://{s3.BUCKET}"
ENDLESS = 100_000  # iterations: more than the time that any test has
GRACE = "1ms"  # no save fits into it: the deadline decides, not --stop-grace, on all nodes of the gang
# A program that counts, and saves when it is told to stop, as Megatron's --exit-signal-handler does.
SAVES_ON_SIGTERM = r"""
save() { mkdir -p "$1/iter_0000007"; head -c 300000 /dev/zero > "$1/iter_0000007/rank-$RANK.bin"
         echo done > "$1.done"; peer="${1%?}$((1 - RANK)).done"
         until test -e "$peer"; do sleep 0.02; done  # all ranks before the tracker
         if [ "$RANK" = 0 ]; then echo 7 > "$1/latest_checkpointed_iteration.txt"; fi; exit 0; }
trap 'save "$MOBULA_CHECKPOINT_DIR"' TERM
echo "rank $RANK counts"
while :; do sleep 0.05; done
"""


def metrics(node):
    with urllib.request.urlopen(f"http://127.0.0.1:{node['http_port']}/metrics", timeout=60) as answer:
        return answer.read().decode()


class DeadlineTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-deadline-"))
        port = cls.enterClassContext(s3.server(cls.directory))
        cls.proxy = cls.enterClassContext(FaultProxy(port))
        cls.cluster = cls.enterClassContext(Cluster(nodes=2, env=s3.environment(cls.proxy.port)))

    def setUp(self):
        self.proxy.rate = None

    def tearDown(self):
        self.proxy.rate = None
        self.cluster.assert_all_free()

    def bucket(self, name):
        return pathlib.Path(self.directory, "s3", s3.BUCKET, name)

    def latest(self, name):
        return int((self.bucket(name) / "latest_checkpointed_iteration.txt").read_text())

    def verify(self, name):
        done = self.cluster.mobula("checkpoint", "verify", f"{BUCKET}/{name}")
        self.assertEqual(done.returncode, 0, done.stdout)

    def sent_bytes(self):
        return sum(float(re.search(r"^mobula_upload_bytes_total (\S+)$", metrics(node), re.M)[1])
                   for node in self.cluster.nodes())

    def stored(self, name):
        """Files of all iterations, and their bytes, by the manifests."""
        files = [f for path in self.bucket(name).glob("iter_*/.mobula/manifest.json")
                 for f in json.loads(path.read_text())["files"]]
        return len(files), sum(f["size"] for f in files)

    def assert_what_was_counted(self, name, sent_bytes, samples):
        """Of the transfers, by both nodes, against what is in the bucket and what went over the wire."""
        n_files, stored_bytes = self.stored(name)
        self.assertEqual(self.sent_bytes() - sent_bytes, stored_bytes)
        parts = samples["mobula_upload_parts_total"]
        self.assertEqual(parts, sorted(parts))
        self.assertGreaterEqual(parts[-1], 1)  # this node's, of the first save at least
        self.assertLessEqual(parts[-1], n_files)
        rates = [rate for rate in samples["mobula_upload_rate_bytes_per_second"] if rate > 0]
        self.assertTrue(rates)
        self.assertLessEqual(max(rates), self.proxy.rate * 1.1)
        stalls = samples["mobula_save_stall_seconds_total"]
        self.assertEqual(stalls, sorted(stalls))
        self.assertTrue(0 < stalls[-1] < 30, stalls)

    def test_a_job_is_durable_before_its_deadline(self):
        """Nothing was ever measured; the link takes seconds for a checkpoint."""
        self.proxy.rate = 150_000
        # A refusal ends the transfer of a file, which is begun again; faults are repeated inside of it.
        refused = self.proxy.rule("PUT", r"clock/iter_.*/model_", error(400, "MadeUp"), times=1)
        failed = self.proxy.rule("PUT", r"clock/iter_.*/model_", error(500, "InternalError"), times=2)
        self.addCleanup(self.proxy.clear)
        sent_bytes = self.sent_bytes()
        seconds = 40
        deadline = time.time() + seconds
        command = train_command(f"{BUCKET}/clock", ENDLESS, "--save-interval", str(ENDLESS),
                                "--log-interval", "50", "--eval-interval", str(ENDLESS), "--deadline", f"@{deadline:.3f}")
        self.cluster.submit(command, submission_id="clock")
        said, shown, samples, retries = set(), set(), {}, {}
        node = self.cluster.node("node-0")

        def look():
            job = self.cluster.job("clock")
            said.add(job["message"])
            shown.update(self.cluster.mobula("status", "--address", self.cluster.address).stdout.splitlines())
            for name, value in re.findall(r'^(mobula_[a-z_]+)\{job_id="clock".*\} (\S+)$', metrics(node), re.M):
                samples.setdefault(name, []).append(float(value))
            for one in self.cluster.nodes():
                for value in re.findall(r'^mobula_upload_retries_total\{job_id="clock".*\} (\S+)$', metrics(one), re.M):
                    retries[one["http_port"]] = float(value)
            return job if job["status"] in ("SUCCEEDED", "FAILED", "STOPPED") else None

        job = wait_until(look, "the job ends", seconds + 60)
        log = self.cluster.logs("clock")
        self.assertEqual(job["status"], "SUCCEEDED", log[-3000:])
        self.assertLess(job["end_time"] / 1000, deadline, log[-3000:])
        self.assertIn("deadline (--deadline)", log)
        self.assertIn("ended for its deadline (--deadline): all that was saved is durable", log)
        last = int(re.findall(r"successfully saved checkpoint from iteration +(\d+)", log)[-1])
        self.assertEqual(self.latest("clock"), last)
        self.assertGreaterEqual(last, iterations_of(log)[-1][0])
        self.assertEqual(len(re.findall("successfully saved", log)), 2, "one to measure, the last one")
        self.verify("clock")
        progress = [m for m in said if "uploading iteration" in m]
        self.assertTrue(progress, said)
        whole = r"uploading iteration \d+: \d+ of \d+ parts, done in \d+ s, deadline in \d+ s"
        self.assertTrue(any(re.search(whole, m) for m in progress), progress)
        self.assertTrue(any(re.match(r" +deadline \(--deadline\) in \d+ s", line) for line in shown), shown)
        self.assertTrue(all(0 < left < seconds for left in samples["mobula_deadline_seconds"]), samples)
        self.assertGreater(max(samples["mobula_upload_lag_bytes"]), 0)
        self.assertEqual(max(samples["mobula_saves_total"]), 2)
        self.assertGreater(max(samples["mobula_durable_iteration"]), 0)
        self.assert_what_was_counted("clock", sent_bytes, samples)
        self.assertEqual((refused["used"], failed["used"]), (1, 2))
        self.assertEqual((len(retries), sum(retries.values())), (2, 3), retries)

    def test_a_program_that_saves_on_sigterm(self):
        self.proxy.rate = 400_000
        save = pathlib.Path(self.cluster.dir, "foreign-%n")
        deadline = time.time() + 35
        done = self.cluster.mobula(
            "run", "--num-nodes", "2", "--no-tag", "--save", save, "--checkpoint-url",
            f"{BUCKET}/foreign", "--stop-grace", "15s", "--deadline", f"@{deadline:.3f}", "--",
            "sh", "-c", SAVES_ON_SIGTERM)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertLess(time.time(), deadline, done.stdout)
        self.assertTrue((self.bucket("foreign") / "latest_checkpointed_iteration.txt").exists(), done.stdout)
        self.assertEqual(self.latest("foreign"), 7)
        self.verify("foreign")

    def test_logs_give_way_to_the_last_checkpoint(self):
        """What was printed takes the link longer than the run lasts; the job is over in time, and says what its log lacks."""
        self.proxy.rate = 150_000
        save = pathlib.Path(self.cluster.dir, "talks-%n")
        deadline = time.time() + 26
        talks = "yes 'what nobody waits for' | head -c 9000000\n" + SAVES_ON_SIGTERM
        self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--no-tag", "--save", save, "--checkpoint-url", f"{BUCKET}/talks",
                             "--stop-grace", "4s", "--deadline", f"@{deadline:.3f}", "--", "sh", "-c", talks], submission_id="talks")
        wait_until(lambda: [r for r in self.proxy.seen("PUT", "/talks/logs/") if r.done is None], "a log is sent", 20)
        job = self.cluster.wait_job("talks", timeout_s=200)
        log = self.cluster.logs("talks")[-3000:]
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertLess(job["end_time"] / 1000, deadline, log)
        self.assertEqual(self.latest("talks"), 7)
        self.assertIn("did not reach s3://", job["message"])
        self.proxy.rate = None
        self.proxy.cut()  # what it still passes on
        self.verify("talks")

    def test_what_was_saved_before_a_failure(self):
        """A rank dies while its node still sends: the job fails, after that checkpoint is durable."""
        self.proxy.rate = 100_000
        self.cluster.submit(train_command(f"{BUCKET}/failure", ENDLESS, "--save-interval", "300", "--log-interval",
                                          "50", "--eval-interval", str(ENDLESS)), submission_id="failure")
        wait_until(lambda: "uploading iteration 300" in self.cluster.job("failure")["message"], "it is sent", 60)
        os.kill(self.cluster.rank_pids("mobula-worker")[1], signal.SIGKILL)
        job = self.cluster.wait_job("failure")
        self.assertEqual(job["status"], "FAILED")
        self.assertIn("rank 1 was killed by signal 9", job["message"])
        self.assertNotIn("not durable", job["message"])
        saved = re.findall(r"successfully saved checkpoint from iteration +(\d+)", self.cluster.logs("failure"))
        self.assertEqual(self.latest("failure"), int(saved[-1]))
        self.verify("failure")

    def test_a_store_that_stays_away(self):
        """With --drain-timeout a job does not wait for it for ever; what is lost is named, and nothing is half visible."""
        self.proxy.refuse = True
        self.addCleanup(setattr, self.proxy, "refuse", False)
        save = f"{self.cluster.dir}/away"
        self.cluster.submit(train_command(f"{BUCKET}/away", 4, "--save-interval", "4", "--save", save,
                                          "--drain-timeout", "3s"), submission_id="away")
        job = self.cluster.wait_job("away", timeout_s=60)
        log = self.cluster.logs("away")
        self.assertEqual(job["status"], "FAILED", log)
        self.assertIn("uploads did not end within --drain-timeout (3 s)", log)
        self.assertIn("iteration 4 is not durable: its upload was abandoned", job["message"])
        self.assertFalse((self.bucket("away") / "latest_checkpointed_iteration.txt").exists())
        self.assertEqual(pathlib.Path(save, "latest_checkpointed_iteration.txt").read_text().strip(), "4")

    def test_a_deadline_of_a_submission(self):
        """It reaches the gang as a point in time, and a program that keeps nothing is just ended."""
        before = time.time()
        done = self.cluster.mobula("job", "submit", "--address", self.cluster.address, "--deadline", "12s",
                                   "--submission-id", "until", "--",
                                   "mobula", "run", "--stop-grace", "2s", "--", "sh", "-c",
                                   "echo until $MOBULA_DEADLINE; exec sleep 1000")
        self.assertEqual(done.returncode, 0, done.stdout)
        # It counts from a moment between the command's begin and the head's knowing of the job.
        deadline, job = float(re.search(r"until @(\d+\.\d+)", done.stdout)[1]), self.cluster.job("until")
        self.assertGreaterEqual(deadline, before + 12 - 0.01)
        self.assertLessEqual(deadline, job["start_time"] / 1000 + 12 + 0.01)
        self.assertLess(job["end_time"] / 1000, deadline)
        self.assertIn("ended for its deadline (--deadline)", done.stdout)

    def test_a_deadline_before_the_ranks_train(self):
        """What the gang loads does not come, so no agent has anything to save: the driver ends it."""
        self.addCleanup(self.proxy.clear)
        for method in ("GET", "HEAD"):
            self.proxy.rule(method, "never", stall())
        done = self.cluster.mobula(*train_command(f"{BUCKET}/before", ENDLESS, "--save-interval", "100", "--load",
                                                  f"{BUCKET}/never", "--deadline", "8s")[1:])
        self.assertEqual(done.returncode, 75, done.stdout)
        self.assertIn("the deadline is over before the gang had begun its work", done.stdout)

    def test_a_deadline_that_is_over(self):
        for words, status, text in ((["--deadline", "@1000000000"], 75, "is over already"),
                                    (["--deadline", "tomorrow"], 64, "--deadline: expected"),
                                    (["--deadline", "2026-11-22T10:00:00"], 64, "expected")):
            done = self.cluster.mobula("run", *words, "--", "true")
            self.assertEqual(done.returncode, status, done.stdout)
            self.assertIn(text, done.stdout)


class SpotServer:
    """Amazon's metadata service as far as a notice goes: a token first; 404 until there is a notice."""

    def __init__(self):
        outer = self
        self.notice = None
        self.asked = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_PUT(self):
                ok = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.answer(200 if ok else 400, "a-token" if ok else "")

            def do_GET(self):
                if self.headers["X-aws-ec2-metadata-token"] != "a-token":
                    self.answer(401, "")
                elif outer.notice is None or self.path != "/latest/meta-data/spot/instance-action":
                    outer.asked += 1
                    self.answer(404, "not found")
                else:
                    self.answer(200, outer.notice)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/latest/meta-data/spot/instance-action"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class NodeGoesTest(unittest.TestCase):
    """The second node of a gang goes; the first, the head, stays."""

    @classmethod
    def setUpClass(cls):
        cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-deadline-"))
        port = cls.enterClassContext(s3.server(cls.directory))
        cls.proxy = cls.enterClassContext(FaultProxy(port))
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, env=s3.environment(cls.proxy.port)))

    def setUp(self):
        self.proxy.rate = None

    def tearDown(self):
        self.proxy.rate = None
        wait_until(lambda: not self.cluster.rank_pids(), "no rank is left", 60)

    latest, bucket, verify = DeadlineTest.latest, DeadlineTest.bucket, DeadlineTest.verify

    def start_second(self, *words, **env):
        done = self.cluster.mobula(
            "start", "--address", self.cluster.gcs, "--temp-dir", self.cluster.temp, "--node-name", "second",
            "--dashboard-agent-listen-port", "0", *words, env=env)
        self.assertEqual(done.returncode, 0, done.stdout)
        return self.cluster.node("second")

    def gone(self, node):
        """The node's processes have ended; its agent's log."""
        wait_until(lambda: not is_alive(node["pid_init"]), "the node has ended", 60)
        log = (node["dir"] / "agent.log").read_text()
        self.cluster.forget_node(node)
        return log

    def train(self, name, *more):
        self.cluster.submit(train_command(f"{BUCKET}/{name}", ENDLESS, "--save-interval", str(ENDLESS),
                                          "--log-interval", "50", "--eval-interval", str(ENDLESS),
                                          "--stop-grace", GRACE, *more), submission_id=name)
        wait_until(lambda: iterations_of(self.cluster.logs(name)), "ranks train", 60)

    def gang(self, name):
        shown = json.loads(self.cluster.mobula("status", "--address", self.cluster.address, "--json").stdout)
        return next(j for j in shown["jobs"] if j["submission_id"] == name)["gang"]

    def saved(self, name):
        return [int(i) for i in re.findall(r"successfully saved checkpoint from iteration +(\d+)",
                                           self.cluster.logs(name))]

    def notice_by(self, name, give, *words):
        """The gang saves, what it saved is durable, and it goes on from there on the node that stays."""
        node = self.start_second(*words)
        self.train(name, "--max-restarts", "1", "--min-nodes", "1", "--elastic-wait", "1s")
        deadline = time.time() + 20
        give(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(deadline)))
        log = self.gone(node)
        self.assertLess(time.time(), deadline)
        self.assertIn("node will be taken away", log)
        wait_until(lambda: "attempt 2 goes on from iteration" in self.cluster.logs(name), "it goes on", 60)
        last = self.saved(name)[0]
        self.assertIn(f"attempt 2 goes on from iteration {last}", self.cluster.logs(name))
        self.assertEqual(self.latest(name), last)
        wait_until(lambda: not self.gang(name).get("deadline"), "the deadline went with its node", 60)
        self.cluster.call("POST", f"/api/jobs/{name}/stop")
        self.cluster.wait_job(name)

    def test_notice_in_a_file(self):
        path = pathlib.Path(self.cluster.dir, "notice")
        self.notice_by("file", lambda when: path.write_text(when), "--notice-file", path)

    def test_notice_to_an_agent_that_is_restarted(self):
        """It hears of the notice before it is ALIVE; the ranks it adopted save and upload all the same."""
        path = pathlib.Path(self.cluster.dir, "notice-of-the-next")

        def give(when):
            pid = self.cluster.node("second")["pid_agent"]
            os.kill(pid, signal.SIGSTOP)
            path.write_text(when)
            os.kill(pid, signal.SIGKILL)

        self.notice_by("next", give, "--notice-file", path)

    def test_notice_at_a_url(self):
        with SpotServer() as spot:
            def give(when):
                wait_until(lambda: spot.asked > 0, "it is asked before")
                spot.notice = json.dumps({"action": "terminate", "time": when})

            self.notice_by("url", give, "--notice-url", spot.url)

    def test_sigterm_with_the_grace_of_a_pod(self):
        node = self.start_second(MOBULA_GRACE_SECONDS="20")
        self.train("grace")
        os.kill(node["pid_init"], signal.SIGTERM)
        log = self.gone(node)
        job = self.cluster.wait_job("grace")
        self.assertEqual(job["status"], "FAILED")
        self.assertIn("the node is stopping", job["message"])
        self.assertRegex(log, r'deadline source="SIGTERM" in_ms=1[0-9]{4}, the node goes')
        self.assertEqual(self.latest("grace"), self.saved("grace")[-1])
        self.verify("grace")

    def test_an_upload_that_does_not_fit_the_grace(self):
        """What ranks have is saved all the same; what is missing is named; nothing is half visible."""
        node = self.start_second(MOBULA_GRACE_SECONDS="10")
        self.train("short", "--save", f"{self.cluster.dir}/short")
        self.proxy.rate = 10_000
        begun = time.monotonic()
        os.kill(node["pid_init"], signal.SIGTERM)
        log = self.gone(node)
        self.assertLess(time.monotonic() - begun, 10, "before it would be killed")
        self.proxy.rate = None
        job = self.cluster.wait_job("short", timeout_s=120)
        self.assertEqual(job["status"], "FAILED")
        last = self.saved("short")[-1]  # what a rank has said is in the job's log when that is whole
        self.assertIn(f"iteration {last} is not durable at the deadline (SIGTERM)", log)
        self.assertRegex(self.cluster.logs("short"), rf"iteration {last} .*not durable")
        self.assertFalse((self.bucket("short") / "latest_checkpointed_iteration.txt").exists())
        self.assertEqual(pathlib.Path(self.cluster.dir, "short/latest_checkpointed_iteration.txt").read_text().strip(),
                         str(last))

    def test_drain(self):
        """The node gives no more, what it had is durable, and it stays so when its agent is restarted."""
        node = self.start_second()
        self.train("drain")
        done = self.cluster.mobula("drain", "second", "--wait", "--reason", "a test")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"node [0-9a-f]{12} second \(.*\): drained")
        job = self.cluster.wait_job("drain")
        self.assertEqual(job["status"], "FAILED")
        self.assertIn("the node is drained", job["message"])
        self.assertEqual(self.latest("drain"), self.saved("drain")[-1])
        self.verify("drain")
        os.kill(node["pid_agent"], signal.SIGKILL)

        def restarted():
            now = self.cluster.node("second")
            return now if now["pid_agent"] != node["pid_agent"] and now["state"] == "ALIVE" else None

        node = wait_until(restarted, "its agent is back", 60)
        self.assertIn("this node was drained before", (node["dir"] / "agent.log").read_text())
        done = self.cluster.mobula("run", "--num-nodes", "2", "--wait-timeout", "2s", "--", "true")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        os.kill(node["pid_init"], signal.SIGTERM)
        self.gone(node)

    def test_drain_that_cannot_be_done_in_time(self):
        node = self.start_second()
        self.train("late")
        self.proxy.rate = 10_000
        done = self.cluster.mobula("drain", node["node_id"][:12], "--wait", "--json", "--deadline", "6s")
        self.proxy.rate = None
        self.assertEqual(done.returncode, 74, done.stdout)
        second, = json.loads(done.stdout)["nodes"]
        self.cluster.wait_job("late", timeout_s=120)
        last = self.saved("late")[-1]
        self.assertIn(f"iteration {last} is not durable at the deadline (drain)", " ".join(second["lost"]))
        os.kill(node["pid_init"], signal.SIGTERM)
        self.gone(node)

    def test_drain_of_what_is_not_there(self):
        for words, status, text in ((["nobody"], 66, "no live node is called nobody"),
                                    ([], 64, "which nodes?"), (["--all", "--deadline", "@7"], 75, "over already")):
            done = self.cluster.mobula("drain", "--wait", *words)
            self.assertEqual(done.returncode, status, done.stdout)
            self.assertIn(text, done.stdout)

    def test_the_active_deadline_of_a_job(self):
        """The chart says how many seconds; the node counts them from its own start."""
        node = self.start_second(MOBULA_ACTIVE_DEADLINE_SECONDS="55", MOBULA_START_ALLOWANCE_SECONDS="15")
        deadline = time.time() + 40
        self.train("active")
        job = self.cluster.wait_job("active")
        log = self.cluster.logs("active")
        self.assertEqual(job["status"], "SUCCEEDED", log[-3000:])
        self.assertLess(job["end_time"] / 1000, deadline)
        self.assertIn("deadline (estimated)", log)
        self.assertEqual(self.latest("active"), self.saved("active")[-1])
        os.kill(node["pid_init"], signal.SIGTERM)
        self.gone(node)


class EstimatedTest(unittest.TestCase):
    """The deadline of the pod's job, as the node of the driver knows it, on a node that knows of none."""

    def test_it_goes_with_the_job(self):
        with Cluster(nodes=1, env={"MOBULA_ACTIVE_DEADLINE_SECONDS": "1000", "MOBULA_START_ALLOWANCE_SECONDS": "100"}) \
                as cluster:
            expected = time.time() + 900
            cluster.submit("echo until $MOBULA_ESTIMATED_DEADLINE", submission_id="told")
            self.assertEqual(cluster.wait_job("told")["status"], "SUCCEEDED")
            until = float(re.search(r"until @(\d+\.\d+)", cluster.logs("told"))[1])
            self.assertLess(abs(until - expected), 20)
            self.assertLess(until, expected, "counted from the node's start")

    def test_a_node_that_knows_of_none(self):
        with Cluster(nodes=1) as cluster:
            deadline = time.time() + 12
            done = cluster.mobula("run", "--stop-grace", "2s", "--", "sh", "-c", "exec sleep 1000",
                                  env={"MOBULA_ESTIMATED_DEADLINE": f"@{deadline:.3f}"})
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertLess(time.time(), deadline)
            self.assertIn("ended for its deadline (estimated)", done.stdout)
            done = cluster.mobula("run", "--", "true", env={"MOBULA_ESTIMATED_DEADLINE": "soon"})
            self.assertEqual(done.returncode, 64, done.stdout)


class DrainAllTest(unittest.TestCase):
    def test_the_others_are_waited_for(self):
        """One node answers nobody: the exit status says so, after the other is drained."""
        with tempfile.TemporaryDirectory(prefix="mb-deadline-") as directory, s3.server(directory) as port, \
                Cluster(nodes=1, env=s3.environment(port)) as cluster:
            cluster.submit(["mobula", "train", "--num-nodes", "1", "--gpus-per-node", "1", "--checkpoint-url",
                            f"{BUCKET}/all", *mini_model(ENDLESS, "--save-interval", str(ENDLESS), "--log-interval",
                                                         "50", "--eval-interval", str(ENDLESS))],
                           submission_id="all")
            wait_until(lambda: iterations_of(cluster.logs("all")), "ranks train", 60)
            cluster.start_node(1)
            mute = cluster.node("node-1")
            os.kill(mute["pid_agent"], signal.SIGSTOP)
            try:
                done = cluster.mobula("drain", "--all", "--wait", "--json", timeout=240)
            finally:
                os.kill(mute["pid_agent"], signal.SIGCONT)
            self.assertNotEqual(done.returncode, 0, done.stdout)
            states = {n["node_name"]: n["state"] for n in json.loads(done.stdout)["nodes"]}
            self.assertEqual(states, {"node-0": "drained", "node-1": "failed"})
            self.assertIn("durable", cluster.logs("all"))


class DrainWithoutAHeadTest(unittest.TestCase):
    def test_what_ranks_had_saved_is_sent(self):
        """A pod's preStop hook, when the head's node is lost, and with it the job's driver and half of the ranks: it needs neither."""
        with tempfile.TemporaryDirectory(prefix="mb-deadline-") as directory, s3.server(directory) as port, \
                FaultProxy(port) as proxy, Cluster(nodes=2, env=s3.environment(proxy.port)) as cluster:
            here, bucket = pathlib.Path(cluster.dir), pathlib.Path(directory, "s3", s3.BUCKET, "alone")
            script = f"""
                echo rank $RANK runs; until test -e {here}/go; do sleep 0.05; done
                D={here}/save-$RANK; mkdir -p $D/iter_0000007; head -c 300000 /dev/zero >$D/iter_0000007/rank$RANK.bin; : >$D/saved
                until test -e {here}/save-0/saved && test -e {here}/save-1/saved; do sleep 0.05; done
                if [ $RANK = 0 ]; then printf 7 >$D/latest_checkpointed_iteration.txt; fi
                exec sleep 1000"""
            cluster.submit(["mobula", "run", "--num-nodes", "2", "--save", f"{here}/save-%n", "--checkpoint-url", f"{BUCKET}/alone",
                            "--stop-grace", "1s", "--", "sh", "-c", script], submission_id="alone")
            head, worker = cluster.node("node-0"), cluster.node("node-1")
            log = wait_until(lambda: next(worker["dir"].glob("gangs/*/rank-*.log"), None), "a rank on the worker", 60)
            far = int(log.stem.split("-")[1])
            proxy.rule("PUT", rf"alone/iter_0000007/rank{far}\.bin", hold())
            (here / "go").touch()
            # All of the head's node is in the store, and nothing of the worker's.
            wait_until(lambda: list(bucket.glob(f"iter_0000007/.mobula/part-{1 - far}-of-2.json")), "the head's part", 60)
            self.assertFalse((bucket / "latest_checkpointed_iteration.txt").exists())
            lost = tree(head["pid_init"])
            self.assertIn(head["pid_agent"], lost)
            kill_all(lost)
            wait_until(lambda: not any(map(is_alive, lost)), "the head's machine is gone", 60)
            proxy.clear()
            done = cluster.mobula("drain", "--local", "--wait", "--temp-dir", cluster.temp, timeout=120)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertRegex(done.stdout, r"node [0-9a-f]{12} node-1 \(.*\): drained")
            self.assertEqual((bucket / "latest_checkpointed_iteration.txt").read_text(), "7")
            began = time.monotonic()
            done = cluster.mobula("drain", "--local", "--wait", "--temp-dir", cluster.temp)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertLess(time.monotonic() - began, 5, "nothing was left to wait for, and nobody to ask")
            cluster.forget_node(head)


if __name__ == "__main__":
    unittest.main()
