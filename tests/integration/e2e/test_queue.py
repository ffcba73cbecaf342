"""Who may start, who waits, and why: jobs in line at an embedded head; submissions sent twice."""

import contextlib
import http.server
import os
import pathlib
import signal
import socket
import threading
import time
import unittest

from cluster import Cluster, wait_until
from ports import free_port
from ray.job_submission import JobStatus, JobSubmissionClient

MAX_RUNNING, MAX_QUEUED = 3, 4
WAITING = ("Job has not started yet. It may be waiting for resources (CPUs, GPUs, memory, custom "
           "resources) to become available.")


class QueueTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.environ.pop("RAY_ADDRESS", None)
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, start_args=[
            "--max-running-jobs", str(MAX_RUNNING), "--max-queued-jobs", str(MAX_QUEUED),
            "--num-cpus", "2", "--num-gpus", "2", "--resources", '{"whale": 2}']))
        cls.client = JobSubmissionClient(cls.cluster.address)

    def tearDown(self):
        """No test leaves a job behind that the next one would wait for."""
        for job in self.client.list_jobs():
            self.client.stop_job(job.submission_id)
        for job in self.client.list_jobs():
            self.cluster.wait_job(job.submission_id)
            self.client.delete_job(job.submission_id)

    def gate(self, name):
        return pathlib.Path(self.cluster.dir, f"gate-{name}")

    def gated(self, name, then="true", **fields):
        """A job that runs until its gate is made."""
        return self.cluster.submit(f"until [ -e {self.gate(name)} ]; do sleep 0.02; done; {then}",
                                   submission_id=name, **fields)

    def statuses(self, *names):
        return [self.cluster.job(n)["status"] for n in names]

    def test_resources_gate_the_start_and_the_wait_says_why(self):
        """ray#60159, ray#41241: a queue, with a visible position."""
        self.gated("first", entrypoint_resources={"whale": 2})
        self.cluster.wait_job("first", ("RUNNING",))
        self.gated("second", entrypoint_resources={"whale": 1})
        self.gated("third", entrypoint_resources={"whale": 0.5})
        second, third = self.cluster.job("second"), self.cluster.job("third")
        self.assertEqual((second["status"], third["status"]), ("PENDING", "PENDING"))
        self.assertEqual(second["message"], WAITING + " It is number 1 of 2 in the queue: it needs "
                                            "1 whale, 0 of 2 free.")
        self.assertIn("number 2 of 2", third["message"])
        shown = self.cluster.mobula("status", "--address", self.cluster.address).stdout
        self.assertIn("\n      It is number 1 of 2 in the queue: it needs 1 whale, 0 of 2 free.\n", shown)
        # What they wait for, a job without needs does not take.
        self.cluster.wait_job(self.cluster.submit("true"), ("SUCCEEDED",))
        self.assertEqual(self.statuses("second", "third"), ["PENDING", "PENDING"])
        self.gate("first").touch()
        self.assertEqual(self.cluster.wait_job("first")["status"], "SUCCEEDED")
        self.cluster.wait_job("second", ("RUNNING",))
        self.cluster.wait_job("third", ("RUNNING",))
        for name in ("second", "third"):
            self.gate(name).touch()
            self.assertEqual(self.cluster.wait_job(name)["status"], "SUCCEEDED")

    def test_bounds_of_running_and_waiting(self):
        """ray#60159: many jobs at once do not run at once, and there is an end to the queue."""
        names = [f"bound-{i}" for i in range(MAX_RUNNING + MAX_QUEUED)]
        for name in names:
            self.gated(name)
            if name == names[MAX_RUNNING - 1]:
                for running in names[:MAX_RUNNING]:
                    self.cluster.wait_job(running, ("RUNNING",))
        status, text = self.cluster.call("POST", "/api/jobs/", {"entrypoint": "true"})
        self.assertEqual((status, text), (503, "4 jobs wait already, which is the bound of this "
                                               "head (--max-queued-jobs); submit again when some "
                                               "have started"))
        self.assertEqual(self.statuses(*names),
                         ["RUNNING"] * MAX_RUNNING + ["PENDING"] * MAX_QUEUED)
        self.assertEqual(self.cluster.job(names[-1])["message"],
                         "Job has not started yet. It is number 4 of 4 in the queue: 3 jobs run, "
                         "which is the bound (--max-running-jobs).")
        for name in names:  # in the order in which they came
            self.cluster.wait_job(name, ("RUNNING",))
            self.gate(name).touch()
            self.assertEqual(self.cluster.wait_job(name)["status"], "SUCCEEDED")

    def test_what_never_fits_is_shown_and_fails(self):
        """ray#55133, ray#41437: a request that can never be met fails, and says why."""
        for name, fields, why in (
                ("gpus", {"entrypoint_num_gpus": 3}, "needs 3 GPUs, the cluster has 2"),
                ("cpus", {"entrypoint_num_cpus": 2.5}, "needs 2.5 CPUs, the cluster has 2"),
                ("memory", {"entrypoint_memory": 1 << 60}, "needs 1.0 EiB of memory, the cluster has "),
                ("custom", {"entrypoint_resources": {"nobody": 1}},
                 "needs 1 nobody, the cluster has 0")):
            with self.subTest(name):
                self.cluster.submit("true", submission_id=name, **fields)
                job = self.cluster.job(name)
                self.assertEqual(job["status"], "PENDING")
                self.assertTrue(job["message"].startswith(WAITING), job)
                self.assertIn(why, job["message"])
                job = self.cluster.wait_job(name, timeout_s=60)
                self.assertEqual((job["status"], job["error_type"], job["driver_exit_code"]),
                                 ("FAILED", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE", None))
                self.assertIn(why, job["message"])

    def test_negative_amounts_fail_as_rays_do(self):
        for name, fields in (("num_cpus", {"entrypoint_num_cpus": -1}),
                             ("num_gpus", {"entrypoint_num_gpus": -0.5}),
                             ("memory", {"entrypoint_memory": -1}),
                             ("whale", {"entrypoint_resources": {"whale": -1}})):
            with self.subTest(name):
                self.cluster.submit("true", submission_id=f"minus-{name}", **fields)
                job = self.cluster.wait_job(f"minus-{name}")
                self.assertEqual((job["status"], job["error_type"], job["message"]),
                                 ("FAILED", "JOB_SUPERVISOR_ACTOR_START_FAILURE",
                                  f"Failed to start supervisor actor minus-{name}: 'The quantity "
                                  f"of resource {name} cannot be negative'"))

    def test_label_selector(self):
        """No node matches: it never starts; a selector is part of a repeated submission."""
        node = self.cluster.node("node-0")["node_id"]
        for name, selector, status in (("here", {"ray.io/node-id": f"in({node}, x)"}, "SUCCEEDED"),
                                       ("not", {"zone": "!a"}, "SUCCEEDED"),
                                       ("zone", {"zone": "a"}, "FAILED")):
            with self.subTest(name):
                self.cluster.submit("true", submission_id=name, entrypoint_label_selector=selector)
                job = self.cluster.wait_job(name)
                self.assertEqual(job["status"], status, job["message"])
        self.assertEqual(job["error_type"], "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE")
        self.assertEqual(job["message"],
                         "This job can never start. It needs a node that matches the label selector "
                         "zone=a, the cluster has none.")
        status, text = self.cluster.call("POST", "/api/jobs/", {
            "entrypoint": "true", "entrypoint_label_selector": {"zone": "in(a"}})
        self.assertEqual(status, 500)  # the rest of Ray's words: gcs/test_contract.py
        self.assertIn("ValueError: Invalid label selector value `in(a`.", text)
        body = {"entrypoint": "true", "submission_id": "labelled",
                "metadata": {"mobula_submission_key": "k"},
                "entrypoint_label_selector": {"zone": "!a"}}
        self.assertEqual(self.cluster.call("POST", "/api/jobs/", body)[0], 200)
        self.assertEqual(self.cluster.call("POST", "/api/jobs/", body)[0], 200)
        body["entrypoint_label_selector"] = {"zone": "!b"}
        self.assertEqual(self.cluster.call("POST", "/api/jobs/", body)[0], 500)

    def test_ray_cli_sees_that_it_waits(self):
        address = ("--address", self.cluster.address)
        # While others have them, however long Ray's commands take to start; who needs more than there are has 10 s.
        self.gated("has-both", entrypoint_num_gpus=2)
        for gpus, name in (("1", "waits-for-one"), ("99", "too-wide")):
            sent = self.cluster.ray("job", "submit", *address, "--submission-id", name,
                                    "--no-wait", "--entrypoint-num-gpus", gpus, "--", "true")
            self.assertEqual(sent.returncode, 0, sent.stdout)
        shown = self.cluster.ray("job", "status", *address, "waits-for-one")
        self.assertEqual(shown.returncode, 0, shown.stdout)
        self.assertIn("waiting for resources", shown.stdout)
        self.assertEqual(self.cluster.wait_job("too-wide")["status"], "FAILED")
        self.assertEqual(self.client.get_job_status("too-wide"), JobStatus.FAILED)
        self.assertEqual(self.client.get_job_status("waits-for-one"), JobStatus.PENDING)
        self.gate("has-both").touch()
        self.assertEqual(self.cluster.wait_job("waits-for-one")["status"], "SUCCEEDED")

    def test_mobula_submit_of_what_never_fits_ends_with_1(self):
        began = time.monotonic()
        done = self.cluster.mobula("job", "submit", "--address", self.cluster.address,
                                   "--entrypoint-num-gpus", "99", "--", "true")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("needs 99 GPUs, the cluster has 2", done.stdout)
        self.assertLess(time.monotonic() - began, 20)

    def test_a_wait_ends_by_its_own_time_limit(self):
        """ray#55133: the reservation is cancelled with the time-out, nothing starts afterwards."""
        self.gated("holder", entrypoint_resources={"whale": 2})
        marker = pathlib.Path(self.cluster.dir, "late-start")
        self.cluster.submit(f"touch {marker}", submission_id="impatient",
                            entrypoint_resources={"whale": 1}, runtime_env={
                                "env_vars": {"RAY_JOB_START_TIMEOUT_SECONDS": "0.5"}})
        job = self.cluster.wait_job("impatient", timeout_s=60)
        self.assertEqual((job["status"], job["error_type"]),
                         ("FAILED", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"))
        self.assertTrue(job["message"].startswith(
            "Job supervisor actor failed to start within 0.5 seconds. This timeout can be "
            "configured by setting the environment variable RAY_JOB_START_TIMEOUT_SECONDS. "),
            job["message"])
        self.assertIn("it needs 1 whale, 0 of 2 free", job["message"])
        self.gate("holder").touch()
        self.assertEqual(self.cluster.wait_job("holder")["status"], "SUCCEEDED")
        after = self.cluster.submit("true", entrypoint_resources={"whale": 2})
        self.assertEqual(self.cluster.wait_job(after)["status"], "SUCCEEDED")
        self.assertFalse(marker.exists())

    def test_stop_of_a_waiting_job(self):
        """ray#58353, ray#56102: stopped at once; and deleted, it never comes back as FAILED."""
        self.gated("in-front", entrypoint_resources={"whale": 2})
        self.gated("waits", entrypoint_resources={"whale": 2})
        self.assertEqual(self.cluster.job("waits")["status"], "PENDING")
        self.assertEqual(self.cluster.call("POST", "/api/jobs/waits/stop"),
                         (200, '{"stopped": true}'))
        job = self.cluster.job("waits")
        self.assertEqual((job["status"], job["message"]),
                         ("STOPPED", "Job was intentionally stopped."))
        self.assertEqual(self.cluster.call("DELETE", "/api/jobs/waits")[0], 200)
        self.assertEqual(self.cluster.call("GET", "/api/jobs/waits")[0], 404)
        self.gate("in-front").touch()
        self.cluster.wait_job("in-front")
        self.assertEqual(self.cluster.call("GET", "/api/jobs/waits")[0], 404)
        stopped = self.client.submit_job(entrypoint="true", entrypoint_resources={"nobody": 1})
        self.assertTrue(self.client.stop_job(stopped))
        self.assertEqual(self.client.get_job_status(stopped), JobStatus.STOPPED)

    def test_stop_while_it_is_being_started(self):
        """ray#58353: STOPPED means that no driver is left; its id is free again at once."""
        for i in range(20):
            pid = pathlib.Path(self.cluster.dir, f"pid-{i}")
            self.cluster.submit(f"echo $$ > {pid}; exec sleep 1000", submission_id="again")
            if i % 2:
                self.cluster.wait_job("again", ("RUNNING",))
            self.assertEqual(self.cluster.call("POST", "/api/jobs/again/stop"),
                             (200, '{"stopped": true}'))
            self.assertEqual(self.cluster.wait_job("again")["status"], "STOPPED")
            if pid.exists() and pid.read_text():
                with self.assertRaises(ProcessLookupError):
                    os.kill(int(pid.read_text()), 0)
            self.assertEqual(self.cluster.call("DELETE", "/api/jobs/again")[0], 200)
            self.cluster.submit("echo it ran", submission_id="again")
            job = self.cluster.wait_job("again")
            self.assertEqual(job["status"], "SUCCEEDED", job["message"])
            self.assertEqual(self.cluster.call("DELETE", "/api/jobs/again")[0], 200)

    def test_gpus_of_drivers_are_theirs(self):
        for name in ("gpu-a", "gpu-b", "gpu-c"):
            self.gated(name, "echo sees $CUDA_VISIBLE_DEVICES", entrypoint_num_gpus=1)
        for name in ("gpu-a", "gpu-b"):
            self.cluster.wait_job(name, ("RUNNING",))
        self.assertIn("it needs 1 GPU, 0 of 2 free", self.cluster.job("gpu-c")["message"])
        wait_until(lambda: self.cluster.available("mobula_gpu") == 0, "gangs do not get them")
        agent = self.cluster.node("node-0")["pid_agent"]
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: self.cluster.node("node-0")["pid_agent"] != agent and
                   self.cluster.node("node-0")["state"] == "ALIVE", "the head is back")
        self.assertEqual(self.statuses("gpu-a", "gpu-b", "gpu-c"),
                         ["RUNNING", "RUNNING", "PENDING"])
        for name, device in (("gpu-a", 0), ("gpu-b", 1), ("gpu-c", 0)):
            self.gate(name).touch()
            self.assertEqual(self.cluster.wait_job(name)["status"], "SUCCEEDED")
            self.assertIn(f"sees {device}\n", self.cluster.logs(name))
        wait_until(lambda: self.cluster.available("mobula_gpu") == 2, "they are back")

    def test_the_line_survives_the_head(self):
        names = [f"line-{i}" for i in range(MAX_RUNNING + 3)]
        for name in names:
            self.gated(name)
            time.sleep(0.002)  # the order is kept by the millisecond of submission
        for name in names[:MAX_RUNNING]:
            self.cluster.wait_job(name, ("RUNNING",))
        agent = self.cluster.node("node-0")["pid_agent"]
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: self.cluster.node("node-0")["pid_agent"] != agent and
                   self.cluster.node("node-0")["state"] == "ALIVE", "the head is back")
        self.assertEqual(self.statuses(*names), ["RUNNING"] * MAX_RUNNING + ["PENDING"] * 3)
        self.assertIn("number 3 of 3", self.cluster.job(names[-1])["message"])
        for name in names:
            self.cluster.wait_job(name, ("RUNNING",))
            self.gate(name).touch()
            self.assertEqual(self.cluster.wait_job(name)["status"], "SUCCEEDED")

    # ---- --pipefail ----

    def test_pipefail(self):
        """ray#48106, ray#31183: the shell does not swallow the failure when asked not to."""
        submit = ("job", "submit", "--address", self.cluster.address)
        for command in ("sh -c 'exit 7' | cat", "sh -c 'exit 7'; echo not reached"):
            with self.subTest(command):
                lax = self.cluster.submit(command)
                self.assertEqual(self.cluster.wait_job(lax)["status"], "SUCCEEDED")
                done = self.cluster.mobula(*submit, "--pipefail", "--", command)
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertIn("exit code 7", done.stdout)
                self.assertNotIn("\nnot reached", done.stdout)
        done = self.cluster.mobula(*submit, "--pipefail", "--", "echo one two | wc -w")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("\n2\n", done.stdout)
        by_rest = self.cluster.submit("false | cat", metadata={"mobula_pipefail": "1"})
        self.assertEqual(self.cluster.wait_job(by_rest)["driver_exit_code"], 1)

    # ---- sent again ----

    def test_the_same_submission_twice_is_one_job(self):
        """kuberay#2376, kuberay#2393: a repetition with its key is harmless; without, Ray's error."""
        ran = pathlib.Path(self.cluster.dir, "ran")
        body = {"entrypoint": f"echo x >> {ran}", "submission_id": "again",
                "metadata": {"mobula_submission_key": "k1", "team": "sea"},
                "runtime_env": {"env_vars": {"B": "1", "A": "2"}}}
        first = self.cluster.call("POST", "/api/jobs/", body)
        body["runtime_env"] = {"env_vars": {"A": "2", "B": "1"}}
        self.assertEqual(first[0], 200, first)
        self.assertEqual(self.cluster.call("POST", "/api/jobs/", body), first)
        self.cluster.wait_job("again")
        self.assertEqual(self.cluster.call("POST", "/api/jobs/", body), first)
        self.assertEqual(ran.read_text(), "x\n")
        for change in ({"entrypoint": "true"}, {"metadata": {"mobula_submission_key": "k2"}},
                       {"metadata": {}}, {"entrypoint_num_cpus": 1}):
            status, text = self.cluster.call("POST", "/api/jobs/", {**body, **change})
            self.assertEqual(status, 500, text)
            self.assertIn("ValueError: Job with submission_id again already exists."
                          " Please use a different submission_id.", text)

    def test_a_name_that_is_taken(self):
        submit = ("job", "submit", "--address", self.cluster.address, "--submission-id", "taken",
                  "--", "true")
        self.assertEqual(self.cluster.mobula(*submit).returncode, 0)
        again = self.cluster.mobula(*submit)
        self.assertNotEqual(again.returncode, 0, again.stdout)
        self.assertIn("job taken exists already", again.stdout)

    def test_an_answer_that_is_lost(self):
        """kuberay#2058: the connection breaks after the POST; the client asks again, one job runs."""
        ran = pathlib.Path(self.cluster.dir, "ran-once")
        with losing_proxy(int(self.cluster.address.rsplit(":", 1)[1])) as (port, lost):
            done = self.cluster.mobula("job", "submit", "--address", f"http://127.0.0.1:{port}",
                                       "--", "sh", "-c", f"echo x >> {ran}; echo it ran")
        self.assertEqual(lost, ["POST"], "the proxy lost one answer")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("it ran\n", done.stdout)
        self.assertEqual(ran.read_text(), "x\n")
        self.assertEqual(len(self.client.list_jobs()), 1)


    def test_a_head_that_comes_back_is_waited_for(self):
        """Nobody listens when the command begins: said once, and the job is there when the head is."""
        port = free_port()
        for address in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"):
            is_gcs = "//" not in address
            target = self.cluster.gcs if is_gcs else self.cluster.address
            with self.cluster.running("job", "submit", "--address", address, "--", "echo", "it ran") as submit:
                wait_until(lambda: "trying again for 10 s" in submit.output(), submit.output)
                with losing_proxy(int(target.rsplit(":", 1)[1]), port, loses=False):
                    self.assertEqual(submit.wait(60), 0, submit.output())
                self.assertIn("\nit ran\n", submit.output())
                self.assertEqual(submit.output().count("trying again"), 1, submit.output())
        self.assertEqual(len(self.client.list_jobs()), 2)

    def test_a_head_that_stays_away(self):
        began = time.monotonic()
        done = self.cluster.mobula("job", "submit", "--address", f"http://127.0.0.1:{free_port()}", "--", "true")
        self.assertEqual(done.returncode, 69, done.stdout)
        self.assertGreaterEqual(time.monotonic() - began, 10)
        self.assertEqual(done.stdout.count("trying again"), 1, done.stdout)

    def test_an_upload_that_a_standby_refuses(self):
        """503 to the package, once: sent again, and the job is submitted."""
        package = pathlib.Path(self.cluster.dir, "package")
        package.mkdir()
        (package / "a").write_text("a")
        calls = []

        class Head(http.server.BaseHTTPRequestHandler):
            def answer(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                calls.append(self.command)
                status = {"GET": 200 if self.path.endswith("limits") else 404,
                          "PUT": 503 if calls.count("PUT") == 1 else 200}.get(self.command, 200)
                body = b'{"job_id": "j", "submission_id": "j"}'
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = answer

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Head) as head:
            threading.Thread(target=head.serve_forever, daemon=True).start()
            done = self.cluster.mobula("job", "submit", "--address", f"http://127.0.0.1:{head.server_port}",
                                       "--no-wait", "--working-dir", str(package), "--", "true")
            head.shutdown()
        self.assertEqual((done.returncode, calls.count("PUT"), calls.count("POST")), (0, 2, 1), done.stdout)
        self.assertEqual(done.stdout.count("trying again"), 1, done.stdout)


@contextlib.contextmanager
def losing_proxy(target, port=0, loses=True):
    """A port that leads to target; the answer to the first POST never arrives."""
    lost, threads, listener = [] if loses else ["nothing"], [], socket.create_server(("127.0.0.1", port))

    def pump(source, sink, drop):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if drop and lost == ["POST"] and drop.pop():
                    break  # the answer is here, so the job is in the store
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def forward(client):
        with client, socket.create_connection(("127.0.0.1", target)) as server:
            head = client.recv(65536)
            is_first = head.startswith(b"POST") and not lost
            if is_first:
                lost.append("POST")
            server.sendall(head)
            back = threading.Thread(target=pump, args=(server, client, [1] if is_first else []))
            back.start()
            pump(client, server, [])
            back.join()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=forward, args=(listener.accept()[0],)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield listener.getsockname()[1], lost
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    unittest.main()
