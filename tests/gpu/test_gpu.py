"""Jobs with memory on a real GPU: whatever ends them, the GPU is given to the next one only when the
driver says that its memory is back, and to nobody while it is not.

Left out (exit 77) where there is no GPU. MOBULA_BIN, MOBULA_HOLD_GPU: the programs. MOBULA_GPU_RESULTS:
a file that gets the measured times. Memory is looked at by NVML calls of our own (nvml.py).
"""

import json
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import unittest

import nvml as driver_view
from cluster import TERMINAL, Cluster, is_alive, wait_until

HOLD = os.environ["MOBULA_HOLD_GPU"]
NVML = driver_view.find()
MIB = driver_view.MIB
SLACK_BYTES = 512 * MIB  # agent/gpu_watch.h
HELD_MIB = 8192
PLANTED_MIB = 2048
RESULTS = []


def record(case, **figures):
    RESULTS.append({"case": case, **figures})
    print("RESULT", json.dumps(RESULTS[-1]), file=sys.stderr, flush=True)


def last_line(text):
    return text.strip().splitlines()[-1]


def state_of(directory):
    """(pid of the supervisor, [pids of its children], proof that nothing is left or None)"""
    text = (directory / "state").read_text()
    proof = re.search(r"^left 0 (\S+)", text, re.M)
    return (int(re.search(r"^supervisor (\d+)", text, re.M)[1]),
            [int(p) for p in re.findall(r"^child \d+ running (\d+)", text, re.M)],
            proof and proof[1])


