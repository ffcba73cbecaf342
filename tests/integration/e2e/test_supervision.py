"""What a job leaves behind: zombies, memory on a GPU, limits it was given."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.request

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
                links = pathlib.Path(f"/proc/{pid}/fd").iterdir()
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
                       lambda: f"left: {set(cluster.own_pids()) - before}", 10)
            wait_until(lambda: not zombies_below(inits), lambda: f"zombies: {zombies_below(inits)}", 5)

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


class Exits(unittest.TestCase):
    def test_exit_code_and_signal_of_driver_and_every_rank_are_kept(self):
        """ray#48106, ray#38142: also after the job, and after the head was killed."""
        with Cluster(nodes=1) as cluster:
            cluster.submit("mobula run --ranks-per-node 2 -- sh -c "
                           "'if [ $RANK = 1 ]; then exit 7; fi; kill -SEGV $$'".replace(
                               "kill", f"until test -e {cluster.dir}/go; do sleep 0.02; done; kill")
                           .replace("exit 7", f"trap \"\" TERM; until test -e {cluster.dir}/go; do "
                                              "sleep 0.02; done; exit 7"), submission_id="both")
            wait_until(lambda: len(cluster.rank_pids("sh")) >= 2, "two ranks run")
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
                           GpuMemory.answers(cluster), "the head is back", 30)


class Stops(unittest.TestCase):
    def test_the_command_waits_while_the_head_restarts(self):
        """The stop goes on without the head's agent, so whoever waits for it is told its end."""
        with Cluster(nodes=1) as cluster:
            env = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "5"}}
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
                self.assertEqual(stop.wait(40), 0, stop.output())
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


FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n)
{
    const char *text = getenv("FAKE_NVML_COUNT");
    *n = text != NULL ? (unsigned)atoi(text) : 2;
    return 0;
}
int nvmlDeviceGetUUID(void *h, char *uuid, unsigned n)
{
    snprintf(uuid, n, "GPU-%lu00d", (unsigned long)h - 1);
    return 0;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *milliwatts)
{
    *milliwatts = 100000 * (unsigned)(unsigned long)h;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetName(void *h, char *name, unsigned n)
{
    (void)h;
    snprintf(name, n, "Fake GPU");
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, struct memory *m)
{
    char path[4096];
    unsigned long long mib = 0;
    FILE *f;

    snprintf(path, sizeof(path), "%s/hang-%lu", getenv("FAKE_NVML_DIR"), (unsigned long)h - 1);
    while (access(path, F_OK) == 0)
        usleep(20000);
    snprintf(path, sizeof(path), "%s/used-%lu", getenv("FAKE_NVML_DIR"), (unsigned long)h - 1);
    f = fopen(path, "r");
    if (f != NULL) {
        if (fscanf(f, "%llu", &mib) != 1)
            mib = 0;
        fclose(f);
    }
    m->total = 80ull << 30;
    m->used = mib << 20;
    m->free = m->total - m->used;
    return 0;
}
"""


class GpuMemory(unittest.TestCase):
    """A stand-in for libnvidia-ml whose memory in use is read from files: the fault that a real
    driver shows when a process of a job cannot die."""

    def test_memory_that_stays_in_use_is_a_quarantine(self):
        """ray#42861: GPU memory is looked at before the next job; what is not free is not given."""
        with tempfile.TemporaryDirectory(prefix="mb-nvml-") as lib:
            self.quarantine(pathlib.Path(lib))

    def test_a_driver_that_hangs_is_a_quarantine(self):
        """A call that does not return costs its own GPU: not the other, not a start, not the end."""
        with tempfile.TemporaryDirectory(prefix="mb-nvml-") as lib:
            self.hang(pathlib.Path(lib))

    def driver(self, lib, gpus=2):
        """The environment that has it."""
        source = lib / "nvml.c"
        source.write_text(FAKE_NVML)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(lib / "libnvidia-ml.so.1"), str(source)],
                       check=True)
        for gpu in range(gpus):
            (lib / f"used-{gpu}").write_text("400")
        return {"LD_LIBRARY_PATH": str(lib), "FAKE_NVML_DIR": str(lib), "FAKE_NVML_COUNT": str(gpus)}

    def test_two_agents_share_a_host(self):
        """Each has the GPUs that its CUDA_VISIBLE_DEVICES names, and no other."""
        with tempfile.TemporaryDirectory(prefix="mb-nvml-") as lib:
            self.share(pathlib.Path(lib))

    def share(self, lib):
        env = self.driver(lib, gpus=4)
        with Cluster(nodes=1, env={**env, "CUDA_VISIBLE_DEVICES": "0,1"}) as cluster:
            cluster.env["CUDA_VISIBLE_DEVICES"] = "GPU-300d, 2"
            cluster.start_node(1)
            cluster.env["CUDA_VISIBLE_DEVICES"] = "4"
            refused = cluster.mobula("start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--node-name", "none")
            self.assertNotEqual(refused.returncode, 0)
            self.assertIn("CUDA_VISIBLE_DEVICES names GPU 4, this machine has 4", refused.stdout)
            cluster.env["CUDA_VISIBLE_DEVICES"] = "2"
            refused = cluster.mobula("start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--node-name", "none",
                                     "--num-gpus", "2")
            self.assertNotEqual(refused.returncode, 0)
            self.assertIn('--num-gpus 2: CUDA_VISIBLE_DEVICES leaves 1 ("2")', refused.stdout)
            del cluster.env["CUDA_VISIBLE_DEVICES"]
            wait_until(lambda: cluster.total("mobula_gpu") == 4, lambda: str(cluster.status()["nodes"]))

            # One gang over both: a rank a GPU, and every GPU once.
            job = cluster.submit("mobula run --num-nodes 2 --gpus-per-node 2 -- "
                                 f"sh -c 'echo node $NODE_RANK has $CUDA_VISIBLE_DEVICES; echo 30000 > {lib}/used-3'")
            self.assertEqual(cluster.wait_job(job)["status"], "SUCCEEDED", cluster.logs(job))
            seen = re.findall(r"node (\d) has (\d)\b", cluster.logs(job))
            self.assertEqual(sorted(gpu for _, gpu in seen), list("0123"), cluster.logs(job))
            by_node = sorted(sorted(gpu for node, gpu in seen if node == n) for n in "01")
            self.assertEqual(by_node, [["0", "1"], ["2", "3"]])

            # What was forgotten on a GPU is looked for where it is: the second agent's first.
            def free():
                return {n["node_name"]: n["resources_available"].get("mobula_gpu", 0) for n in cluster.status()["nodes"]
                        if n["state"] == "ALIVE"}

            wait_until(lambda: free() == {"node-0": 2, "node-1": 1}, lambda: str(free()), 60)

            # Figures: by the head's status, in words, and by each node's own port.
            def shown():
                return {n["node_name"]: [(g["gpu"], g["device"], g["uuid"], g["power_watts"], g["memory_used_bytes"] >> 20)
                                         for g in n["gpus"]] for n in cluster.status()["nodes"]}

            wanted = {"node-0": [(0, "0", "GPU-000d", 100, 400), (1, "1", "GPU-100d", 200, 400)],
                      "node-1": [(0, "3", "GPU-300d", 400, 30000), (1, "2", "GPU-200d", 300, 400)]}
            wait_until(lambda: shown() == wanted, lambda: str(shown()), 60)
            words = cluster.mobula("status", "--address", cluster.address).stdout
            self.assertRegex(words, r"gpu 3 +Fake GPU +0 %  29.3/80.0 GiB  400/0 W  0 C")
            port = cluster.node("node-1")["http_port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
                text = reply.read().decode()
            self.assertIn('mobula_gpu_power_watts{gpu="0",device="3",uuid="GPU-300d"} 400', text)
            (lib / "used-3").write_text("400")
            wait_until(lambda: free() == {"node-0": 2, "node-1": 2}, lambda: str(free()), 60)

    def quarantine(self, lib):
        env = self.driver(lib)
        with Cluster(nodes=1, env=env) as cluster:
            self.assertEqual(cluster.total("mobula_gpu"), 2)
            first = cluster.submit(
                f"mobula run --gpus-per-node 1 -- sh -c 'echo 30000 > {lib}/used-0; echo on $CUDA_VISIBLE_DEVICES'")
            self.assertEqual(cluster.wait_job(first)["status"], "SUCCEEDED", cluster.logs(first))
            self.assertIn("on 0", cluster.logs(first))
            ended = time.monotonic()
            self.assertEqual(cluster.available("mobula_gpu"), 1, "it is not given away meanwhile")
            second = cluster.submit("mobula run --gpus-per-node 1 -- sh -c 'echo on $CUDA_VISIBLE_DEVICES'")
            self.assertEqual(cluster.wait_job(second)["status"], "SUCCEEDED", cluster.logs(second))
            self.assertIn("on 1", cluster.logs(second))

            wait_until(lambda: cluster.total("mobula_gpu") == 1, "GPU 0 leaves the total", 60)
            self.assertGreaterEqual(time.monotonic() - ended, 29)
            reason = ("GPU 0: 30000 MiB still in use 30 s after its job's processes ended "
                      "(baseline 400 MiB)")
            wait_until(lambda: cluster.status()["nodes"][0]["gpu_quarantine"] ==
                       [{"gpu": 0, "reason": reason}], lambda: str(cluster.status()["nodes"]), 5)
            shown = cluster.mobula("status", "--address", cluster.address)
            self.assertIn("quarantine: " + reason, shown.stdout)
            # A restarted agent goes on with it.
            killed = cluster.node("node-0")["pid_agent"]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != killed and
                       self.answers(cluster), "the agent is back", 30)
            wait_until(lambda: self.answers(cluster) and cluster.available("mobula_gpu") == 1,
                       "the new agent does not give it away either", 10)

            (lib / "used-0").write_text("450")
            wait_until(lambda: self.answers(cluster) and cluster.available("mobula_gpu") == 2,
                       "GPU 0 is back", 20)
            wait_until(lambda: cluster.status()["nodes"][-1]["gpu_quarantine"] == [],
                       lambda: json.dumps(cluster.status()["nodes"]), 5)
            third = cluster.submit("mobula run --gpus-per-node 2 -- sh -c 'echo on $CUDA_VISIBLE_DEVICES by $CUDA_DEVICE_ORDER'")
            self.assertEqual(cluster.wait_job(third)["status"], "SUCCEEDED", cluster.logs(third))
            self.assertRegex(cluster.logs(third), "on [01] by PCI_BUS_ID")  # NVML's numbers, not CUDA's own

    def hang(self, lib):
        with Cluster(nodes=1, env=self.driver(lib)) as cluster:
            hangs = f"mobula run --gpus-per-node %d -- sh -c 'touch {lib}/hang-0; echo on $CUDA_VISIBLE_DEVICES'"
            first = cluster.submit(hangs % 1)
            self.assertEqual(cluster.wait_job(first)["status"], "SUCCEEDED", cluster.logs(first))
            self.assertIn("on 0", cluster.logs(first))
            killed = cluster.node("node-0")["pid_agent"]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != killed and self.answers(cluster),
                       "the agent is back, whatever the driver does", 60)
            second = cluster.submit("mobula run --gpus-per-node 1 -- sh -c 'echo on $CUDA_VISIBLE_DEVICES'")
            self.assertEqual(cluster.wait_job(second)["status"], "SUCCEEDED", cluster.logs(second))
            self.assertIn("on 1", cluster.logs(second))

            reason = "GPU 0: the driver has not answered for 30 s"
            wait_until(lambda: cluster.status()["nodes"][-1]["gpu_quarantine"] == [{"gpu": 0, "reason": reason}],
                       lambda: str(cluster.status()["nodes"]), 120)
            wait_until(lambda: (cluster.total("mobula_gpu"), cluster.available("mobula_gpu")) == (1, 1),
                       lambda: f"GPU 1 is there for others: {cluster.status()['nodes']}", 60)
            self.assertIn("quarantine: " + reason, cluster.mobula("status", "--address", cluster.address).stdout)

            third = cluster.submit(hangs % 2)
            (lib / "hang-0").unlink()
            self.assertEqual(cluster.wait_job(third, timeout_s=120)["status"], "SUCCEEDED", cluster.logs(third))
            self.assertEqual(cluster.status()["nodes"][-1]["gpu_quarantine"], [])
            wait_until(lambda: cluster.available("mobula_gpu") == 1, lambda: str(cluster.status()["nodes"]), 60)
            began = time.monotonic()
            self.assertEqual(cluster.mobula("stop", "--temp-dir", cluster.temp, timeout=120).returncode, 0)
            self.assertLess(time.monotonic() - began, 30, "the end waits for no driver")

    @staticmethod
    def answers(cluster):
        try:
            return any(n["state"] == "ALIVE" for n in cluster.status()["nodes"])
        except OSError:
            return False


if __name__ == "__main__":
    unittest.main()
