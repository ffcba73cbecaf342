"""Checkpoints into and out of a real S3 server, beside what others use for it: bench/s3.py [--scale S] [--rounds N] [ROW...]

Rows: up, small, down, tls, resume, limited, sealed, sparse, parts (all but the last two without arguments). The server is versitygw on the same
machine, so what a client does not use of it the server has. Rounds are rotated; files are read once before each run, so
that all find them in the page cache. CPU seconds are those that wait4 tells of the client; memory is the most that was resident, looked at
while it runs, since wait4 tells at least what this program has itself.
The ceiling is sendfile(2) of each file as one PUT over a connection of its own, from threads: plain HTTP, no checksums.
That of downloads (recv) is recv(2) into one buffer a thread and pwrite(2) from it, then fsync(2): the same, and no checksums.
--scale 0.125 makes everything an eighth as large.
"""

import argparse
import concurrent.futures
import hashlib
import hmac
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import lib

sys.path.insert(0, str(lib.ROOT / "tests/integration/s3"))
import faults  # noqa: E402
import servers  # noqa: E402
from faults import FaultProxy  # noqa: E402

MIB = 1 << 20
BIN = lib.CACHE / "bin"
AWS = lib.CACHE / "venv-aws/bin/aws"
LIMIT = 40 * MIB  # bytes a second of the slow link
FAR_S = 0.05      # before each request to a store that is far away goes on
PARTS = ((16, 16), (16, 8), (64, 16), (64, 8))  # MiB, requests at once; the first are the defaults
LATEST = "latest_checkpointed_iteration.txt"


