"""Logs of real clusters: size, speed of the end, any bytes, ranks, restarts of the head, stores."""

import asyncio
import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
import unittest
import urllib.request

import follow_restarts
import stored_logs
from cluster import Cluster, train_command, wait_until
from test_elastic import lose_a_node
from ray.job_submission import JobStatus, JobSubmissionClient
from tail import BINARY, PING, TEXT, Tail

CAP_BYTES = 1 << 20
FRAME_BYTES = 16 << 10
BIG_LOG = "seq -f '%099.0f' 1 1000000"  # 100 MB


def rss_bytes(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


class LogsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2))
        cls.client = JobSubmissionClient(cls.cluster.address)
        cls.address = ("--address", cls.cluster.address)
        cls.quiet = Tail(cls.cluster.address, cls.cluster.submit("sleep 1000"))
        cls.quiet.socket.settimeout(30)

    def show(self, *args, status=0):
        done = self.cluster.mobula("job", "logs", *self.address, *args)
        self.assertEqual(done.returncode, status, done.stdout)
        return done.stdout

    def tail_with_ray(self, job_id):
        async def tail():
            return "".join([part async for part in self.client.tail_job_logs(job_id)])

        return asyncio.run(asyncio.wait_for(tail(), 60))

    def ended(self, entrypoint, **fields):
        job_id = self.cluster.submit(entrypoint, **fields)
        self.cluster.wait_job(job_id)
        return job_id

    # ---- the end of a stream ----

    def test_close_means_a_readable_terminal_state(self):
        """kuberay#4921, ray#57002, kuberay#3257: the end of the stream is taken for the job's."""
        for entrypoint, state, status in (("sleep 0.3; echo out", "SUCCEEDED", 0),
                                          ("sleep 0.3; exit 3", "FAILED", 1)):
            job_id = self.cluster.submit(entrypoint)
            tail = Tail(self.cluster.address, job_id)
            tail.read()
            self.assertEqual(self.cluster.job(job_id)["status"], state)
            self.assertEqual(tail.closed, (1000, state))
            self.assertIn(f"Job '{job_id}'", self.show("-f", job_id, status=status))
            self.tail_with_ray(job_id)
        job_id = self.cluster.submit("sleep 1000")
        with self.cluster.running("job", "logs", "-f", *self.address, job_id) as follower:
            self.cluster.wait_job(job_id, ("RUNNING",))
            self.cluster.call("POST", f"/api/jobs/{job_id}/stop")
            self.assertEqual(follower.wait(60), 130, follower.output())

    def test_many_followers_all_get_everything(self):
        job_id = self.cluster.submit("sleep 1; seq 1 20000")
        tails = [Tail(self.cluster.address, job_id) for _ in range(200)]
        texts = {tail.read() for tail in tails}
        self.assertEqual(len(texts), 1)
        self.assertEqual(texts.pop().split()[-20000:], [b"%d" % i for i in range(1, 20001)])

    # ---- any bytes ----

    def test_one_line_of_five_megabytes(self):
        """On Ray the tail closes with code 1000 while the job runs, 278 bytes delivered."""
        job_id = self.ended("head -c 5000000 /dev/zero | tr '\\0' @")
        tail = Tail(self.cluster.address, job_id)
        frames = list(tail.frames())
        self.assertLessEqual(max(len(p) for _, p in frames), FRAME_BYTES)
        self.assertEqual(b"".join(p for _, p in frames).count(b"@"), 5000001)  # one in the first line
        self.assertEqual(self.tail_with_ray(job_id).count("@"), 5000001)
        self.assertEqual(self.client.get_job_logs(job_id).count("@"), 5000001)
        self.assertEqual(self.show(job_id).count("@"), 5000001)

    def test_bytes_that_are_no_text(self):
        """Text frames must be UTF-8; a client that asks for bytes gets what was written."""
        head, junk = "Running entrypoint", bytes(range(256)) * 4096
        euro = "€".encode() * 7000  # cut by frames of 16 KiB
        source = pathlib.Path(self.cluster.dir, "junk")
        source.write_bytes(junk + euro)
        job_id = self.ended(f"cat {source}")
        texts = [p for o, p in Tail(self.cluster.address, job_id).frames() if o == TEXT]
        whole = b"".join(texts).decode()
        for text in texts:
            self.assertLessEqual(len(text), FRAME_BYTES)
            text.decode()
        self.assertTrue(whole.startswith(head))
        self.assertTrue(whole.endswith("€" * 7000))
        self.assertEqual(self.tail_with_ray(job_id), whole)
        frames = list(Tail(self.cluster.address, job_id, "?format=bytes").frames())
        self.assertEqual(json.loads(frames[0][1]), {"offset": 0, "lost": 0})
        raw = b"".join(p for o, p in frames if o == BINARY)
        self.assertTrue(raw.endswith(junk + euro))
        self.assertLessEqual(max(len(p) for _, p in frames), FRAME_BYTES)
        self.assertIn("€" * 7000, self.client.get_job_logs(job_id))

    def test_a_name_that_leads_elsewhere(self):
        """A job may put a pipe or a link where its log was: the head does not wait, nor show what is not the log."""
        secret = pathlib.Path(self.cluster.dir, "not-a-log")
        secret.write_text("nobody's business\n")
        for what in ("mkfifo $log", f"ln -s {secret} $log"):
            job_id = self.ended(f"log=$(readlink /proc/$$/fd/1); rm $log; {what}; exit 3")
            job = self.cluster.job(job_id)
            self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 3))
            self.assertNotIn("nobody's", job["message"])
            status, text = self.cluster.call("GET", f"/api/jobs/{job_id}/logs")
            self.assertEqual(status, 500, text)
            self.assertIn("it is no regular file any more", text)
            self.assertEqual(self.cluster.call("DELETE", f"/api/jobs/{job_id}")[0], 200)
            self.assertEqual(self.cluster.wait_job(self.cluster.submit("true"))["status"], "SUCCEEDED")
        self.assertEqual(secret.read_text(), "nobody's business\n")

    # ---- any place ----

    def test_quiet_tails_are_kept_awake(self):
        """What stands between cuts connections on which nothing comes for a minute: a ping each 20 s."""
        opcode, payload = self.quiet.frame()  # it was opened before the first test
        while opcode != PING:
            self.assertEqual(opcode, TEXT, payload)
            opcode, payload = self.quiet.frame()

    def test_offset_tail_and_limit(self):
        job_id = self.ended("printf 'one\\ntwo\\nthree\\n'")
        path = f"/api/jobs/{job_id}/logs"
        whole = self.cluster.logs(job_id)
        size, begin = len(whole), whole.index("\none") + 1
        piece = self.cluster.get(f"{path}?offset={begin}&limit=5")
        self.assertEqual(piece, {"offset": begin, "logs": "one\nt", "next_offset": begin + 5,
                                 "first_offset": 0, "size": size})
        self.assertEqual(self.cluster.get(f"{path}?offset={begin + 5}")["logs"], "wo\nthree\n")
        self.assertEqual(self.cluster.get(f"{path}?tail=2")["logs"], "two\nthree\n")
        self.assertEqual(self.cluster.get(f"{path}?tail=0")["logs"], "")
        end = self.cluster.get(f"{path}?offset=999999")
        self.assertEqual((end["logs"], end["next_offset"]), ("", size))
        self.assertEqual(self.cluster.call("GET", f"{path}?offset=-1")[0], 400)
        self.assertEqual(self.cluster.call("GET", f"{path}?tail=x")[0], 400)
        self.assertEqual(Tail(self.cluster.address, job_id, "?tail=x").status, 400)
        tail = Tail(self.cluster.address, job_id, f"?offset={begin + 4}")
        self.assertEqual(tail.read(), b"two\nthree\n")
        self.assertEqual(self.show("--tail", "1", job_id), "three\n")

    # ---- constant memory ----

    def test_memory_does_not_depend_on_the_log(self):
        """ray#28336, ray#29199: GET logs holds the file three times, and memory does not come back."""
        job_id = self.ended(BIG_LOG)
        pid = self.cluster.node("node-0")["pid_agent"]
        before = rss_bytes(pid)
        most = 0
        tail = Tail(self.cluster.address, job_id)
        n = 0
        for _, payload in tail.frames():
            n += len(payload)
            most = max(most, rss_bytes(pid) if n % (1 << 24) < FRAME_BYTES else 0)
        self.assertGreater(n, 100_000_000)
        got = 0
        with urllib.request.urlopen(f"{self.cluster.address}/api/jobs/{job_id}/logs") as reply:
            while piece := reply.read(1 << 20):
                got += len(piece)
                most = max(most, rss_bytes(pid))
        self.assertGreater(got, 101_000_000)
        self.assertLess(most - before, 4 << 20)

    def test_ids_of_any_text(self):
        """What the API takes as an id is a job that runs, and whose log is read, as any other."""
        for job_id in ("ä ö?&#%41 'x' \"y\" $(z);", "long" * 50):
            done = self.cluster.mobula("job", "submit", *self.address, "--submission-id", job_id,
                                       "--", "echo", "it", "runs")
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn("\nit runs\n", done.stdout)
            self.assertEqual(self.show("--tail", "1", job_id), "it runs\n")

    # ---- ranks ----

    def gang(self, command, *more):
        return self.cluster.submit(["mobula", "run", "--num-nodes", "2", *more, "--", "sh", "-c",
                                    command])

    def noted(self, job_id, rank):
        """So many bytes of its log have a time."""
        times = self.cluster.get(f"/api/jobs/{job_id}/logs?rank={rank}&times=1")["times"]
        return times[-1][0] if times else 0

    def test_ranks_on_any_node(self):
        gate = pathlib.Path(self.cluster.dir, "second-lines")
        job_id = self.gang(f"echo line 1 of $RANK; until [ -e {gate} ]; do sleep 0.05; done; echo line 2 of $RANK")
        with self.cluster.running("job", "logs", "-f", "--rank", "1", *self.address, job_id) as one:
            with self.cluster.running("job", "logs", "-f", "--merge", *self.address, job_id) as all_:
                wait_until(lambda: "line 1 of 1" in one.output(), "the first line")
                self.show("--rank", "2", job_id, status=66)
                self.show("-f", "--rank", "2", job_id, status=66)
                # The order of all ranks' lines is that of the times at which their nodes noted them.
                wait_until(lambda: all(self.noted(job_id, r) >= len("line 1 of 0\n") for r in "01"), "the first lines are noted")
                gate.touch()
                self.cluster.wait_job(job_id)
                self.assertEqual((one.wait(120), all_.wait(120)), (0, 0), all_.output())
                self.assertTrue(one.output().startswith("line 1 of 1\nline 2 of 1\n"), one.output())
                self.assertEqual(len(re.findall(r"^\[rank \d\] line", all_.output(), re.M)), 4)
        for rank in "01":
            self.assertEqual(self.show("--rank", rank, job_id),
                             f"line 1 of {rank}\nline 2 of {rank}\n")
        merged = self.show("--merge", job_id).splitlines()
        self.assertEqual(sorted(merged[:2]), ["[rank 0] line 1 of 0", "[rank 1] line 1 of 1"])
        self.assertEqual(sorted(merged[2:]), ["[rank 0] line 2 of 0", "[rank 1] line 2 of 1"])
        found = self.show("--merge", "--grep", "2 of [0]", job_id)
        self.assertEqual(found, "[rank 0] line 2 of 0\n")
        self.assertEqual(json.loads(self.show("--rank", "1", "--json", "--tail", "1", job_id)),
                         {"rank": 1, "line": "line 2 of 1"})
        self.assertEqual(self.show("--rank", "1", "--since", "0s", job_id), "")
        self.assertEqual(self.show("--rank", "1", "--since", "1h", job_id).count("line"), 2)
        self.show("--rank", "2", job_id, status=66)
        alone = self.ended("true")
        self.assertIn("has no ranks", self.show("--rank", "0", alone, status=66))
        own = self.ended("echo one; echo two")
        for more in ((), ("-f",)):
            said = self.show("--merge", *more, own)
            self.assertIn("has no ranks", said)
            self.assertIn("\none\ntwo\n", said)
        self.assertIn("has no ranks", self.show("--merge", "--attempt", "1", own, status=66))
        self.assertEqual(self.show("--merge", "--grep", "^two", own).splitlines()[-1], "two")
        self.assertEqual(self.cluster.call("GET", f"/api/jobs/{job_id}/logs?rank=2")[0], 404)
        self.show("--grep", "[", job_id, status=64)
        self.show("--since", "yesterday", job_id, status=64)
        tail = Tail(self.cluster.address, job_id, "?rank=1&offset=12")
        self.assertEqual(tail.read(), b"line 2 of 1\n")

    def test_merge_shows_the_bytes_that_ranks_wrote(self):
        """One rank's NUL ended the view of all; a character that came in two writes became two."""
        junk = bytes(b for b in range(256) if b != 10) * 3
        source = pathlib.Path(self.cluster.dir, "rank-junk")
        source.write_bytes(junk)
        # A log is noted once a second, so that the two parts of the character are two pieces.
        job_id = self.gang(f"cat {source}; echo; printf '\\303'; sleep 2.5; printf '\\251\\n'")
        self.assertEqual(self.cluster.wait_job(job_id)["status"], "SUCCEEDED")
        want = [b"[rank %d] " % rank + line for rank in (0, 1) for line in (junk, "é".encode())]
        for more in ((), ("-f",), ("--since", "1h")):
            with self.cluster.running("job", "logs", "--merge", *more, *self.address, job_id) as all_:
                self.assertEqual(all_.wait(60), 0, all_.output())
                lines = [x for x in all_.raw().split(b"\n") if x.startswith(b"[rank ")]
                self.assertEqual(sorted(lines), sorted(want), more)
        text = self.show("--merge", "--json", job_id)
        self.assertEqual(sorted((o["rank"], o["line"]) for o in map(json.loads, text.splitlines())),
                         sorted((rank, line.decode(errors="replace")) for rank in (0, 1)
                                for line in (junk, "é".encode())))
        self.assertEqual(sorted(self.show("--merge", "--grep", "^é$", job_id).splitlines()),
                         ["[rank 0] é", "[rank 1] é"])

    def test_since_leaves_out_what_is_older(self):
        gate = pathlib.Path(self.cluster.dir, "since-gate")
        job_id = self.gang(f"echo older of $RANK; until [ -e {gate} ]; do sleep 0.1; done; "
                           "echo newer of $RANK; sleep 1000")
        wait_until(lambda: self.show("--merge", job_id).count("older") == 2, "the older lines")
        older = time.time()
        # The border is a time 3 s before the newer lines and 3 s after the older ones, however long
        # it takes to ask; what is asked for is a time, or so many seconds before now.
        wait_until(lambda: time.time() - older > 6, "the lines are 6 s old")
        gate.touch()
        border = older + 3
        wait_until(lambda: self.show("--merge", job_id).count("newer") == 2, "the newer lines")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(border))
        for since in (stamp, lambda: f"{time.time() - border:.0f}s"):
            with self.subTest(since=since):
                text = since if isinstance(since, str) else since()
                self.assertEqual(self.show("--rank", "1", "--since", text, job_id), "newer of 1\n")
                self.assertEqual(sorted(self.show("--merge", "--since", text, job_id).splitlines()),
                                 ["[rank 0] newer of 0", "[rank 1] newer of 1"])
        self.cluster.call("POST", f"/api/jobs/{job_id}/stop")
        self.cluster.wait_job(job_id)

    def test_big_rank_log_from_the_other_node(self):
        job_id = self.gang("[ $RANK = 0 ] || seq -f '%099.0f' 1 200000")
        self.cluster.wait_job(job_id)
        lines = self.show("--rank", "1", job_id).split()
        self.assertEqual([int(line) for line in lines], list(range(1, 200001)))

    # ---- stores ----

    def test_logs_are_in_the_store_when_the_job_is_over(self):
        """kuberay#1047, ray#44561: driver logs are lost with the head's machine."""
        with tempfile.TemporaryDirectory() as store:
            url = f"file://{store}"
            job_id = self.ended("seq 1 2000000",
                                runtime_env={"env_vars": {"MOBULA_LOG_URL": url}})
            self.assertEqual(stored_logs.whole(pathlib.Path(store, "logs", job_id, "driver")),
                             self.cluster.logs(job_id))
            job_id = self.ended(train_command(url, 2, "--save-interval", "2"))
            self.assertEqual(stored_logs.whole(pathlib.Path(store, "logs", job_id, "driver")),
                             self.cluster.logs(job_id))
            for rank in "01":
                self.assertEqual(
                    stored_logs.whole(pathlib.Path(store, "logs", job_id, f"rank-{rank}", "1")),
                    self.show("--rank", rank, job_id))

    def test_what_a_cap_let_go_of_before_it_was_sent_is_said(self):
        with tempfile.TemporaryDirectory() as store:
            env = {"MOBULA_LOG_URL": f"file://{store}", "MOBULA_LOG_MAX_BYTES": "256KiB"}
            job_id = self.cluster.submit(BIG_LOG, runtime_env={"env_vars": env})
            job = self.cluster.wait_job(job_id)
            gaps, at = [], 0
            for begin, size in stored_logs.pieces(pathlib.Path(store, "logs", job_id, "driver")):
                if begin > at:
                    gaps.append((at, begin))
                at = begin + size
            self.assertGreaterEqual(at, 100_000_000)
            there = gaps[-1][1] - gaps[0][0] - sum(end - begin for begin, end in gaps)
            but = f", but for {there} of them," if len(gaps) > 1 else ""
            lost = f"bytes {gaps[0][0]} to {gaps[-1][1]} of its log{but} are not in file://{store}: "
            self.assertEqual(job["status"], "SUCCEEDED")
            self.assertIn(f"Job finished successfully, but {lost}they were released", job["message"])
            log = pathlib.Path(self.cluster.node("node-0")["dir"], "agent.log").read_text()
            self.assertIn(lost, log)

    def test_a_store_that_is_not_there_holds_a_job_as_long_as_it_may(self):
        with tempfile.NamedTemporaryFile() as blocked:
            env = {"MOBULA_LOG_URL": f"file://{blocked.name}/x", "MOBULA_LOG_WAIT": "6s"}
            job_id = self.cluster.submit("exit 3", runtime_env={"env_vars": env})
            message = wait_until(lambda: (j := self.cluster.job(job_id))["status"] == "RUNNING"
                                 and "on its way" in j["message"] and j["message"],
                                 lambda: self.cluster.job(job_id))
            self.assertEqual(message, "Job is currently running: its driver has ended, the rest of "
                             f"its log is on its way to {env['MOBULA_LOG_URL']}, which is waited for "
                             "while it takes something, else for 6 s.")
            job = self.cluster.wait_job(job_id, timeout_s=60)
            self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 3))
            lost = f"of its log did not reach {env['MOBULA_LOG_URL']} within "
            self.assertIn(lost, job["message"])
            env.update(MOBULA_LOG_WAIT="1h", RAY_JOB_STOP_WAIT_TIME_S="1")
            job_id = self.cluster.submit("true", runtime_env={"env_vars": env})
            wait_until(lambda: "on its way" in self.cluster.job(job_id)["message"], "the log is waited for")
            self.assertEqual(self.cluster.call("POST", f"/api/jobs/{job_id}/stop"), (200, '{"stopped": true}'))
            job = self.cluster.wait_job(job_id, timeout_s=60)
            self.assertEqual(job["status"], "STOPPED")
            self.assertIn(lost, job["message"])
            env["MOBULA_LOG_WAIT"] = "1s"
            job = self.cluster.wait_job(self.cluster.submit("true", runtime_env={"env_vars": env}))
            self.assertEqual(job["status"], "SUCCEEDED")
            self.assertRegex(job["message"], r"^Job finished successfully, but bytes 0 to \d+ " + lost)
            env["MOBULA_LOG_WAIT"] = "soon"
            job = self.cluster.wait_job(self.cluster.submit("true", runtime_env={"env_vars": env}))
            self.assertEqual(job["status"], "FAILED")
            self.assertIn("MOBULA_LOG_WAIT", job["message"])

    def test_a_store_that_cannot_be_used_is_refused(self):
        for url in ("s3://", "file://relative", "relative", "gcs://x", "http://h/x"):
            with self.subTest(url=url):
                job_id = self.cluster.submit("echo ran", runtime_env={"env_vars": {"MOBULA_LOG_URL": url}})
                job = self.cluster.wait_job(job_id)
                self.assertEqual((job["status"], job["error_type"]),
                                 ("FAILED", "JOB_ENTRYPOINT_COMMAND_START_ERROR"), job)
                self.assertIn(url, job["message"])
                self.assertNotIn("\nran\n", self.cluster.logs(job_id))


