"""What a job leaves behind: zombies, limits it was given."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import unittest

from cluster import Cluster, command_of, wait_until


def zombies_below(pids):
    """Zombies among the descendants of these processes."""
    parents, states = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            rest = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(entry.name)], states[int(entry.name)] = int(rest[1]), rest[0]

    def is_ours(pid):
        while pid in parents:
            if pid in pids:
                return True
            pid = parents[pid]
        return False

    return [p for p, state in states.items() if state == "Z" and is_ours(p)]


class Descriptors(unittest.TestCase):
    def test_what_the_starter_had_open_is_not_kept(self):
        # A lock of whoever started the node would be held as long as it lives, and every job would have it.
        with tempfile.NamedTemporaryFile(prefix="mb-held-") as held, Cluster(nodes=1) as cluster:
            def has_it(pid):
                try:
                    links = list(pathlib.Path(f"/proc/{pid}/fd").iterdir())
                except OSError:  # it has ended since it was found
                    return False
                return any(os.path.realpath(link) == held.name for link in links)
            before = set(cluster.own_pids())
            done = cluster.mobula("start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--node-name", "node-1",
                                  "--dashboard-agent-listen-port", "0", pass_fds=(held.fileno(),))
            self.assertEqual(done.returncode, 0, done.stdout)
            started = set(cluster.own_pids()) - before
            self.assertGreaterEqual(len(started), 2)
            self.assertEqual([p for p in started if has_it(p)], [])


class Leftovers(unittest.TestCase):
    JOBS, AT_ONCE = 200, 8

    def test_two_hundred_jobs_with_orphans_leave_no_zombie(self):
        """ray#42861, ray#31451: each job starts children that outlive it, in sessions of their own."""
        entrypoint = "setsid sleep 1000 & (setsid sh -c '(sleep 1000 &) ; sleep 1000' &) ; true &"
        with Cluster(nodes=1) as cluster:
            inits = [n["pid_init"] for n in cluster.nodes()]
            before = set(cluster.own_pids())
            pending = []
            for i in range(self.JOBS):
                pending.append(cluster.submit(entrypoint, submission_id=f"short-{i}",
                                              runtime_env={"env_vars": {
                                                  "RAY_JOB_STOP_WAIT_TIME_S": "0"}}))
                while len(pending) >= self.AT_ONCE:
                    self.assertEqual(cluster.wait_job(pending.pop(0))["status"], "SUCCEEDED")
            for job_id in pending:
                self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED")
            wait_until(lambda: set(cluster.own_pids()) <= before,
                       lambda: f"left: {set(cluster.own_pids()) - before}", 30)
            wait_until(lambda: not zombies_below(inits), lambda: f"zombies: {zombies_below(inits)}", 30)

    def test_a_rank_beyond_the_memory_limit_is_named(self):
        with Cluster(nodes=1) as cluster:
            done = cluster.mobula("job", "submit", "--address", cluster.address, "--memory-limit",
                                  "64MiB", "--submission-id", "greedy", "--", "mobula", "run", "--",
                                  "tail", "/dev/zero")
            self.assertEqual(done.returncode, 1, done.stdout)
            job = cluster.job("greedy")
            self.assertEqual(job["status"], "FAILED")
            self.assertIn("killed: memory limit of 64 MiB", job["message"])
            cluster.assert_all_free()


    def test_a_job_that_stops_its_supervisor_is_stopped(self):
        """Once, again and again, and before the agent was started anew; so is a rank of a gang."""
        begun = "until test -e {0}-go; do sleep 0.05; done; "
        once = begun + "kill -STOP $PPID; touch {0}; sleep 1000"
        again = begun + "kill -STOP $PPID; touch {0}; while :; do kill -STOP $PPID; done"
        with Cluster(nodes=1, env={"RAY_JOB_STOP_WAIT_TIME_S": "1"}) as cluster:
            for i, (line, restarts, gang) in enumerate(((once, 0, 0), (again, 0, 0), (once, 1, 0),
                                                        (once, 0, 1), (again, 0, 1))):
                with self.subTest(line=line, restarts=restarts, gang=gang):
                    gate, before = f"{cluster.dir}/stands-{i}", set(cluster.own_pids())
                    entrypoint = line.format(gate)
                    job_id = cluster.submit(
                        ["mobula", "run", "--stop-grace", "1s", "--", "sh", "-c", entrypoint] if gang else entrypoint,
                        submission_id=f"stands-{i}", runtime_env={
                            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "1"}})
                    cluster.wait_job(job_id, ("RUNNING",))
                    pathlib.Path(f"{gate}-go").touch()
                    wait_until(lambda: os.path.exists(gate), "the supervisor stands")
                    if restarts:
                        node = cluster.node("node-0")
                        os.kill(node["pid_agent"], signal.SIGKILL)
                        wait_until(lambda: cluster.node("node-0")["pid_agent"] != node["pid_agent"]
                                   and cluster.is_up(), "the agent is back")
                    self.assertEqual(cluster.call("POST", f"/api/jobs/{job_id}/stop")[0], 200)
                    self.assertEqual(cluster.wait_job(job_id, timeout_s=60)["status"], "STOPPED")
                    wait_until(lambda: len(set(cluster.own_pids()) - before) <= restarts,
                               lambda: f"left: {set(cluster.own_pids()) - before}", 30)
            cluster.assert_all_free()