class Bench:
    def __init__(self, top, scale, rounds):
        self.top, self.scale, self.rounds = pathlib.Path(top), scale, rounds
        self.server = servers.Server("versitygw", top)
        self.certificates = servers.Certificates(top)
        self.tls = servers.Server("versitygw", top, certificates=self.certificates)
        self.n = 0
        self.endpoint = None  # a proxy's, instead of the server's own
        self.process = None   # the client that runs
        self.more = {}        # in the clients' environment

    def close(self):
        self.server.stop()
        self.tls.stop()

    def files(self, name, count, size):
        """A checkpoint directory of iteration 1."""
        top = self.top / name
        data = top / "iter_0000001"
        data.mkdir(parents=True)
        for i in range(count):
            with open(data / f"file_{i:05d}.bin", "wb") as f:
                for _ in range(max(1, size // MIB)):
                    f.write(os.urandom(min(size, MIB)))
                os.fsync(f.fileno())  # as those of a trainer are
        (top / LATEST).write_text("1")
        return top

    def env(self, server):
        url = self.endpoint or server.url
        env = {**servers.clean_environment(), **server.environment(url)}
        env.update(AWS_ACCESS_KEY_ID=servers.ACCESS_KEY, AWS_SECRET_ACCESS_KEY=servers.SECRET_KEY,
                   AWS_REGION="us-east-1", AWS_ENDPOINT_URL=url, S3_ENDPOINT_URL=url,
                   MC_HOST_vg=url.replace("://", f"://{servers.ACCESS_KEY}:{servers.SECRET_KEY}@"),
                   MC_CONFIG_DIR=str(self.top / "mc"), RCLONE_CONFIG=str(self.top / "rclone.conf"),
                   RCLONE_CONFIG_VG_TYPE="s3", RCLONE_CONFIG_VG_PROVIDER="Other", RCLONE_CONFIG_VG_ENV_AUTH="true",
                   RCLONE_CONFIG_VG_ENDPOINT=url, RCLONE_CONFIG_VG_REGION="us-east-1",
                   RCLONE_CONFIG_VG_USE_PRESIGNED_REQUEST="true")  # the only way that 1.71 has for plain HTTP
        if server.certificates:
            env.update(SSL_CERT_FILE=server.certificates.ca, AWS_CA_BUNDLE=server.certificates.ca)
        return env | self.more

    def client(self, argv, server, status=0):
        """Wall and CPU seconds and MiB of one process."""
        with tempfile.TemporaryFile() as out:
            began = time.monotonic()
            process = subprocess.Popen([str(a) for a in argv], env=self.env(server), stdin=subprocess.DEVNULL,
                                       stdout=out, stderr=subprocess.STDOUT)
            self.process = process
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                resident = pool.submit(most_resident, process.pid)
                _, code, usage = os.wait4(process.pid, 0)
                wall = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(code)
            out.seek(0)
            if process.returncode != status:
                raise RuntimeError(f"{argv}: {process.returncode}\n{out.read().decode(errors='replace')[-2000:]}")
        return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "rss_mib": resident.result() / 1024}

    def place(self):
        self.n += 1
        return f"run-{self.n}"

    def forget(self, place, server):
        shutil.rmtree(server.root / servers.BUCKET / place, ignore_errors=True)

    def up(self, source, server, with_ceiling=True):
        """name -> function that sends the source to a new place."""
        data, bucket = source / "iter_0000001", servers.BUCKET
        found = {
            "mobula": lambda p: self.client([lib.MOBULA, "checkpoint", "push", source, f"s3://{bucket}/{p}"], server),
            "mc": lambda p: self.client([BIN / "mc", "--quiet", "cp", "-r", f"{data}/", f"vg/{bucket}/{p}/"], server),
            "s5cmd": lambda p: self.client([BIN / "s5cmd", "cp", f"{data}/*", f"s3://{bucket}/{p}/"], server),
            "aws": lambda p: self.client([AWS, "s3", "cp", "--quiet", "--recursive", data,
                                          f"s3://{bucket}/{p}/"], server),
            "rclone": lambda p: self.client([BIN / "rclone", "copy", "--transfers", "8", "--s3-chunk-size", "16M",
                                             data, f"vg:{bucket}/{p}/"], server)}
        if server.certificates:
            del found["aws"]  # its uploads over TLS end in errors at this server
        if with_ceiling:
            found["sendfile"] = lambda p: self.client([sys.executable, __file__, "--ceiling", server.port, data, p], server)
        return found

    def down(self, place, server):
        bucket = servers.BUCKET
        at = f"s3://{bucket}/{place}"
        return {
            "recv": lambda to: self.client([sys.executable, __file__, "--ceiling-down", server.port,
                                            server.root / bucket, place, to], server),
            "mobula": lambda to: self.client([lib.MOBULA, "checkpoint", "pull", at, to], server),
            "mobula --cached": lambda to: self.client([lib.MOBULA, "checkpoint", "pull", "--cached", at, to], server),
            "mobula verify": lambda to: self.client([lib.MOBULA, "checkpoint", "verify", at], server),
            "mc": lambda to: self.client([BIN / "mc", "--quiet", "cp", "-r", f"vg/{bucket}/{place}/", f"{to}/"], server),
            "s5cmd": lambda to: self.client([BIN / "s5cmd", "cp", f"{at}/*", f"{to}/"], server),
            "aws": lambda to: self.client([AWS, "s3", "cp", "--quiet", "--recursive", at, to], server),
            "rclone": lambda to: self.client([BIN / "rclone", "copy", "--transfers", "8", f"vg:{bucket}/{place}/", to],
                                             server)}

    def rotate(self, what, before, after, total_bytes, rounds=None):
        """Each of what, self.rounds times unless it is said, in another order each round."""
        runs = {name: [] for name in what}
        for i in range(rounds or self.rounds):
            names = list(what)
            for name in names[i % len(names):] + names[:i % len(names)]:
                arg = before()
                runs[name].append(what[name](arg))
                after(arg)
        return {name: summary(rs, total_bytes) for name, rs in runs.items()}

    def upload(self, source, server, what=None, rounds=None, **options):
        def warm():
            for path in source.rglob("*.bin"):
                with open(path, "rb", buffering=0) as f:
                    while f.read(MIB):
                        pass
            return self.place()
        total = sum(p.stat().st_size for p in source.rglob("*.bin"))
        return self.rotate(what or self.up(source, server, **options), warm, lambda p: self.forget(p, server), total, rounds)

    def parts(self, source, server):
        """name -> function that sends the source to a new place, with each of PARTS."""
        def push(mib, at_once):
            def run(place):
                self.more = {"BUCKET_STORAGE_PART_MIB": str(mib), "BUCKET_STORAGE_CONCURRENCY": str(at_once)}
                try:
                    return self.up(source, server)["mobula"](place)
                finally:
                    self.more = {}
            return run
        return {f"{mib} MiB, {at_once} at once": push(mib, at_once) for mib, at_once in PARTS}

    def warm_memory(self, total):
        """On a virtual machine the first touch of a page costs ten times the copy into it, and free pages go back to the
        host within seconds: all find pages for the page cache that were used just before."""
        path = self.top / "warm"
        with open(path, "wb", buffering=0) as f:
            for _ in range(total // MIB):
                f.write(bytes(MIB))
        path.unlink()

    # ---- the rows ----

    def row_up(self):
        return ratios(self.upload(self.big(), self.server))

    def row_small(self):
        return ratios(self.upload(self.files("small", max(50, int(2000 * self.scale)), 64 << 10), self.server))

    def row_tls(self):
        return ratios(self.upload(self.big(), self.tls, with_ceiling=False))

    def row_down(self):
        source = self.big()
        self.client([lib.MOBULA, "checkpoint", "push", source, f"s3://{servers.BUCKET}/down"], self.server)

        total = sum(p.stat().st_size for p in source.rglob("*.bin"))

        def make():
            to = self.top / self.place()
            to.mkdir()
            self.warm_memory(total)
            return to
        clients = {name: on_disk(run) for name, run in self.down("down", self.server).items()}
        return ratios(self.rotate(clients, make, shutil.rmtree, total))

    def row_resume(self):
        """Killed in the middle, then run again: bytes of bodies that came in all, for bytes of files."""
        source = self.files("resume", 1, int(1024 * MIB * self.scale) // (16 * MIB) * 16 * MIB)
        up = self.up(source, self.server)
        return {name: self.cut(source, up[name]) for name in ("mobula", "mc", "s5cmd")}

    def cut(self, source, run):
        total = sum(p.stat().st_size for p in source.rglob("*.bin"))
        with FaultProxy(self.server.port) as proxy, concurrent.futures.ThreadPoolExecutor() as pool:
            self.endpoint = f"http://127.0.0.1:{proxy.port}"
            proxy.rate = max(40 * MIB, total // 6)
            place = self.place()
            first = pool.submit(swallow, run, place)
            while sum(r.body_bytes for r in proxy.seen("PUT", "")) < total // 2 and not first.done():
                time.sleep(0.05)
            os.kill(self.process.pid, signal.SIGKILL)
            first.result()
            proxy.rate = 0
            run(place)
            sent = sum(r.body_bytes for r in proxy.seen("PUT", ""))
        self.endpoint = None
        self.forget(place, self.server)
        return {"sent_bytes": sent, "per_byte_of_the_file": round(sent / total, 3)}

    def row_parts(self):
        """Other sizes of parts, other numbers of requests at once: plain, over TLS, over the slow link, to a store that is far
        away, and what is sent twice when the sender is killed in the middle."""
        source = self.big()
        found = {"plain": self.upload(source, self.server, self.parts(source, self.server)),
                 "tls": self.upload(source, self.tls, self.parts(source, self.tls))}
        with FaultProxy(self.server.port) as proxy:
            self.endpoint = f"http://127.0.0.1:{proxy.port}"
            proxy.rate = LIMIT
            found["limited"] = self.upload(source, self.server, self.parts(source, self.server), rounds=1)
            proxy.rate, proxy.delay_s = 0, FAR_S
            found["far"] = self.upload(source, self.server, self.parts(source, self.server))
        self.endpoint = None
        found["cut"] = {name: self.cut(source, run) for name, run in self.parts(source, self.server).items()}
        return found

    def row_limited(self):
        """A link of LIMIT bytes a second: from the sealed directory to the pointer."""
        source = self.files("limited", 4, int(256 * MIB * self.scale))
        total = sum(p.stat().st_size for p in source.rglob("*.bin"))
        with FaultProxy(self.server.port) as proxy:
            proxy.rate, self.endpoint = LIMIT, f"http://127.0.0.1:{proxy.port}"
            wall = self.up(source, self.server)["mobula"]("limited")["wall_s"]
        self.endpoint = None
        return {"wall_s": round(wall, 2), "bytes_by_rate_s": round(total / LIMIT, 2),
                "times": round(wall / (total / LIMIT), 3)}

    def row_sealed(self):
        """A job's own checkpoint over that link: from the moment at which its trainer closes the tracker file to the answer
        to the pointer's move."""
        source, save = self.files("sealed", 4, int(256 * MIB * self.scale)), self.top / "save"
        total = sum(p.stat().st_size for p in source.rglob("*.bin"))
        script = (f"mkdir -p {save}/iter_0000001 && cp {source}/iter_0000001/* {save}/iter_0000001 && sync -f {save} && "
                  f"printf 1 > {save}/{LATEST}")
        cluster = lib.Mobula()
        with FaultProxy(self.server.port) as proxy:
            proxy.rate, self.endpoint = LIMIT, f"http://127.0.0.1:{proxy.port}"
            try:
                lib.sh(lib.MOBULA, "start", "--head", "--temp-dir", cluster.dir, "--port", cluster.gcs, "--dashboard-port",
                       cluster.http, env=self.env(self.server))
                lib.sh(lib.MOBULA, "run", "--address", f"127.0.0.1:{cluster.gcs}", "--save", save, "--checkpoint-url",
                       f"s3://{servers.BUCKET}/sealed", "--", "sh", "-c", script)
            finally:
                cluster.stop()
            moved = next(r.done for r in proxy.seen("PUT", f"/{LATEST}$") if r.status == 200)
        self.endpoint = None
        wall = moved + time.time() - time.monotonic() - (save / LATEST).stat().st_mtime
        return {"wall_s": round(wall, 2), "bytes_by_rate_s": round(total / LIMIT, 2),
                "times": round(wall / (total / LIMIT), 3)}

    def row_sparse(self):
        """One sparse file of 200 GiB: time, CPU and memory of what reads and sends it. Its parts end in a proxy, since the
        server would want the room."""
        top = self.files("sparse", 1, MIB)
        size = int(200 * self.scale) << 30
        os.truncate(top / "iter_0000001/file_00000.bin", size)
        whole = b'<CompleteMultipartUploadResult><ETag>"whole"</ETag></CompleteMultipartUploadResult>'
        with FaultProxy(self.server.port) as proxy:
            proxy.rule("PUT", "partNumber=", faults.error(200, headers=[("ETag", '"part"')]))
            proxy.rule("POST", "uploadId=", faults.error(200) | {"body": whole})
            self.endpoint = f"http://127.0.0.1:{proxy.port}"
            used = self.client([lib.MOBULA, "checkpoint", "push", top, f"s3://{servers.BUCKET}/sparse"], self.server)
            sent = sum(r.body_bytes for r in proxy.seen("PUT", "partNumber="))
        self.endpoint = None
        return {"bytes": size, "sent_bytes": sent, **used}

    def big(self):
        top = self.top / "big"
        return top if top.exists() else self.files("big", 8, int(256 * MIB * self.scale))


def most_resident(pid):
    """KiB, of a process until it ends, by its last looks: the kernel counts the most so far."""
    most = 0
    while True:
        try:
            found = re.search(r"^VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)
        except (FileNotFoundError, ProcessLookupError):
            return most
        if not found:  # it has ended
            return most
        most = int(found[1])
        time.sleep(0.02)


def summary(rs, total_bytes):
    """Of one client's runs."""
    cpu = sorted(r["cpu_s"] for r in rs)[len(rs) // 2]
    return {**{key: lib.spread([r[key] for r in rs]) for key in ("wall_s", "on_disk_s", "cpu_s") if key in rs[0]},
            "cpu_s_per_gib": round(cpu / (total_bytes / (1 << 30)), 3),
            "rss_mib": round(max(r["rss_mib"] for r in rs), 1)}


def on_disk(run):
    """Of a download: the time until its files are on the disk, too. mobula's are when it ends, others leave that to the
    kernel."""
    def timed(to):
        result, began = run(to), time.monotonic()
        subprocess.run(["sync", "-f", to], check=True)
        return result | {"on_disk_s": result["wall_s"] + time.monotonic() - began}
    return timed


def swallow(run, place):
    """Of a client that is killed."""
    try:
        run(place)
    except RuntimeError:
        pass


def ratios(runs):
    """How many times as long and as much CPU the others need."""
    ours = runs["mobula"]
    for name, r in runs.items():
        if name != "mobula":
            r["wall_times_mobula"] = round(r["wall_s"]["median"] / ours["wall_s"]["median"], 2)
            if "on_disk_s" in r:
                r["on_disk_times_mobula"] = round(r["on_disk_s"]["median"] / ours["on_disk_s"]["median"], 2)
            r["cpu_times_mobula"] = round(r["cpu_s"]["median"] / ours["cpu_s"]["median"], 2)
    return runs


def head_of(method, port, path, more=""):
    """The head of a request without a checksum of its body, signed."""
    def mac(key, text):
        return hmac.new(key, text.encode(), hashlib.sha256).digest()
    host, date = f"127.0.0.1:{port}", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    headers = f"host:{host}\nx-amz-content-sha256:UNSIGNED-PAYLOAD\nx-amz-date:{date}\n"
    names = "host;x-amz-content-sha256;x-amz-date"
    request = f"{method}\n{path}\n\n{headers}\n{names}\nUNSIGNED-PAYLOAD"
    scope = f"{date[:8]}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = mac(mac(mac(mac(f"AWS4{servers.SECRET_KEY}".encode(), date[:8]), "us-east-1"), "s3"), "aws4_request")
    return (f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}x-amz-content-sha256: UNSIGNED-PAYLOAD\r\n"
            f"x-amz-date: {date}\r\nAuthorization: AWS4-HMAC-SHA256 Credential={servers.ACCESS_KEY}/{scope}, "
            f"SignedHeaders={names}, Signature={mac(key, text).hex()}\r\n\r\n").encode()


def answer_head(s):
    """The head of an answer that is 200, and what came of its body."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        data = s.recv(65536)
        if not data:
            raise SystemExit(f"the answer ends early: {answer!r}")
        answer += data
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer.decode(errors="replace"))
    return answer.split(b"\r\n\r\n", 1)


def ceiling(port, data, place):
    """PUTs with sendfile."""
    def work(files):
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for file in files:
                size = file.stat().st_size
                s.sendall(head_of("PUT", port, f"/{servers.BUCKET}/{place}/{file.name}", f"Content-Length: {size}\r\n"))
                with open(file, "rb") as f:
                    at = 0
                    while at < size:
                        at += os.sendfile(s.fileno(), f.fileno(), at, size - at)
                answer_head(s)
    in_threads(work, sorted(pathlib.Path(data).iterdir()))


def ceiling_down(port, bucket, place, to):
    """GETs of the files of the checkpoint that lies in the server's own directory."""
    def work(files):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)  # as mobula's
            s.connect(("127.0.0.1", port))
            buffer = memoryview(bytearray(256 << 10))
            for file in files:
                left = file.stat().st_size
                s.sendall(head_of("GET", port, f"/{servers.BUCKET}/{file.relative_to(bucket)}"))
                body = answer_head(s)[1]
                with open(pathlib.Path(to, file.name), "wb", buffering=0) as f:
                    f.write(body)
                    left -= len(body)
                    while left > 0:
                        n = s.recv_into(buffer[:min(left, len(buffer))])
                        if n == 0:
                            raise SystemExit("the body ends early")
                        f.write(buffer[:n])
                        left -= n
                    os.fsync(f.fileno())
    in_threads(work, sorted(pathlib.Path(bucket, place).rglob("*.bin")))


def in_threads(work, files):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [files[i::8] for i in range(8)]))


def main():
    if sys.argv[1:2] == ["--ceiling"]:
        ceiling(int(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    if sys.argv[1:2] == ["--ceiling-down"]:
        ceiling_down(int(sys.argv[2]), *sys.argv[3:6])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("rows", nargs="*")
    args = parser.parse_args()
    rows = args.rows or ["up", "small", "down", "tls", "resume", "limited", "sealed"]
    with tempfile.TemporaryDirectory(prefix="mb-s3-") as top:
        bench = Bench(top, args.scale, args.rounds)
        try:
            result = {}
            for row in rows:
                result[row] = getattr(bench, f"row_{row}")()
                print(row, result[row], file=sys.stderr, flush=True)
        finally:
            bench.close()
    lib.write_result("s3", {"scale": args.scale, "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()