class GpuCluster(Cluster):
    """One node that offers its first GPU only, so that "the next gang" has no other to go to."""

    def __init__(self, **more):
        self.used_before = NVML.used_bytes()
        super().__init__(nodes=1, start_args=("--num-gpus", "1"), **more)

    def gang(self, name, *command, grace_s=5, run_args=()):
        command = ["mobula", "run", "--gpus-per-node", "1", "--stop-grace", f"{grace_s}s", *run_args,
                   "--", *command]
        return self.submit("exec " + shlex.join(map(str, command)), submission_id=name,
                           runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(grace_s + 5)}})

    def wait_held(self, job, mib=HELD_MIB, holders=1):
        """The job says that it has the memory, and the driver says so too."""
        def held():
            return (self.logs(job).count("holding ") >= holders and
                    NVML.used_bytes() >= self.used_before + mib * MIB)

        wait_until(held, lambda: f"{NVML.used_bytes() // MIB} MiB in use\n{self.job(job)}\n"
                                 f"{self.logs(job)[-2000:]}", 60)

    def attempt(self, job):
        """The directory of the job's gang on this node."""
        for path in (self.node("node-0")["dir"] / "gangs").glob("*/gang.json"):
            if json.loads(path.read_text()).get("job_id") == job:
                return path.parent
        return None

    def baseline_bytes(self):
        kept = json.loads((self.node("node-0")["dir"] / "gpus.json").read_text())[0]
        assert kept["has_baseline"], kept
        return kept["baseline_bytes"]

    def offered(self):
        """How many GPUs the next gang could have now; -1: nobody answers."""
        try:
            nodes = [n for n in self.status()["nodes"] if n["state"] == "ALIVE"]
        except (OSError, AssertionError):
            return -1
        return sum(n["resources_available"].get("mobula_gpu", 0) for n in nodes) if nodes else -1

    def kill_agent(self):
        """SIGKILL; the pid that was."""
        pid = self.node("node-0")["pid_agent"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_new_agent(self, old):
        wait_until(lambda: self.node("node-0")["pid_agent"] != old and self.offered() >= 0,
                   "the agent is back", 30)


class Ends(unittest.TestCase):
    """A gang, or a driver, has 8 GiB; something ends it."""

    def end(self, cluster, job, case, act, states, at_least_s=0.0):
        """act() ends the job: measures from there until the driver says the memory is back and until
        the GPU is offered again, and lets the next gang have it."""
        limit = cluster.baseline_bytes() + SLACK_BYTES
        self.assertEqual(cluster.offered(), 0)
        with driver_view.Watch(NVML) as watch:
            began = time.monotonic()
            act()
            wait_until(lambda: cluster.offered() == 1,
                       lambda: f"{NVML.used_bytes() // MIB} MiB in use, limit {limit // MIB}; "
                               f"{cluster.status()['nodes']}", 25)
            offered = time.monotonic()
            time.sleep(0.2)  # samples after it: the memory has to stay free
        fell = watch.fell_at(limit)
        self.assertIsNotNone(fell, f"{NVML.used_bytes() // MIB} MiB in use, limit {limit // MIB}")
        self.assertGreaterEqual(fell - began, at_least_s)
        # Two observers of one counter: ours may see the fall a few samples after the agent's.
        self.assertLess(fell - offered, 0.05, "it was offered before its memory was back")
        ended = cluster.wait_job(job, timeout_s=20)
        self.assertIn(ended["status"], states, cluster.logs(job)[-2000:])
        attempt = cluster.attempt(job)
        record(case, status=ended["status"], message=last_line(ended["message"]),
               peak_mib=max(u for _, u in watch.samples) // MIB,
               baseline_mib=cluster.baseline_bytes() // MIB, after_mib=watch.samples[-1][1] // MIB,
               to_baseline_ms=round(1000 * (fell - began)), to_offered_ms=round(1000 * (offered - began)),
               proof=state_of(attempt)[2] if attempt is not None else None)
        self.next_gang(cluster)

    def next_gang(self, cluster):
        job = cluster.gang("next", HOLD, HELD_MIB, "once")
        self.assertEqual(cluster.wait_job(job)["status"], "SUCCEEDED", cluster.logs(job))
        self.assertIn(NVML.uuid(0), cluster.logs(job))

    @staticmethod
    def stop(cluster, job):
        status, text = cluster.call("POST", f"/api/jobs/{job}/stop")
        assert status == 200, (status, text)

    def test_stop(self):
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB)
            cluster.wait_held("g")
            self.end(cluster, "g", "stop, ends by SIGTERM", lambda: self.stop(cluster, "g"), ["STOPPED"])

    def test_stop_of_one_that_ignores_sigterm(self):
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB, "ignore-term", grace_s=2)
            cluster.wait_held("g")
            self.end(cluster, "g", "stop, SIGTERM ignored, grace 2 s", lambda: self.stop(cluster, "g"),
                     ["STOPPED"], at_least_s=1.9)

    def test_stop_reaches_sessions_of_their_own(self):
        with GpuCluster() as cluster:
            half = HELD_MIB // 2
            cluster.gang("g", "sh", "-c", f"(setsid {HOLD} {half} ignore-term &); "
                                          f"setsid sh -c '{HOLD} {half} ignore-term; true' & wait", grace_s=2)
            cluster.wait_held("g", holders=2)
            self.end(cluster, "g", "stop, holders are double-forked and in sessions of their own, grace 2 s",
                     lambda: self.stop(cluster, "g"), ["STOPPED"], at_least_s=1.9)

    def test_an_orphan_does_not_outlive_its_rank(self):
        with GpuCluster() as cluster:
            go = f"{cluster.dir}/go"
            cluster.gang("g", "sh", "-c", f"(setsid {HOLD} {HELD_MIB} ignore-term &); "
                                          f"until test -e {go}; do sleep 0.02; done")
            cluster.wait_held("g")
            self.end(cluster, "g", "the rank exits 0, its orphan holds the memory",
                     lambda: open(go, "w").close(), ["SUCCEEDED"])

    def test_sigkill_of_the_rank(self):
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB, "ignore-term")
            cluster.wait_held("g")
            rank = state_of(cluster.attempt("g"))[1]
            self.assertEqual(len(rank), 1)
            self.end(cluster, "g", "SIGKILL of the rank", lambda: os.kill(rank[0], signal.SIGKILL), ["FAILED"])

    def test_sigkill_of_the_supervisor(self):
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB, "ignore-term")
            cluster.wait_held("g")
            supervisor = state_of(cluster.attempt("g"))[0]
            self.end(cluster, "g", "SIGKILL of the gang's supervisor",
                     lambda: os.kill(supervisor, signal.SIGKILL), ["FAILED"])

    def test_sigkill_of_agent_and_driver(self):
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB)
            cluster.wait_held("g")
            driver = state_of(cluster.node("node-0")["dir"] / "jobs" / "g")[1]
            self.assertEqual(len(driver), 1)

            def kill():
                cluster.kill_agent()
                os.kill(driver[0], signal.SIGKILL)

            self.end(cluster, "g", "SIGKILL of agent and driver", kill, ["FAILED"])

    def test_sigkill_of_the_agent_leaves_the_gang_its_gpu(self):
        """The new agent adopts: it must take the gang's memory neither for a leak nor for a baseline."""
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB)
            cluster.wait_held("g")
            baseline, rank = cluster.baseline_bytes(), state_of(cluster.attempt("g"))[1]
            cluster.wait_new_agent(cluster.kill_agent())
            self.assertEqual(cluster.offered(), 0)
            self.assertEqual(cluster.baseline_bytes(), baseline)
            self.assertTrue(is_alive(rank[0]))
            self.assertGreaterEqual(NVML.used_bytes(), cluster.used_before + HELD_MIB * MIB)
            self.end(cluster, "g", "SIGKILL of the agent, then stop", lambda: self.stop(cluster, "g"), ["STOPPED"])

    def test_stop_of_a_driver_that_has_the_gpu(self):
        with GpuCluster() as cluster:
            cluster.submit([HOLD, HELD_MIB], submission_id="d", entrypoint_num_gpus=1)
            cluster.wait_held("d")
            self.end(cluster, "d", "stop of a driver with entrypoint_num_gpus", lambda: self.stop(cluster, "d"),
                     ["STOPPED"])