class Exits(unittest.TestCase):
    def test_exit_code_and_signal_of_driver_and_every_rank_are_kept(self):
        """ray#48106, ray#38142: also after the job, and after the head was killed."""
        with Cluster(nodes=1) as cluster:
            cluster.submit("mobula run --ranks-per-node 2 -- sh -c "
                           "'if [ $RANK = 1 ]; then exit 7; fi; kill -SEGV $$'".replace(
                               "kill", f"until test -e {cluster.dir}/go; do sleep 0.02; done; kill")
                           .replace("exit 7", f"trap \"\" TERM; touch {cluster.dir}/deaf; until test -e {cluster.dir}/go; do "
                                              "sleep 0.02; done; exit 7"), submission_id="both")
            wait_until(lambda: len(cluster.rank_pids("sh")) >= 2 and os.path.exists(f"{cluster.dir}/deaf"),
                       "two ranks run, and the one that is told to end does not hear it")
            open(f"{cluster.dir}/go", "w").close()
            self.assertEqual(cluster.wait_job("both")["status"], "FAILED")
            cluster.submit("kill -ABRT $$", submission_id="driver")
            self.assertEqual(cluster.wait_job("driver")["driver_exit_code"], -signal.SIGABRT)
            for _ in range(2):
                done = cluster.mobula("job", "status", "--address", cluster.address, "--json", "both")
                exits = {e["rank"]: (e["exit_code"], e["signal"])
                         for e in json.loads(done.stdout)["rank_exits"]}
                self.assertEqual(sorted(exits), [0, 1])
                self.assertIn(exits[0], ((128 + signal.SIGSEGV, signal.SIGSEGV),
                                         (128 + signal.SIGTERM, signal.SIGTERM),
                                         (128 + signal.SIGKILL, signal.SIGKILL)))
                self.assertEqual(exits[1], (7, 0))
                shown = cluster.mobula("job", "status", "--address", cluster.address, "driver").stdout
                self.assertIn("driver: signal 6 (Aborted)", shown)
                killed = cluster.node("node-0")["pid_agent"]
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda: cluster.node("node-0")["pid_agent"] != killed and
                           cluster.is_up(), "the head is back", 60)


