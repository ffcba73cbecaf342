"""Internal KV puts per second, acknowledged one by one: the same C client (bench_kv, on one core)
against mobula's head in memory, on SQLite (a put is answered after its group commit) and against the
real gcs_server of Ray 2.60 (memory; it forgets everything when it ends). Server and client share
the machine; the sides take turns."""
import json
import pathlib

from lib import MOBULA, Mobula, Ray, sh, spread, write_result

BENCH_KV = MOBULA.parent.parent / "bench/bench_kv"
SECONDS, WINDOW, KEYS, ROUNDS = 3, 256, 10000, 3


class Memory(Mobula):
    store = "memory"

    def start_head(self):
        sh(MOBULA, "start", "--head", "--temp-dir", self.dir, "--port", self.gcs,
           "--dashboard-port", self.http, "--store", self.store)


class Sqlite(Memory):
    store = "sqlite"


def one(cluster):
    done = sh("taskset", "-c", "0", BENCH_KV, f"127.0.0.1:{cluster.gcs}", SECONDS, WINDOW, KEYS)
    return json.loads(done.strip().splitlines()[-1])["puts_per_s"]


def main():
    sides = {"mobula_memory": Memory(), "mobula_sqlite": Sqlite(), "ray": Ray()}
    runs = {name: [] for name in sides}
    try:
        for cluster in sides.values():
            cluster.start_head()
        for _ in range(ROUNDS):
            for name, cluster in sides.items():
                runs[name].append(one(cluster))
    finally:
        for cluster in sides.values():
            cluster.stop()
    write_result("kv", {
        "what": f"puts of 100 bytes per second, {WINDOW} under way, {KEYS} keys, {SECONDS} s a run; "
                "client on one core, the servers' stores: memory, SQLite with group commit",
        **{name: spread(values) for name, values in runs.items()}})


if __name__ == "__main__":
    assert pathlib.Path(BENCH_KV).exists(), f"{BENCH_KV}: ninja -C build/release bench_kv"
    main()
