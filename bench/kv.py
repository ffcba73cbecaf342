"""Internal KV puts and gets per second, answered one by one: the same C client (bench_kv) on one core,
on another one mobula's head in memory, on SQLite (a put is answered after its group commit), or the
real gcs_server of Ray 2.60 (memory; it forgets everything when it ends). Others may share the
machine, so beside the rate stands what a call cost the server in CPU time, which depends less on
who else computes. The sides take turns, in another order each round, and wait until the one before is idle."""
import json
import os
import pathlib

from lib import MOBULA, Mobula, Ray, children_of, cpu_s, sh, spread, wait_quiet, write_result

BENCH_KV = MOBULA.parent.parent / "bench/bench_kv"
SECONDS, WINDOW, KEYS, ROUNDS = 2, 256, 10000, 6  # rounds: a multiple of the sides
VERBS = ("put", "get")  # gets find what puts have left


class Memory(Mobula):
    store = "memory"

    def start_head(self):
        sh(MOBULA, "start", "--head", "--temp-dir", self.dir, "--port", self.gcs,
           "--dashboard-port", self.http, "--store", self.store)


class Sqlite(Memory):
    store = "sqlite"


def server(cluster):
    """The process that has the KV."""
    name, pids = (("mobula-agent", cluster.node_pids()) if isinstance(cluster, Mobula)
                  else ("gcs_server", cluster.pids))
    return next(p for p in children_of(pids)
                if os.path.basename(os.readlink(f"/proc/{p}/exe")) == name)


def one(cluster, verb):
    """Calls per second, and microseconds of the server's CPU time per call."""
    pid = server(cluster)
    before = cpu_s(pid)
    done = sh("taskset", "-c", "0", BENCH_KV, f"127.0.0.1:{cluster.gcs}", SECONDS, WINDOW, KEYS, verb)
    seen = json.loads(done.strip().splitlines()[-1])
    return seen["per_s"], (cpu_s(pid) - before) / seen["answers"] * 1e6


def main():
    sides = {"mobula_memory": Memory(), "mobula_sqlite": Sqlite(), "ray": Ray()}
    runs = {(name, verb): [] for verb in VERBS for name in sides}
    busy = []
    try:
        for cluster in sides.values():
            cluster.start_head()
            sh("taskset", "-a", "-c", "-p", "1", server(cluster))
        for i in range(ROUNDS):
            names = list(sides) if i < ROUNDS // 2 else list(sides)[::-1]
            order = names[i % 3:] + names[:i % 3]
            for verb in VERBS:
                for name in order:
                    busy.append(wait_quiet())
                    runs[name, verb].append(one(sides[name], verb))
    finally:
        for cluster in sides.values():
            cluster.stop()
    write_result("kv", {
        "what": f"puts and gets of 100 bytes per second, {WINDOW} under way, {KEYS} keys, {SECONDS} s a "
                "run; client and server on one core each, the servers' stores: memory, SQLite with "
                "group commit",
        "others_before_percent_of_all_cores": spread(busy),
        **{f"{name}_{verb}s": spread([rate for rate, _ in values])
           for (name, verb), values in runs.items()},
        **{f"{name}_server_cpu_us_per_{verb}": spread([cpu for _, cpu in values])
           for (name, verb), values in runs.items()}})


if __name__ == "__main__":
    assert pathlib.Path(BENCH_KV).exists(), f"{BENCH_KV}: ninja -C build/release bench_kv"
    main()
