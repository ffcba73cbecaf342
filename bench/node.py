"""Idle node: memory, threads, CPU, and the time `start` takes until the node is ALIVE.
mobula and Ray alternate in one run; each node joins a head of its own kind."""
import sys
import time

from lib import Mobula, Ray, children_of, memory, spread, write_result

IDLE_S = 20.0


def measure(make, rounds):
    joins, samples, cpu = [], [], []
    cluster = make()
    try:
        cluster.start_head()
        for _ in range(rounds):
            took, pids = cluster.start_node()
            joins.append(took)
            time.sleep(3.0)  # start-up work settles; what is measured is the idle node
            tree = children_of(pids)
            before = memory(tree)
            time.sleep(IDLE_S)
            after = memory(tree)
            cpu.append(100 * (after["cpu_s"] - before["cpu_s"]) / IDLE_S)
            samples.append(after)
    finally:
        cluster.stop()
    return {"start_to_alive_s": spread(joins), "idle_cpu_percent": spread(cpu),
            **{k: spread([s[k] for s in samples])
               for k in ("processes", "threads", "rss_mib", "pss_mib", "uss_mib")}}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    write_result("node", {"mobula": measure(Mobula, rounds), "ray 2.60.0": measure(Ray, rounds)})


main()
