"""A log of 1 M lines, 100 MB: through the tail while the job writes it, again when it has ended, and
as GET logs; and what memory the head's processes hold before, at most, and 2 s afterwards. The
client reads frames from the socket and counts; it is the same on both sides. The job is `cat` of a
file made before: with `seq` as job the figure was seq's, which makes 240 to 350 MB/s of such lines
without anybody reading them."""
import base64
import os
import shlex
import socket
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from lib import Mobula, Ray, children_of, first_job, get_json, memory, post_json, spread, write_result

LINES, LINE_BYTES = 1_000_000, 100


def tail(address, job_id):
    """Payload bytes, seconds from the request to the first and to the last of them."""
    url = urllib.parse.urlsplit(address)
    began = time.monotonic()
    with socket.create_connection((url.hostname, url.port), timeout=120) as s:
        key = base64.b64encode(os.urandom(16)).decode()
        s.sendall(f"GET /api/jobs/{job_id}/logs/tail HTTP/1.1\r\nHost: {url.netloc}\r\n"
                  "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                  f"Sec-WebSocket-Key: {key}\r\n\r\n".encode())
        f = s.makefile("rb", buffering=1 << 20)
        while f.readline() not in (b"\r\n", b""):
            pass
        total, first, last = 0, None, None
        while True:
            kind, n = f.read(2)
            if n > 125:
                n = int.from_bytes(f.read(2 if n == 126 else 8), "big")
            f.read(n)
            if kind & 15 == 8:
                return total, first - began, last - began
            if kind & 15 == 1:
                last = time.monotonic()
                first = first or last
                total += n


def get_logs(address, job_id):
    began = time.monotonic()
    total = 0
    with urllib.request.urlopen(f"{address}/api/jobs/{job_id}/logs", timeout=120) as reply:
        while piece := reply.read(1 << 20):
            total += len(piece)
    assert total >= LINES * LINE_BYTES
    return total / 1e6 / (time.monotonic() - began)


def measure(cluster, rounds, lines):
    try:
        cluster.start_head()
        pids = cluster.node_pids() if isinstance(cluster, Mobula) else cluster.pids
        first_job(cluster.address)
        time.sleep(2)
        before = memory(children_of(pids))
        runs = []
        for _ in range(rounds):
            began = time.monotonic()
            job_id = post_json(f"{cluster.address}/api/jobs/",
                               {"entrypoint": f"cat {shlex.quote(lines)}"})["submission_id"]
            live = tail(cluster.address, job_id)
            live_s = time.monotonic() - began
            again = tail(cluster.address, job_id)
            for n in (live[0], again[0]):
                assert n >= LINES * LINE_BYTES, f"bytes are missing: {n}"
            status = get_json(f"{cluster.address}/api/jobs/{job_id}")["status"]
            runs.append({"while_written_submit_to_close_s": live_s,
                         "while_written_mb_per_s": live[0] / 1e6 / (live[2] - live[1]),
                         "ended_log_mb_per_s": again[0] / 1e6 / again[2],
                         "get_logs_mb_per_s": get_logs(cluster.address, job_id)})
            assert status == "SUCCEEDED", status
        time.sleep(2)
        after = memory(children_of(pids))
    finally:
        cluster.stop()
    result = {k: spread([r[k] for r in runs]) for k in runs[0]}
    result.update(pss_before_mib=before["pss_mib"], pss_after_mib=after["pss_mib"],
                  **{f"{k}_growth_mib": round(after[f"{k}_mib"] - before[f"{k}_mib"], 2)
                     for k in ("pss", "rss", "uss")})
    return result


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lines:
        lines.writelines(f"{i:0{LINE_BYTES - 1}d}\n" for i in range(1, LINES + 1))
        lines.flush()
        write_result("logs", {"mobula": measure(Mobula(), rounds, lines.name),
                              "ray 2.60.0": measure(Ray(), rounds, lines.name)})


main()