class AttemptsTest(unittest.TestCase):
    """Each attempt of a gang has logs of its own; whoever follows sees all of them, once."""

    LINES = {1: 400, 2: 3, 3: 20}  # the second one's log stays shorter than what was read of the first

    def submit(self, cluster, nodes, *more, end=2):
        lines = "; ".join(f"[ $MOBULA_ATTEMPT = {a} ] && n={n}" for a, n in self.LINES.items())
        return cluster.submit(
            ["mobula", "run", "--num-nodes", nodes, "--max-restarts", "4", "--restart-delay", "50ms",
             *more, "--", "sh", "-c",
             f"{lines}; for i in $(seq $n); do echo line $i of $RANK in $MOBULA_ATTEMPT; done; "
             f"until test -e {cluster.dir}/go-$MOBULA_ATTEMPT; do sleep 0.05; done; "
             f"[ $MOBULA_ATTEMPT -lt {end} ] || exit 0; [ $RANK = 0 ] || sleep 1000; kill -9 $$"])

    def go(self, cluster, attempt):
        open(f"{cluster.dir}/go-{attempt}", "w").close()

    def want(self, attempt, rank):
        return [f"line {i} of {rank} in {attempt}" for i in range(1, self.LINES[attempt] + 1)]

    def shown(self, follower, rank, tag):
        return [line[len(tag):] for line in follower.output().splitlines()
                if line.startswith(tag + "line") and f" of {rank} in " in line]

    def saw(self, follower, attempt, ranks):
        last = [self.want(attempt, r)[-1] for r in ranks]
        wait_until(lambda: all(line in follower.output().replace("] ", "\n").splitlines()
                               for line in last), follower.output)

    def test_merge_shows_every_line_of_every_attempt_once(self):
        with Cluster(nodes=2) as cluster:
            job_id = self.submit(cluster, 2)
            with cluster.running("job", "logs", "-f", "--merge", job_id) as all_:
                self.saw(all_, 1, (0, 1))
                self.go(cluster, 1)
                self.saw(all_, 2, (0, 1))
                self.go(cluster, 2)
                self.assertEqual(all_.wait(60), 0, all_.output())
            for rank in (0, 1):
                self.assertEqual(self.shown(all_, rank, f"[rank {rank}] "),
                                 self.want(1, rank) + self.want(2, rank))
            self.assertEqual(all_.output().count("mobula: attempt 2 begins, with 2 ranks\n"), 1)

    def test_one_rank_also_when_its_head_is_restarted(self):
        """The offset of a follower that comes back belongs to the attempt that it names."""
        with Cluster(nodes=2) as cluster:
            job_id = self.submit(cluster, 2)
            with cluster.running("job", "logs", "-f", "--rank", "1", job_id) as one:
                self.saw(one, 1, (1,))
                killed = cluster.node("node-0")["pid_agent"]
                os.kill(killed, signal.SIGKILL)
                self.go(cluster, 1)  # the follower may find the second attempt when it comes back
                self.saw(one, 2, (1,))
                self.go(cluster, 2)
                self.assertEqual(one.wait(60), 0, one.output())
            self.assertEqual(self.shown(one, 1, ""), self.want(1, 1) + self.want(2, 1))
            self.assertEqual(one.output().count("mobula: attempt 2 begins\n"), 1)

    def test_any_attempt_can_be_read(self):
        with Cluster(nodes=1) as cluster:
            job_id = self.submit(cluster, 1)
            for attempt in (1, 2):
                self.go(cluster, attempt)
            self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED", cluster.logs(job_id))
            path = f"/api/jobs/{job_id}/logs?rank=0"
            for query, attempt in (("", 2), ("&attempt=1", 1), ("&attempt=2", 2)):
                piece = cluster.get(path + query)
                self.assertEqual(piece["logs"].splitlines(), self.want(attempt, 0))
                self.assertEqual((piece["attempt"], piece["newest_attempt"], piece["world_size"]),
                                 (attempt, 2, 1))
                self.assertEqual(cluster.get(f"{path}{query}&tail=1")["logs"].splitlines(),
                                 self.want(attempt, 0)[-1:])
                shown = Tail(cluster.address, job_id, f"?rank=0&follow=0{query}").read()
                self.assertEqual(shown.decode().splitlines(), self.want(attempt, 0))
            tail = Tail(cluster.address, job_id, "?rank=0&attempt=1")
            self.assertEqual(tail.read().decode().splitlines(), self.want(1, 0) +
                             ["[mobula: attempt 2 begins]"] + self.want(2, 0))
            self.assertEqual(tail.closed, (1000, "SUCCEEDED"))
            frames = list(Tail(cluster.address, job_id, "?rank=0&attempt=1&format=bytes").frames())
            self.assertEqual([json.loads(p) for o, p in frames if o == TEXT][:2],
                             [{"offset": 0, "lost": 0, "attempt": a} for a in (1, 2)])
            times = cluster.get(f"{path}&times=1&attempt=1")["times"]
            self.assertEqual(times[-1][0], len("\n".join(self.want(1, 0))) + 1)
            for bad, status in (("&attempt=3", 404), ("&attempt=x", 400)):
                self.assertEqual(cluster.call("GET", path + bad)[0], status)
            self.assertEqual(cluster.call("GET", f"/api/jobs/{job_id}/logs?attempt=1")[0], 400)

            def show(*args, status=0):
                done = cluster.mobula("job", "logs", *args, job_id)
                self.assertEqual(done.returncode, status, done.stdout)
                return done.stdout.splitlines()

            both = self.want(1, 0) + ["mobula: attempt 2 begins"] + self.want(2, 0)
            self.assertEqual(show("--rank", "0"), self.want(2, 0))
            self.assertEqual(show("--rank", "0", "--attempt", "1"), self.want(1, 0))
            self.assertEqual(sorted(show("--rank", "0", "--attempt", "1", "-f")[:len(both)]),
                             sorted(both))
            self.assertEqual(show("--merge"), [f"[rank 0] {x}" for x in self.want(2, 0)])
            self.assertEqual(show("--merge", "--attempt", "1"),
                             [f"[rank 0] {x}" for x in self.want(1, 0)])
            self.assertIn("no logs of attempt 9",
                          show("--rank", "0", "--attempt", "9", status=66)[-1])
            self.assertIn("--attempt goes with", show("--attempt", "1", status=64)[-1])

    def test_a_gang_that_shrinks_and_grows(self):
        """A rank that is gone does not end the view, one that is new is shown."""
        with Cluster(nodes=3) as cluster:
            job_id = self.submit(cluster, 3, "--min-nodes", "2", "--elastic-wait", "300ms", end=3)
            with cluster.running("job", "logs", "-f", "--merge", job_id) as all_, \
                    cluster.running("job", "logs", "-f", "--rank", "2", job_id) as last:
                self.saw(all_, 1, (0, 1, 2))
                self.saw(last, 1, (2,))
                victim = lose_a_node(cluster)
                self.saw(all_, 2, (0, 1))
                cluster.forget_node(victim)
                cluster.start_node(7)
                self.go(cluster, 2)
                self.saw(all_, 3, (0, 1, 2))
                self.go(cluster, 3)
                self.assertEqual(all_.wait(60), 0, all_.output())
                self.assertEqual(last.wait(60), 0, last.output())
            for rank, attempts in ((0, (1, 2, 3)), (1, (1, 2, 3)), (2, (1, 3))):
                want = [line for a in attempts for line in self.want(a, rank)]
                self.assertEqual(self.shown(all_, rank, f"[rank {rank}] "), want)
            self.assertEqual(self.shown(last, 2, ""), self.want(1, 2) + self.want(3, 2))
            self.assertIn("mobula: attempt 2 begins, with 2 ranks\n", all_.output())
            self.assertIn("mobula: attempt 3 begins, with 3 ranks\n", all_.output())