class Stops(unittest.TestCase):
    def test_the_command_waits_while_the_head_restarts(self):
        """The stop goes on without the head's agent, so whoever waits for it is told its end."""
        with Cluster(nodes=1) as cluster:
            env = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "8"}}  # all that is asked meanwhile has this time
            cluster.submit(f"trap 'touch {cluster.dir}/asked' TERM; touch {cluster.dir}/up; "
                           "while :; do sleep 0.05; done", submission_id="slow", runtime_env=env)
            wait_until(lambda: os.path.exists(f"{cluster.dir}/up"), "it runs")
            with cluster.running("job", "stop", "--address", cluster.address, "slow") as stop:
                wait_until(lambda: os.path.exists(f"{cluster.dir}/asked"), stop.output)
                self.assertEqual(cluster.job("slow")["status"], "RUNNING")  # the stop was answered
                node = cluster.node("node-0")
                os.kill(node["pid_init"], signal.SIGSTOP)  # which would start the agent again at once
                try:
                    os.kill(node["pid_agent"], signal.SIGKILL)
                    with self.assertRaises(subprocess.TimeoutExpired, msg="it asks again"):
                        stop.wait(1)
                finally:
                    os.kill(node["pid_init"], signal.SIGCONT)
                self.assertEqual(stop.wait(60), 0, stop.output())
                self.assertIn("Job 'slow' was stopped", stop.output())
            self.assertNotEqual(cluster.node("node-0")["pid_agent"], node["pid_agent"])
            self.assertEqual(cluster.job("slow")["status"], "STOPPED")


class HungLaunch(unittest.TestCase):
    def test_job_and_attempt_end_and_nothing_starts_later(self):
        """The front process of a node hangs, so that what its agent asks for is never launched."""
        with Cluster(nodes=2, start_args=("--launch-timeout", "5s")) as cluster:
            head, far = (cluster.node(n)["pid_init"] for n in ("node-0", "node-1"))
            ran, go = (pathlib.Path(cluster.dir, name) for name in ("ran", "go"))
            cluster.submit(f"until test -e {go}; do sleep 0.02; done; exec mobula run --num-nodes 2 --max-restarts 1 "
                           f"--restart-delay 50ms -- sh -c 'echo $MOBULA_ATTEMPT >> {ran}'", submission_id="gang")
            cluster.wait_job("gang", ("RUNNING",))
            try:
                os.kill(head, signal.SIGSTOP)
                os.kill(far, signal.SIGSTOP)
                for name in ("driver", "stopped"):
                    cluster.submit(f"echo {name} >> {ran}", submission_id=name)
                cluster.call("POST", "/api/jobs/stopped/stop")
                job = cluster.wait_job("driver")  # it says what happened and what can be done
                self.assertEqual(job["status"], "FAILED", job)
                self.assertRegex(job["message"], rf"mobula-init \(pid {head}\) did not answer the launch within 5 s "
                                 rf"\(--launch-timeout\).*`kill -CONT {head}`")
                self.assertEqual(cluster.wait_job("stopped")["status"], "STOPPED")
                os.kill(head, signal.SIGCONT)
                go.touch()
                wait_until(lambda: "attempt 1 ended (transient)" in cluster.logs("gang"),
                           lambda: cluster.logs("gang"), 60)
            finally:
                for pid in (head, far):
                    os.kill(pid, signal.SIGCONT)
            log = (cluster.wait_job("gang"), cluster.logs("gang"))
            self.assertEqual(log[0]["status"], "SUCCEEDED", log)
            self.assertIn(f"mobula-init (pid {far}) did not answer the launch", log[1])
            # What the front processes read now of the time before starts no more: they answer in order.
            after = cluster.submit("mobula run --num-nodes 2 -- true")
            self.assertEqual(cluster.wait_job(after)["status"], "SUCCEEDED", cluster.logs(after))
            wait_until(lambda: not any("supervise" in command_of(pid) for pid in cluster.own_pids()),
                       lambda: [command_of(pid) for pid in cluster.own_pids()])
            attempts = ran.read_text().split()
            self.assertEqual(attempts.count("2"), 2, attempts)  # each rank once
            self.assertLessEqual(attempts.count("1"), 1, attempts)  # the one on the head, if it was as fast
            self.assertLessEqual(set(attempts), {"1", "2"}, attempts)
            cluster.assert_all_free()


if __name__ == "__main__":
    unittest.main()
