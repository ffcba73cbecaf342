"""GPUs of a node: memory that stays in use, a driver that hangs or does not say, agents that share a host."""

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

from cluster import Cluster, wait_until

FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
struct memory { unsigned long long total, free, used; };
static int is_there(const char *name, unsigned long i)
{
    char path[4096];

    snprintf(path, sizeof(path), "%s/%s-%lu", getenv("FAKE_NVML_DIR"), name, i);
    return access(path, F_OK) == 0;
}
int nvmlInit_v2(void)
{
    while (is_there("hang-init", 0))
        usleep(20000);
    return 0;
}
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

    while (is_there("hang", (unsigned long)h - 1))
        usleep(20000);
    if (is_there("unsupported", (unsigned long)h - 1))
        return 3;
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
                       [{"gpu": 0, "reason": reason}], lambda: str(cluster.status()["nodes"]), 60)
            shown = cluster.mobula("status", "--address", cluster.address)
            self.assertIn("quarantine: " + reason, shown.stdout)
            # A restarted agent goes on with it.
            killed = cluster.node("node-0")["pid_agent"]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != killed and
                       cluster.is_up(), "the agent is back", 60)
            wait_until(lambda: cluster.is_up() and cluster.available("mobula_gpu") == 1,
                       "the new agent does not give it away either", 60)

            (lib / "used-0").write_text("450")
            wait_until(lambda: cluster.is_up() and cluster.available("mobula_gpu") == 2,
                       "GPU 0 is back", 60)
            wait_until(lambda: cluster.status()["nodes"][-1]["gpu_quarantine"] == [],
                       lambda: json.dumps(cluster.status()["nodes"]), 60)
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
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != killed and cluster.is_up(),
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

    def start(self, cluster, *argv):
        """Another node, on its own."""
        return cluster.mobula("start", "--address", cluster.gcs, "--temp-dir", cluster.temp, "--node-name", "other",
                              "--dashboard-agent-listen-port", "0", *argv, timeout=120)

    def test_a_driver_that_hangs_at_the_start(self):
        """A node whose number of GPUs nobody knows does not come up, and says why; without GPUs it does."""
        with tempfile.TemporaryDirectory(prefix="mb-nvml-") as lib:
            env = self.driver(pathlib.Path(lib))
            with Cluster(nodes=1, env=env) as cluster:
                hangs = pathlib.Path(lib) / "hang-init-0"
                hangs.touch()
                refused = self.start(cluster)
                self.assertEqual(refused.returncode, 75, refused.stdout)
                self.assertRegex(refused.stdout, r"counting the GPUs: the GPU driver has not answered for 2\d s; is it "
                                 r"healthy\? \(--num-gpus 0 starts the node without its GPUs\)")
                cluster.forget_node(cluster.node("other"))
                done = self.start(cluster, "--num-gpus", "0")
                self.assertEqual(done.returncode, 0, done.stdout)
                self.assertEqual(cluster.total("mobula_gpu"), 2)  # the head's
                log = next(cluster.node("other")["dir"].rglob("agent*.log")).read_text()
                self.assertRegex(log, r"the GPU driver has not answered for \d+ s; --num-gpus 0 needs none")
                hangs.unlink()

    def test_a_driver_that_hangs_at_a_restart(self):
        """What runs goes on; nobody gets a GPU before the driver answers; then all is as before."""
        with tempfile.TemporaryDirectory(prefix="mb-nvml-") as lib:
            self.restart(pathlib.Path(lib))

    def restart(self, lib):
        with Cluster(nodes=1, env={**self.driver(lib, gpus=3), "CUDA_VISIBLE_DEVICES": "2,1"}) as cluster:
            first = cluster.submit(f"mobula run --gpus-per-node 1 -- sh -c 'touch {lib}/runs; "
                                   f"until [ -e {lib}/end ]; do sleep 0.1; done; echo on $CUDA_VISIBLE_DEVICES'")
            wait_until((lib / "runs").exists, lambda: cluster.logs(first), 60)
            killed = cluster.node("node-0")["pid_agent"]
            (lib / "hang-init-0").touch()
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != killed and cluster.is_up(),
                       "the agent is back, whatever the driver does", 60)
            reasons = [{"gpu": i, "reason": f"GPU {word}: the driver has not answered for 30 s"}
                       for i, word in ((1, 1), (0, 2))]
            wait_until(lambda: cluster.status()["nodes"][-1]["gpu_quarantine"] == reasons[:1],
                       lambda: str(cluster.status()["nodes"]), 120)
            (lib / "end").touch()
            self.assertEqual(cluster.wait_job(first)["status"], "SUCCEEDED", cluster.logs(first))
            self.assertIn("on 2", cluster.logs(first))
            wait_until(lambda: cluster.status()["nodes"][-1]["gpu_quarantine"] == reasons[::-1],
                       lambda: str(cluster.status()["nodes"]), 60)
            wait_until(lambda: cluster.total("mobula_gpu") == 0, lambda: str(cluster.status()["nodes"]), 60)
            shown = cluster.mobula("status", "--address", cluster.address).stdout
            self.assertIn("quarantine: " + reasons[0]["reason"], shown)

            (lib / "hang-init-0").unlink()
            both = cluster.submit("mobula run --gpus-per-node 2 -- sh -c 'echo $LOCAL_RANK on $CUDA_VISIBLE_DEVICES'")
            self.assertEqual(cluster.wait_job(both, timeout_s=120)["status"], "SUCCEEDED", cluster.logs(both))
            self.assertEqual(cluster.status()["nodes"][-1]["gpu_quarantine"], [])
            self.assertEqual(sorted(re.findall(r"\d on (\d)", cluster.logs(both))), ["1", "2"], cluster.logs(both))
            wait_until(lambda: len(cluster.status()["nodes"][-1]["gpus"]) == 2, lambda: str(cluster.status()["nodes"]), 60)

    def test_memory_that_is_not_said(self):
        """Devices for which the driver has no figure, and those beyond its list, are not kept back."""
        with tempfile.TemporaryDirectory(prefix="mb-nvml-") as lib:
            env = self.driver(pathlib.Path(lib))
            (pathlib.Path(lib) / "unsupported-0").touch()
            with Cluster(nodes=1, env=env, start_args=("--num-gpus", "3")) as cluster:
                for _ in range(2):
                    job = cluster.submit("mobula run --gpus-per-node 3 -- sh -c 'echo on $CUDA_VISIBLE_DEVICES'")
                    self.assertEqual(cluster.wait_job(job)["status"], "SUCCEEDED", cluster.logs(job))
                    self.assertEqual(sorted(re.findall(r"on (\d)\b", cluster.logs(job))), list("012"), cluster.logs(job))
                wait_until(lambda: cluster.available("mobula_gpu") == 3, lambda: str(cluster.status()["nodes"]), 60)
                self.assertEqual(cluster.status()["nodes"][0]["gpu_quarantine"], [])
                log = next(cluster.node("node-0")["dir"].rglob("agent*.log")).read_text()
                self.assertEqual(log.count("GPU 0: the driver says neither its memory in use nor its processes"), 1, log)
                self.assertEqual(log.count("GPU 2: the driver has no such device (--num-gpus)"), 1, log)


if __name__ == "__main__":
    unittest.main()