class RestartTest(unittest.TestCase):
    def test_follow_survives_the_death_of_the_head(self):
        """ray#60665, ray#51601: following stops amid a run and exits with 0."""
        with Cluster(nodes=1) as cluster:
            job_id = follow_restarts.check(self, cluster)
            # Stock clients end with a clear state.
            self.assertEqual(JobSubmissionClient(cluster.address).get_job_status(job_id),
                             JobStatus.FAILED)


class CapTest(unittest.TestCase):
    """ray#64528, ray#31689: the log of a driver is never rotated and fills the head's disk."""

    def check(self, cluster):
        fields = {"runtime_env": {"env_vars": {"MOBULA_LOG_MAX_BYTES": str(2 * CAP_BYTES)}}}
        for cap, more in ((CAP_BYTES, {}), (2 * CAP_BYTES, fields)):
            job_id = cluster.submit(
                "i=0; while [ $i -lt 30 ]; do seq -f \"$i %099.0f\" 1 1000; i=$((i+1)); "
                "sleep 0.1; done; sleep 1000", **more)
            log = pathlib.Path(cluster.node("node-0")["dir"], "logs", f"job-driver-{job_id}.log")
            tail = Tail(cluster.address, job_id)
            text = b""
            while b"\n29 " + b"%099d\n" % 1000 not in text[-4096:]:
                opcode, payload = tail.frame()
                text += payload if opcode == TEXT else b""

            def kept():  # above the cap more will be released
                return log.stat().st_size - cluster.get(f"/api/jobs/{job_id}/logs?limit=1")["first_offset"]

            wait_until(lambda: kept() <= cap and log.stat().st_blocks * 512 <= cap + 8192,
                       lambda: f"{log.stat().st_blocks * 512} bytes are on the disk, {kept()} can be read")
            # A follower that reads missed nothing of what was released behind it.
            self.assertEqual(len(re.findall(rb"^\d+ 0+\d+$", text, re.M)), 30000)
            size = log.stat().st_size
            self.assertEqual(size, len(text))
            whole = cluster.logs(job_id)
            gone = int(re.match(r"\[mobula: the first (\d+) bytes of this log were released",
                                whole)[1])
            self.assertEqual(whole.split("\n", 1)[1].encode(), text[gone:])
            piece = cluster.get(f"/api/jobs/{job_id}/logs?offset=5&limit=10")
            self.assertEqual((piece["offset"], piece["first_offset"]), (gone, gone))
            late = Tail(cluster.address, job_id, "?format=bytes")
            self.assertEqual(json.loads(late.frame()[1]), {"offset": gone, "lost": 0})
            shown = cluster.mobula("job", "logs", "--address", cluster.address, job_id)
            self.assertIn(f"the first {gone} bytes of the log were released", shown.stdout)
            cluster.call("POST", f"/api/jobs/{job_id}/stop")
            cluster.wait_job(job_id)

    def test_on_the_disk(self):
        with Cluster(nodes=1, start_args=["--log-max-bytes", str(CAP_BYTES)]) as cluster:
            self.check(cluster)
            job_id = cluster.submit(
                ["mobula", "run", "--num-nodes", "1", "--", "sh", "-c", BIG_LOG + "; sleep 1000"])
            rank = wait_until(lambda: list(pathlib.Path(cluster.temp).glob(
                "node_*/gangs/*/rank-0.log")), "a rank")[0]
            wait_until(lambda: rank.stat().st_size == 100_000_000, "the rank's output")
            wait_until(lambda: rank.stat().st_blocks * 512 <= CAP_BYTES + 8192, "its release")
            cluster.call("POST", f"/api/jobs/{job_id}/stop")
            cluster.wait_job(job_id)

    def test_on_tmpfs(self):
        folder = tempfile.mkdtemp(dir="/dev/shm")
        try:
            cluster = Cluster(nodes=1, start_args=["--log-max-bytes", str(CAP_BYTES)])
            cluster.temp = folder + "/c"
            with cluster:
                self.check(cluster)
        finally:
            shutil.rmtree(folder)

    def test_after_a_restart_of_the_agent(self):
        """A job that is adopted keeps its cap: the head's, and one of its own."""
        with Cluster(nodes=1, start_args=["--log-max-bytes", str(CAP_BYTES)]) as cluster:
            own = {"runtime_env": {"env_vars": {"MOBULA_LOG_MAX_BYTES": str(2 * CAP_BYTES)}}}
            jobs = {}
            for cap, more in ((CAP_BYTES, {}), (2 * CAP_BYTES, own)):
                go = pathlib.Path(cluster.dir, f"go-{cap}")
                jobs[cap] = go, cluster.submit(
                    f"until test -e {go}; do sleep 0.1; done; " + BIG_LOG + "; sleep 1000", **more)
                cluster.wait_job(jobs[cap][1], ("RUNNING",))
            node = cluster.node("node-0")
            os.kill(node["pid_agent"], signal.SIGKILL)
            wait_until(lambda: cluster.is_up() and cluster.node("node-0")["pid_agent"] != node["pid_agent"],
                       "another agent")
            for cap, (go, job_id) in jobs.items():
                go.touch()
                log = pathlib.Path(node["dir"], "logs", f"job-driver-{job_id}.log")
                wait_until(lambda: log.stat().st_size >= 100_000_000, "the job's output", 60)
                wait_until(lambda: log.stat().st_blocks * 512 <= cap + 8192,
                           lambda: f"{log.stat().st_blocks * 512} bytes are on the disk")
                self.assertGreater(log.stat().st_blocks * 512, cap // 2)
                cluster.call("POST", f"/api/jobs/{job_id}/stop")
                cluster.wait_job(job_id)

    def test_a_bad_cap_is_refused(self):
        with Cluster(nodes=1) as cluster:
            for cap in ("many", "1000"):
                job_id = cluster.submit(
                    "true", runtime_env={"env_vars": {"MOBULA_LOG_MAX_BYTES": cap}})
                job = cluster.wait_job(job_id)
                self.assertEqual(job["status"], "FAILED")
                self.assertIn("MOBULA_LOG_MAX_BYTES", job["message"])


if __name__ == "__main__":
    unittest.main()
