"""Gangs of ordinary commands over two nodes: `mobula run -- CMD`."""

import os
import re
import signal
import time
import unittest

from cluster import Cluster, command_of, is_alive, wait_until

SHOW = ('echo "I am $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK '
        '$MASTER_ADDR $MASTER_PORT"')
SHOWN = re.compile(r"I am (\d+) (\d+) (\d+) (\d+) (\d+) (\S+) (\d+)")


class RunTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2))

    def tearDown(self):
        self.cluster.assert_all_free()
        wait_until(lambda: not self.cluster.rank_pids(),
                   lambda: f"ranks are left: {self.cluster.rank_pids()}", 60)

    def test_environment_of_ranks(self):
        ports = []
        for ranks_per_node in (1, 2):
            done = self.cluster.mobula("run", "--num-nodes", "2", "--ranks-per-node",
                                       ranks_per_node, "--", "sh", "-c", SHOW)
            self.assertEqual(done.returncode, 0, done.stdout)
            seen = sorted(tuple(map(int, (r, lr, ws, lws, nr))) + (addr, port)
                          for r, lr, ws, lws, nr, addr, port in SHOWN.findall(done.stdout))
            world = 2 * ranks_per_node
            self.assertEqual([s[:5] for s in seen],
                             [(r, r % ranks_per_node, world, ranks_per_node, r // ranks_per_node)
                              for r in range(world)], done.stdout)
            self.assertEqual(len({s[5:] for s in seen}), 1, "one master for all")
            ports.append(seen[0][6])
        self.assertNotEqual(ports[0], ports[1], "a fresh port for every attempt")
        self.assertTrue(all(1024 < int(p) < 65536 for p in ports))

    def test_ranks_run_at_the_same_time(self):
        """Each waits for the other's file: run one after the other they would never end."""
        done = self.cluster.mobula(
            "run", "--num-nodes", "2", "--", "sh", "-c",
            f": > {self.cluster.dir}/here-$RANK; "
            f"until test -e {self.cluster.dir}/here-0 && test -e {self.cluster.dir}/here-1; "
            "do sleep 0.05; done; echo met $RANK", timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(sorted(re.findall(r"met (\d)", done.stdout)), ["0", "1"])

    def test_output_is_whole_lines_and_complete(self):
        done = self.cluster.mobula("run", "--num-nodes", "2", "--", "sh", "-c",
                                   "i=0; while [ $i -lt 3000 ]; do echo rank $RANK line $i; "
                                   "i=$((i+1)); done")
        self.assertEqual(done.returncode, 0)
        for rank in (0, 1):
            lines = re.findall(rf"^(?:\[rank {rank}\] )?rank {rank} line (\d+)$", done.stdout, re.M)
            self.assertEqual(lines, [str(i) for i in range(3000)])

    def test_a_failing_rank_ends_the_gang(self):
        began = time.monotonic()
        done = self.cluster.mobula("run", "--num-nodes", "2", "--", "sh", "-c",
                                   "if [ $RANK = 1 ]; then exit 7; fi; sleep 1000")
        self.assertLess(time.monotonic() - began, 10)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        verdicts = [line for line in done.stdout.splitlines() if "rank 1 exited with status 7" in line]
        self.assertEqual(len(verdicts), 1, done.stdout)

    def test_a_deaf_peer_of_a_failing_rank_is_killed(self):
        began = time.monotonic()
        done = self.cluster.mobula("run", "--num-nodes", "2", "--", "sh", "-c",
                                   "if [ $RANK = 0 ]; then exit 7; fi; trap '' TERM; "
                                   "while :; do sleep 1; done")
        self.assertLess(time.monotonic() - began, 15)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("rank 0 exited with status 7", done.stdout)

    def test_a_command_that_is_not_there(self):
        done = self.cluster.mobula("run", "--num-nodes", "2", "--", "/nonexistent/program")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("/nonexistent/program", done.stdout)

    def test_as_a_submitted_job(self):
        good = self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", SHOW])
        job = self.cluster.wait_job(good)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs(good))
        self.assertEqual(sorted(s[0] for s in SHOWN.findall(self.cluster.logs(good))), ["0", "1"])
        bad = self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sh", "-c",
                                   "[ $RANK = 0 ] || exit 7; sleep 1000"])
        job = self.cluster.wait_job(bad, timeout_s=60)
        self.assertEqual(job["status"], "FAILED")
        self.assertIn("rank 1 exited with status 7", job["message"])

    def test_env_vars_and_working_directory_reach_the_ranks(self):
        job_id = self.cluster.submit(
            ["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", "echo $COLOUR in $PWD"],
            runtime_env={"env_vars": {"COLOUR": "green"}, "working_dir": "/usr/share"})
        self.assertEqual(self.cluster.wait_job(job_id)["status"], "SUCCEEDED",
                         self.cluster.logs(job_id))
        self.assertEqual(self.cluster.logs(job_id).count("green in /usr/share"), 2)

    def test_two_gangs_that_do_not_fit_run_one_after_the_other(self):
        slots = int(self.cluster.total()) // 2
        command = ["mobula", "run", "--num-nodes", "2", "--ranks-per-node", slots, "--", "sh", "-c"]
        first = self.cluster.submit([*command, f"until test -e {self.cluster.dir}/go; do sleep 0.1; "
                                               "done; date +%s.%N"])
        wait_until(lambda: len(self.cluster.rank_pids()) == 2 * slots, "the first gang runs")
        second = self.cluster.submit([*command, "date +%s.%N"])
        wait_until(lambda: f"waiting for {2 * slots} more mobula_slot on 2 nodes: node node-0 has 0 "
                           f"free of {slots}, node node-1 has 0 free of {slots}"
                           in self.cluster.logs(second),
                   lambda: f"the reason of the wait in: {self.cluster.logs(second)}", 120)
        self.assertEqual(self.cluster.job(second)["status"], "RUNNING")
        self.assertEqual(self.cluster.available(), 0)
        open(f"{self.cluster.dir}/go", "w").close()
        for job_id in (first, second):
            self.assertEqual(self.cluster.wait_job(job_id)["status"], "SUCCEEDED",
                             self.cluster.logs(job_id))
        times = [[float(t) for t in re.findall(r"\d{9,}\.\d+", self.cluster.logs(j))]
                 for j in (first, second)]
        self.assertEqual([len(t) for t in times], [2 * slots, 2 * slots])
        self.assertLess(max(times[0]), min(times[1]))

    def test_the_last_checkpoints_stay_on_the_nodes(self):
        """A foreign trainer saves six times; each node has a directory of its own, and on one the first is read."""
        here = self.cluster.dir
        script = f"""
            D={here}/kept-$RANK; S={here}/kept-store; mkdir -p $D
            for i in 1 2 3 4 5 6; do
                N=$D/iter_000000$i; mkdir -p $N; echo $i > $N/rank$RANK.pt; : > {here}/kept-$i-$RANK
                until test -e {here}/kept-go && test -e {here}/kept-$i-0 && test -e {here}/kept-$i-1; do sleep 0.05; done
                if [ $RANK = 0 ]; then printf $i > $D/latest_checkpointed_iteration.txt; fi
                until [ "$(cat $S/latest_checkpointed_iteration.txt 2>/dev/null)" = $i ]; do sleep 0.05; done
            done"""
        run = ["run", "--num-nodes", "2", "--save", f"{here}/kept-%n", "--keep-last-k", "2"]
        done = self.cluster.mobula(*run, "--", "true")
        self.assertEqual(done.returncode, 64, done.stdout)
        self.assertIn("--keep-last-k needs --checkpoint-url", done.stdout)
        first = f"{here}/kept-1/iter_0000001/rank1.pt"
        with self.cluster.running(*run, "--checkpoint-url", f"file://{here}/kept-store", "--", "sh", "-c",
                                  script) as driver:
            wait_until(lambda: os.path.exists(first), "the first is saved")
            with open(first, encoding="ascii"):
                open(f"{here}/kept-go", "w").close()
                self.assertEqual(driver.wait(60), 0, driver.output())

        def left(node):
            return sorted(int(name[5:]) for name in os.listdir(f"{here}/kept-{node}") if name.startswith("iter_"))

        self.assertEqual(left(0), [5, 6])
        self.assertEqual(left(1), [1, 5, 6])
        self.assertEqual(len([n for n in os.listdir(f"{here}/kept-store") if n.startswith("iter_")]), 6)

    def test_driver_killed_gang_ends_with_its_lease(self):
        with self.cluster.running("run", "--num-nodes", "2", "--lease", "3s", "--", "sleep",
                                  "1000") as driver:
            pids = wait_until(lambda: len(self.cluster.rank_pids("sleep")) == 2 and
                              self.cluster.rank_pids("sleep"), "two ranks run")
            driver.kill()
            driver.wait()
            wait_until(lambda: not any(is_alive(p) for p in pids.values()),
                       "the ranks of a dead driver end", 15)

    def test_job_driver_killed_gang_ends_with_its_job(self):
        """The head knows that the driver is gone: nobody waits for the lease."""
        job_id = self.cluster.submit("exec mobula run --num-nodes 2 --lease 600s -- sleep 1000")
        pids = wait_until(lambda: len(self.cluster.rank_pids("sleep")) == 2 and
                          self.cluster.rank_pids("sleep"), "two ranks run")
        driver = int(self.cluster.job(job_id)["driver_info"]["pid"]) if self.cluster.job(
            job_id)["driver_info"] else self.driver_pid()
        os.kill(driver, signal.SIGKILL)
        self.assertEqual(self.cluster.wait_job(job_id, timeout_s=60)["status"], "FAILED")
        wait_until(lambda: not any(is_alive(p) for p in pids.values()),
                   "the ranks of a dead driver end", 60)

    def driver_pid(self):
        return next(p for p in self.cluster.own_pids()
                    if command_of(p).startswith("mobula run --num-nodes 2 --lease 600s"))

    def test_sigterm_of_the_driver_stops_the_ranks(self):
        with self.cluster.running(
            "run", "--num-nodes", "2", "--", "sh", "-c",
            "trap 'echo rank $RANK was told; exit 0' TERM; echo up; while :; do sleep 0.1; done",
        ) as driver:
            wait_until(lambda: driver.output().count("up\n") == 2, driver.output)
            driver.send_signal(signal.SIGTERM)
            self.assertEqual(driver.wait(60), 128 + signal.SIGTERM, driver.output())
            for rank in (0, 1):
                self.assertIn(f"rank {rank} was told", driver.output())

    def test_it_is_activity(self):
        """What takes idle clusters away asks this: a gang outside of a job is no idle cluster."""
        def driver():
            return self.cluster.get("/api/component_activities")["driver"]

        wait_until(lambda: driver()["is_active"] == "INACTIVE", driver)
        self.assertIsNone(driver()["reason"])
        began = time.time()
        with self.cluster.running("run", "--num-nodes", "2", "--", "sh", "-c",
                                  f"until test -e {self.cluster.dir}/active; do sleep 0.05; done") as gang:
            seen = wait_until(lambda: (d := driver())["is_active"] == "ACTIVE" and d, gang.output)
            self.assertEqual(seen["reason"], "Number of active drivers: 1")
            job = self.cluster.submit(f"mobula run --num-nodes 2 -- true; until test -e {self.cluster.dir}/active; "
                                      "do sleep 0.05; done")
            self.cluster.wait_job(job, ("RUNNING",))
            self.assertEqual(driver()["reason"], "Number of active drivers: 2")
            open(f"{self.cluster.dir}/active", "w").close()
            self.assertEqual(gang.wait(120), 0, gang.output())
        job = self.cluster.wait_job(job)
        self.assertEqual(job["status"], "SUCCEEDED")
        seen = wait_until(lambda: (d := driver())["is_active"] == "INACTIVE" and d, driver)
        self.assertGreaterEqual(seen["last_activity_at"], max(began, job["end_time"] / 1000))
        self.assertLessEqual(seen["last_activity_at"], seen["timestamp"])

    def test_more_nodes_than_there_are(self):
        began = time.monotonic()
        done = self.cluster.mobula("run", "--num-nodes", "3", "--wait-timeout", "2s", "--", "true")
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(done.returncode, 75, done.stdout)
        self.assertIn("no 3 nodes were free within 2 s: waiting for 1 more node with 1 mobula_slot: "
                      "2 of 3 such nodes are alive", done.stdout)


if __name__ == "__main__":
    unittest.main()
