"""A head that says far too much: test_bombs.py BIN_DIR

Between our node and a real Ray head stands the server of test_odd_head.py; for a while what comes
back is as large as Ray's limit and larger, is many times as large once it is read, or never ends, and
the same is asked of the node's own port. The agent's memory stays below the bound of
docs/ray-compat.md, its gang goes on and loses no line, and it is a node of the head's again when that
is honest. The node takes the dashboard's jobs: their packages, as large as Ray's may be, are what it
takes all the same.
"""

import concurrent.futures
import json
import pathlib
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
import grpc  # noqa: E402
from test_job_agent import Head, job_agent  # noqa: E402
from test_odd_head import OPTIONS, SILENT, Between, ends, gang, listen  # noqa: E402

BIN = sys.argv[1]
MIB = 1 << 20
# Resident, of the agent: 256 for a node with its connection to the head; one that takes jobs has another, on which 32 MiB may be
# under way at the same time, twice while they are put together.
BOUND_MIB = 256 + 2 * 32
PACKAGE_MIB = 490  # Ray's own limit is 500
# A sanitizer keeps what was freed: of such a build it is asked only that it lives.
IS_SANITIZED = any(word in pathlib.Path(BIN, "mobula-agent").read_bytes()
                   for word in (b"__asan_init", b"__tsan_init"))
# What honest callers can count on at once: together as much as the largest request (base/grpc/bound.c).
AT_ONCE = {1: 31, 2: 15, 20: 1}  # so many, of so many MiB each
TWISTED_S = 12  # heartbeats of 2 s and questions of 5 s are among it


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes((*out, n))


class Constant:
    """Made once: what is sent must not cost this test what it should cost the node."""

    def __init__(self, make):
        self.make, self.lock, self.data = make, threading.Lock(), None

    def __call__(self):
        with self.lock:
            if self.data is None:
                self.data = self.make()
            return self.data

    def drop(self):
        self.data = None


def field(size):
    """Number 2047, which no message has: it is kept all the same."""
    return Constant(lambda: b"\xfa\x7f" + varint(size) + bytes(size))


def empty_messages(n):
    """In field 1; a batch of the sync stream has its messages there. 100 times as much in memory."""
    return Constant(lambda: b"\x0a\x00" * n)


class Endless(Between):
    """While `flood` is there, the sync stream never stops saying it."""

    def __init__(self, address):
        self.flood, self.n_flood = None, 0
        super().__init__(address)

    def stream(self, method, requests, context):
        call = self.channel.stream_stream(method)(requests, metadata=self.metadata(context))
        context.add_callback(call.cancel)
        while call.is_active():
            if flood := self.flood:
                self.n_flood += 1
                yield flood()
            else:
                time.sleep(0.1)


class Memory:
    def __init__(self, pid):
        self.status = pathlib.Path(f"/proc/{pid}/status")
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is of from now on
        self.before = self.mib("VmRSS")

    def mib(self, name):
        for line in self.status.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) // 1024
        raise AssertionError("no such process")

    def check(self, name, bound_mib=BOUND_MIB):
        peak = self.mib("VmHWM")
        print(f"     {name}: {self.before} MiB before, at most {peak} MiB", flush=True)
        assert peak < bound_mib or IS_SANITIZED, peak


def stays(s, gcs, node, name, begin, end, count, is_seen=lambda: True):
    """begin() makes the head say too much, end() makes it honest; count() is how often it did, is_seen() what follows."""
    pg, d = gang(s, gcs, node)
    pid = node.file()["pid_agent"]
    memory = Memory(pid)
    begin()
    heard = listen(d, TWISTED_S, lambda: count() > 2 and is_seen())
    end()
    assert heard, (count(), node.log()[-3000:])
    memory.check(f"{name}, {count()} times")
    assert node.file()["pid_agent"] == pid, node.log()[-3000:]
    cluster.wait_for("a node of the head's", lambda: node.file().get("node_id") in gcs.alive())
    assert listen(d, 1)
    ends(gcs, node, pg, d)


def answers(make, compressed=False):
    def case(s, gcs, node, between, name):
        def twist(_method, _reply, context):
            if compressed:
                context.set_compression(grpc.Compression.Gzip)
            return make()

        def begin():
            between.n_twisted, between.twist = 0, twist

        def end():
            between.twist = between.honest

        make()
        cluster.wait_for("the head is heard", lambda: node.log().count("answers again") ==
                         node.log().count(SILENT))
        said = node.log().count(SILENT)
        stays(s, gcs, node, name, begin, end, lambda: between.n_twisted, lambda: node.log().count(SILENT) > said)
        make.drop()

    return case


def stream(make):
    def case(s, gcs, node, between, name):
        def begin():
            between.n_flood, between.flood = 0, make

        def end():
            between.flood = None

        stays(s, gcs, node, name, begin, end, lambda: between.n_flood)
        make.drop()

    return case


