"""Idle node: memory, threads, CPU, and the time `start` takes until the node is ALIVE; before it
the idle head, with its own node as both have it.
mobula and Ray alternate in one run; each node joins a head of its own kind."""
import sys
import time

from lib import Mobula, Ray, children_of, memory, spread, write_result

IDLE_S = 15.0


def measure(make, rounds):
    joins, samples, cpu = [], [], []
    cluster = make()
    try:
        cluster.start_head()
        time.sleep(3.0)
        head = memory(children_of(cluster.node_pids() if make is Mobula else cluster.pids))
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
    return {"head": head, "start_to_alive_s": spread(joins), "idle_cpu_percent": spread(cpu),
            **{k: spread([s[k] for s in samples])
               for k in ("processes", "threads", "rss_mib", "pss_mib", "uss_mib")}}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    write_result("node", {"mobula": measure(Mobula, rounds), "ray 2.60.0": measure(Ray, rounds)})


main()
