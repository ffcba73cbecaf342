"""Idle node: memory, threads, CPU, and the time `start` takes until the node is ALIVE; before it
the idle head, with its own node as both have it.
mobula and Ray in one run; each node joins a head of its own kind, at last mobula's a Ray head. A
machine that was idle for a minute (start_after_idle_s) is slower than one that just worked
(start_to_alive_s: further nodes, one at once after the other)."""
import sys
import time

from lib import (Mobula, MobulaAtRay, Ray, children_of, idle_cpu_percent, memory, spread,
                 write_result)

SETTLE_S, IDLE_S, MORE_NODES = 5.0, 60.0, 3


def measure(make, rounds):
    joins, cold, samples, cpu = [], [], [], []
    cluster = make()
    try:
        cluster.start_head()
        time.sleep(SETTLE_S)
        tree = children_of(cluster.node_pids() if make is Mobula else cluster.pids)
        head = {**memory(tree), "idle_cpu_percent": idle_cpu_percent(tree, IDLE_S)}
        for _ in range(rounds):
            took, pids = cluster.start_node()
            cold.append(took)
            time.sleep(SETTLE_S)  # start-up work settles; what is measured is the idle node
            tree = children_of(pids)
            cpu.append(idle_cpu_percent(tree, IDLE_S))
            samples.append(memory(children_of(pids)))
        joins = [cluster.start_node()[0] for _ in range(1 + MORE_NODES)][1:]
    finally:
        cluster.stop()
    return {"head": head, "start_to_alive_s": spread(joins),
            "start_after_idle_s": spread(cold), "idle_cpu_percent": spread(cpu),
            **{k: spread([s[k] for s in samples])
               for k in ("processes", "threads", "rss_mib", "pss_mib", "uss_mib")}}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    write_result("node", {"mobula": measure(Mobula, rounds), "ray 2.60.0": measure(Ray, rounds),
                          "mobula node, ray head": measure(MobulaAtRay, 1)})


main()