def case_requests(s, gcs, node, _between, name):
    """A head may call a node, too. Prepare is the call with a list."""
    memory = Memory(node.file()["pid_agent"])
    channel = grpc.insecure_channel(node.grpc_address(), options=OPTIONS)
    prepare = channel.unary_unary("/ray.rpc.NodeManagerService/PrepareBundleResources")
    for what, make, compression, want in (
            ("a long one", field(500 * MIB), None, "RESOURCE_EXHAUSTED"),
            ("many small ones", empty_messages(15 * MIB), None, "RESOURCE_EXHAUSTED"),
            ("a compressed one", field(300 * MIB), grpc.Compression.Gzip, "UNIMPLEMENTED")):
        try:
            prepare(make(), timeout=cluster.DEADLINE_S, compression=compression)
            raise AssertionError(f"{what} was taken")
        except grpc.RpcError as e:
            print(f"     {what}: {e.code().name}: {e.details()}", flush=True)
            # A stream beyond the quota may be ended before its message is looked at.
            assert e.code().name in (want, "CANCELLED", "UNAVAILABLE", "INTERNAL"), e
        memory.check(what)
        make.drop()
    assert not node.state()["bundles"]
    reply = s.unary(grpc.insecure_channel(node.grpc_address(), options=OPTIONS),
                    "/grpc.health.v1.Health/Check",
                    s.message("grpc.health.v1.HealthCheckRequest")(service=""), timeout=60)
    assert reply.status == 1
    channel.close()


def case_large_requests(_s, _gcs, node, _between, name):
    """What is as large as a request may be is answered, and so are many that are large together."""
    memory = Memory(node.file()["pid_agent"])
    for n, mib in AT_ONCE.items():
        make = field(mib * MIB)

        def ask(_i, make=make):
            with grpc.insecure_channel(node.grpc_address(), options=OPTIONS) as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check")
                return [check(make(), timeout=120) for _ in range(5)]

        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            replies = sum(pool.map(ask, range(n)), [])
        assert replies == [b"\x08\x01"] * (5 * n), replies
        memory.check(f"{n} of {mib} MiB at once")
        make.drop()


def package(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        z.writestr("payload", bytes(PACKAGE_MIB * MIB))
    return path.read_bytes()


def case_package(s, head, gcs, node):
    """One value of the head's KV. It is in memory once, on its way into a file."""
    uri = "gcs://_ray_pkg_0123456789abcdef.zip"
    with tempfile.TemporaryDirectory() as directory:
        gcs.call("InternalKVGcsService/InternalKVPut", "InternalKVPutRequest", key=uri.encode(),
                 value=package(pathlib.Path(directory, "p.zip")), overwrite=True)
    memory = Memory(node.file()["pid_agent"])
    request = urllib.request.Request(
        f"{head.http}/api/jobs/", method="POST", headers={"Content-Type": "application/json"},
        data=json.dumps({"entrypoint": f"test $(stat -c %s payload) = {PACKAGE_MIB * MIB}",
                         "submission_id": "large", "runtime_env": {"working_dir": uri}}).encode())
    with urllib.request.urlopen(request, timeout=cluster.DEADLINE_S) as reply:
        assert reply.status == 200, reply.read()
    state = head.wait_state("large", "SUCCEEDED", "FAILED")
    assert state == "SUCCEEDED", (head.jobs()["large"], node.log()[-3000:])
    memory.check(f"a package of {PACKAGE_MIB} MiB", PACKAGE_MIB + 64)
    gcs.call("InternalKVGcsService/InternalKVDel", "InternalKVDelRequest", key=uri.encode())


CASES = {
    "answers below Ray's limit": answers(field(500 * MIB)),
    "answers beyond it": answers(field(600 * MIB)),
    "answers of many small ones": answers(empty_messages(15 * MIB)),
    "compressed answers": answers(field(300 * MIB), compressed=True),
    "an endless stream of small ones": stream(Constant(lambda: b"\x0a\x02\x08\x01")),
    "an endless stream of large ones": stream(field(30 * MIB)),
    "a stream of many in one": stream(empty_messages(15 * MIB)),
    "requests": case_requests,
    "large requests": case_large_requests,
}


def main():
    with cluster.Sandbox() as s, Head() as head:
        gcs = cluster.Gcs(s, head.address)
        between = Endless(head.address)
        node, _ = job_agent(s, head, "--address", between.address, "--no-token", "--num-gpus", "4")
        case_package(s, head, gcs, node)
        print("ok   a package", flush=True)
        for name in CASES:
            CASES[name](s, gcs, node, between, name)
            print(f"ok   {name}", flush=True)
        assert node.stop() == 0
        between.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
