"""How soon a failure is known. Dead worker: SIGKILL of one process of a gang of two, until the line
in the output of the program that owns the gang (`mobula run`; for Ray a driver with two actors and
ray.get). Hung node: SIGSTOP of a node's daemon, until the head's table of nodes says DEAD: of a node
that has been in the cluster for a while, and of one that has just joined."""
import os
import signal
import subprocess
import sys
import tempfile
import time

from ray._raylet import GcsClient

from lib import MOBULA, RAY_PYTHON, Mobula, Ray, children_of, spread, write_result

DEAD_STATE = 1  # Ray's GcsNodeInfo.DEAD
SETTLED_S = 10.0
OURS = [MOBULA, "run", "--num-nodes", "1", "--ranks-per-node", "2", "--", "sh", "-c",
        "echo pid $$; exec sleep 1000"]
RAYS = """
import os, ray, sys, time
ray.init(log_to_driver=False)
@ray.remote(num_cpus=0.1)
class Worker:
    def pid(self):
        return os.getpid()
    def work(self):
        time.sleep(1000)
workers = [Worker.remote() for _ in range(2)]
for w in workers:
    print("pid", ray.get(w.pid.remote()), flush=True)
try:
    ray.get([w.work.remote() for w in workers])
except ray.exceptions.RayActorError as error:
    print("lost", type(error).__name__, flush=True)
"""


def dead_worker(argv, env, word):
    """Seconds from the SIGKILL to the first line that has the word."""
    with subprocess.Popen([str(a) for a in argv], env=env, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as driver:
        pids, killed = [], None
        try:
            for line in driver.stdout:
                if "pid " in line and not killed:
                    pids.append(int(line.split("pid ")[1]))
                    if len(pids) == 2:
                        time.sleep(0.5)  # both are at work
                        killed = time.monotonic()
                        os.kill(pids[1], signal.SIGKILL)
                elif killed and word in line:
                    return time.monotonic() - killed
            raise AssertionError("the driver ended without the line")
        finally:
            driver.terminate()
            driver.wait(60)


def hung_node(cluster, name, settled_s):
    """Seconds from the SIGSTOP of the process of that name to DEAD."""
    _, pids = cluster.start_node()
    time.sleep(settled_s)
    gcs = GcsClient(address=f"127.0.0.1:{cluster.gcs}")

    def dead():
        return sum(n.state == DEAD_STATE for n in gcs.get_all_node_info(timeout=30).values())

    before = dead()
    daemon = next(p for p in children_of(pids)
                  if os.path.basename(os.readlink(f"/proc/{p}/exe")) == name)
    began = time.monotonic()
    os.kill(daemon, signal.SIGSTOP)
    try:
        while dead() == before:
            assert time.monotonic() - began < 150, "the hung node stays ALIVE"
            time.sleep(0.02)
        return time.monotonic() - began
    finally:
        os.kill(daemon, signal.SIGCONT)


def measure(cluster, env, argv, word, daemon, kills, hangs):
    try:
        cluster.start_head()
        address = f"127.0.0.1:{cluster.gcs}"
        env = dict(env, RAY_ADDRESS=address)
        return {"dead_worker_s": spread([dead_worker(argv, env, word) for _ in range(kills)]),
                "hung_node_s": spread([hung_node(cluster, daemon, SETTLED_S)
                                       for _ in range(hangs)]),
                "hung_new_node_s": spread([hung_node(cluster, daemon, 0) for _ in range(hangs)])}
    finally:
        cluster.stop()


def main():
    kills, hangs = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (3, 2)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(RAYS)
        script.flush()
        ray = Ray()
        write_result("failures", {
            "mobula": measure(Mobula(), os.environ, OURS, "killed by signal 9", "mobula-agent",
                              kills, hangs),
            "ray 2.60.0": measure(ray, ray.env, [RAY_PYTHON, script.name], "lost ", "raylet",
                                  kills, 1 if hangs else 0)})


main()