class Devices(unittest.TestCase):
    def test_the_node_offers_what_the_driver_counts(self):
        """And each rank sees its own device, by the driver's number for it; one without sees none."""
        with Cluster(nodes=1) as cluster:
            self.assertEqual(cluster.total("mobula_gpu"), NVML.count)
            job = cluster.submit(["mobula", "run", "--gpus-per-node", NVML.count, "--", HOLD, 64, "once"])
            self.assertEqual(cluster.wait_job(job)["status"], "SUCCEEDED", cluster.logs(job))
            seen = re.findall(r"visible (\d+), CUDA_VISIBLE_DEVICES=(\S*), (GPU-\S+)", cluster.logs(job))
            self.assertEqual(sorted(seen), sorted(("1", str(i), NVML.uuid(i)) for i in range(NVML.count)))
            blind = cluster.submit(["mobula", "run", "--", HOLD, 64, "once"])
            self.assertEqual(cluster.wait_job(blind)["status"], "FAILED")
            self.assertIn("CUDA error 100", cluster.logs(blind))  # CUDA_ERROR_NO_DEVICE
            record("devices", gpus=NVML.count, seen=seen)

    def test_figures(self):
        """`status` says what the driver says, also of what a gang holds."""
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB)
            cluster.wait_held("g")
            used = NVML.used_bytes()

            def shown():
                gpus = cluster.status()["nodes"][0]["gpus"]
                return gpus[0] if gpus and abs(gpus[0]["memory_used_bytes"] - used) < 64 * MIB else None

            gpu = wait_until(shown, lambda: f"{used}: {cluster.status()['nodes']}", 30)
            self.assertEqual((gpu["name"], gpu["uuid"]), (NVML.name(), NVML.uuid(0)))
            self.assertGreater(gpu["memory_total_bytes"], used)
            for figure in ("power_watts", "power_limit_watts", "temperature_celsius", "sm_clock_mhz"):
                self.assertGreater(gpu[figure], 0, figure)
            self.assertLessEqual(gpu["utilization_percent"], 100)
            gib = gpu["memory_used_bytes"] / 2**30
            text = cluster.mobula("status", "--address", cluster.address).stdout
            self.assertRegex(text, rf"gpu 0 +{re.escape(NVML.name())} +\d+ %  +{gib:.1f}/[0-9.]+ GiB  \d+/\d+ W  \d+ C")
            record("figures", driver_used_mib=used // MIB, shown=gpu)


class Quarantine(unittest.TestCase):
    def test_memory_that_somebody_else_holds(self):
        """A process outside the gang has 2 GiB when the gang ends: nobody gets the GPU until it ends."""
        with GpuCluster() as cluster:
            cluster.gang("g", HOLD, HELD_MIB)
            cluster.wait_held("g")
            planted = subprocess.Popen([HOLD, str(PLANTED_MIB)], stdout=subprocess.PIPE, text=True)
            try:
                self.assertIn("holding", planted.stdout.readline())
                self.quarantine(cluster, planted)
            finally:
                planted.kill()
                planted.wait()
                planted.stdout.close()

    def quarantine(self, cluster, planted):
        baseline = cluster.baseline_bytes()
        stopped = time.monotonic()
        Ends.stop(cluster, "g")
        self.assertEqual(cluster.wait_job("g")["status"], "STOPPED")
        cluster.gang("waiter", HOLD, HELD_MIB, "once", run_args=["--wait-timeout", "120s"])
        shown = wait_until(lambda: cluster.status()["nodes"][0]["gpu_quarantine"], "the quarantine", 60)
        quarantined = time.monotonic()
        self.assertGreaterEqual(quarantined - stopped, 30)
        self.assertLess(quarantined - stopped, 35)
        self.assertEqual(cluster.total("mobula_gpu"), 0)
        match = re.fullmatch(r"GPU 0: (\d+) MiB still in use 30 s after its job's processes ended "
                             r"\(baseline (\d+) MiB\)", shown[0]["reason"])
        self.assertTrue(match, shown)
        self.assertEqual((len(shown), shown[0]["gpu"]), (1, 0))
        self.assertEqual(int(match[2]), baseline // MIB)
        self.assertGreaterEqual(int(match[1]), baseline // MIB + PLANTED_MIB)
        self.assertLess(int(match[1]), baseline // MIB + HELD_MIB, "the gang's own memory is gone")
        self.assertIn("quarantine: " + shown[0]["reason"],
                      cluster.mobula("status", "--address", cluster.address).stdout)
        self.assertNotIn("holding", cluster.logs("waiter"))
        self.assertNotIn(cluster.job("waiter")["status"], TERMINAL)

        # A restarted agent gives it to nobody either.
        cluster.wait_new_agent(cluster.kill_agent())
        self.assertEqual(cluster.offered(), 0)
        self.assertIsNone(planted.poll())
        ended = time.monotonic()
        planted.terminate()
        planted.wait(10)
        self.assertEqual(cluster.wait_job("waiter", timeout_s=30)["status"], "SUCCEEDED", cluster.logs("waiter"))
        released = time.monotonic()
        wait_until(lambda: cluster.offered() == 1, lambda: str(cluster.status()["nodes"]), 10)
        self.assertEqual([n["gpu_quarantine"] for n in cluster.status()["nodes"] if n["state"] == "ALIVE"], [[]])
        record("quarantine", reason=shown[0]["reason"], after_s=round(quarantined - stopped, 1),
               holder_ended_to_waiter_done_ms=round(1000 * (released - ended)))


class MemoryLimit(unittest.TestCase):
    def test_which_way_it_is_kept(self):
        """The kernel's where the memory controller can be had, else measured: noted, and it holds."""
        with Cluster(nodes=1) as cluster:
            limit = 256 * MIB
            env = {"env_vars": {"MOBULA_JOB_MEMORY_LIMIT": "256MiB", "RAY_JOB_STOP_WAIT_TIME_S": "1"}}
            cluster.submit("mobula run -- sleep 1000", submission_id="g", runtime_env=env)
            rank = wait_until(lambda: cluster.rank_pids("sleep").get(0), "the rank runs")
            group = next((line.split("::", 1)[1] for line in
                          pathlib.Path(f"/proc/{rank}/cgroup").read_text().splitlines() if "::" in line), None)
            kept = None
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                file = pathlib.Path(f"{root}{group}/memory.max")
                if group is not None and file.exists():
                    kept = file.read_text().strip()
            way = "kernel" if kept == str(limit) else "measured"
            Ends.stop(cluster, "g")
            self.assertEqual(cluster.wait_job("g")["status"], "STOPPED")
            greedy = cluster.submit("mobula run -- tail /dev/zero", submission_id="greedy", runtime_env=env)
            job = cluster.wait_job(greedy)
            self.assertEqual(job["status"], "FAILED")
            self.assertIn("killed: memory limit of 256 MiB", job["message"])
            record("memory limit", way=way, group=group, memory_max=kept, message=last_line(job["message"]))


def tearDownModule():
    figures = {"when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), "gpu": NVML.name(),
               "gpus": NVML.count, "driver": NVML.driver(), "kernel": platform.release(),
               "commit": os.environ.get("MOBULA_COMMIT", ""), "results": RESULTS}
    if os.environ.get("MOBULA_GPU_RESULTS"):
        pathlib.Path(os.environ["MOBULA_GPU_RESULTS"]).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if NVML is None:
        print("left out: no NVIDIA GPU here")
        sys.exit(77)
    unittest.main(verbosity=2)
