"""How long before a deadline the last checkpoint of a job is in its store, and what a link costs that becomes slower than it was
measured: bench/deadline.py [FACTOR...]

An embedded head, two nodes on this machine, a real S3 server (versitygw) behind a proxy that lets so many bytes a second through that
a checkpoint is UPLOAD_S on its way. Each run is `mobula train --deadline`, SECONDS from its submission. As soon as the ranks are told
to save and end the link gets FACTOR of its rate; 1 leaves it alone. `spare_s` is from the answer to the pointer's move to the
deadline, `lost` what was trained and is not in the store when the deadline is there."""

import json
import os
import pathlib
import re
import sys
import tempfile
import time

import lib

sys.path[:0] = [str(lib.ROOT / "tests/integration" / d) for d in ("e2e", "s3")]
os.environ["MOBULA_BIN"] = str(lib.MOBULA)
import s3  # noqa: E402
from cluster import ITERATION, Cluster, train_command, wait_until  # noqa: E402
from faults import FaultProxy  # noqa: E402

FACTORS = (1.0, 1.0, 0.75, 0.5)
UPLOAD_S, SECONDS, ENDLESS = 8, 50, 1_000_000
POINTER = "latest_checkpointed_iteration.txt"


def command(name, iterations, *more):
    """Of a model whose checkpoint is much larger than what is logged meanwhile, which goes over the same link."""
    return train_command(f"s3://{s3.BUCKET}/{name}", iterations, "--log-interval", "10", "--eval-interval", str(ENDLESS),
                         "--hidden-size", "256", "--save-interval", str(iterations), *more)


def checkpoint_bytes(cluster, bucket):
    cluster.submit(command("size", 10), submission_id="size")
    assert cluster.wait_job("size")["status"] == "SUCCEEDED", cluster.logs("size")
    manifest = json.loads((bucket / "size/iter_0000010/.mobula/manifest.json").read_text())
    return sum(f["size"] for f in manifest["files"])


def durable(bucket, name):
    path = bucket / name / POINTER
    return int(path.read_text()) if path.exists() else 0


def run(cluster, bucket, proxy, rate, number, factor):
    name = f"run-{number}"
    proxy.rate = rate
    deadline = time.time() + SECONDS
    cluster.submit(command(name, ENDLESS, "--deadline", f"@{deadline:.3f}"), submission_id=name)
    wait_until(lambda: "the ranks save and end" in cluster.logs(name), "the last save", SECONDS + 10)
    asked = deadline - time.time()
    proxy.rate = rate * factor
    wait_until(lambda: time.time() >= deadline, "the deadline", SECONDS + 10)
    in_time = durable(bucket, name)
    job = cluster.wait_job(name, timeout_s=20 * UPLOAD_S)
    moved = [r.done for r in proxy.seen("PUT", f"/{name}/{POINTER}$") if r.status == 200][-1]
    trained = max(int(i) for i, _, _ in ITERATION.findall(cluster.logs(name)))
    saved = max(map(int, re.findall(r"successfully saved checkpoint from iteration +(\d+)", cluster.logs(name))))
    return {"factor": factor, "asked_before_s": round(asked, 2),
            "spare_s": round(deadline - (moved + time.time() - time.monotonic()), 2),
            "saved": saved, "durable_at_the_deadline": in_time, "durable": durable(bucket, name),
            "lost": max(trained, saved) - in_time, "status": job["status"], "message": job["message"]}


def main():
    factors = [float(w) for w in sys.argv[1:]] or FACTORS
    with tempfile.TemporaryDirectory(prefix="mb-deadline-") as top, s3.server(top) as port, FaultProxy(port) as proxy, \
            Cluster(nodes=2, env=s3.environment(proxy.port)) as cluster:
        bucket = pathlib.Path(top, "s3", s3.BUCKET)
        size = checkpoint_bytes(cluster, bucket)
        runs = []
        for number, factor in enumerate(factors):
            runs.append(run(cluster, bucket, proxy, size / UPLOAD_S, number, factor))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            proxy.rate = 0
    lib.write_result("deadline", {"checkpoint_bytes": size, "upload_s": UPLOAD_S, "seconds": SECONDS, "runs": runs})


if __name__ == "__main__":
    main()
