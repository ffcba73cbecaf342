"""A head that talks nonsense: test_odd_head.py BIN_DIR [SEED]

Between our node and a real Ray head stands a gRPC server that passes every call on and twists what
comes back: bytes that are no message, messages with something else in them, much too much, nothing,
another version. And what a head calls on a node is called with such bytes. No agent ends of it, and no
gang, no job of a dashboard and no line is lost. Then addresses that are no head's.
"""

import concurrent.futures
import pathlib
import random
import re
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
import grpc  # noqa: E402
from ports import free_port  # noqa: E402
from test_job_agent import Head, job_agent  # noqa: E402

BIN = sys.argv[1]
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 2026
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.so_reuseport", 0)]
KEPT = ("ray_cluster_id", "authorization", "node_id")  # of the metadata
SILENT = "does not answer; gangs go on: "  # a line of the log, with the reason
NOT_SAID = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS,
            grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)


class Between(grpc.GenericRpcHandler):
    """twist(method, reply, context) is what the node gets for a reply."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(
            address, options=[*OPTIONS, ("grpc.max_receive_message_length", -1)])
        self.twist = self.honest
        self.n_twisted = 0
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(32), options=OPTIONS)
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    @staticmethod
    def honest(_method, reply, _context):
        return reply

    def service(self, details):
        if details.method.endswith("/StartSync"):
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self.stream(details.method, requests, context))
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.unary(details.method, request, context))

    def metadata(self, context):
        return [(k, v) for k, v in context.invocation_metadata() if k in KEPT]

    def unary(self, method, request, context):
        try:
            reply = self.channel.unary_unary(method)(
                request, timeout=context.time_remaining(), metadata=self.metadata(context))
        except grpc.RpcError as e:
            context.abort(e.code(), e.details())
        self.n_twisted += 1
        return self.twist(method, reply, context)

    def stream(self, method, requests, context):
        call = self.channel.stream_stream(method)(requests, metadata=self.metadata(context))
        context.add_callback(call.cancel)
        try:
            for message in call:
                yield self.twist(method, message, context)
        except grpc.RpcError:
            return

    def close(self):
        self.server.stop(0).wait()
        self.channel.close()


def unreadable(r, reply):
    """No reader of protobuf takes it."""
    return r.choice((
        b"\x0a\xff\xff\xff\xff\x0f" + reply,  # longer than all there is
        reply + b"\x0a\x7fab",
        reply + b"\x00\x01",  # field 0
        b"\x0b" * r.randrange(1, 5000) + reply,  # groups in groups that do not end
        reply + b"\x08" + b"\xff" * 11,  # a number without an end
        reply + b"\x0f",  # a kind that there is not
    ))


def anything(r, reply):
    """Readable or not, and not true."""
    kind = r.randrange(5)
    if kind == 0:
        return reply[:r.randrange(len(reply) + 1)]
    if kind == 1 and reply:
        b = bytearray(reply)
        for _ in range(r.randrange(1, 9)):
            b[r.randrange(len(b))] ^= 1 << r.randrange(8)
        return bytes(b)
    if kind == 2:
        return r.randbytes(r.randrange(200))
    if kind == 3:
        return reply + reply
    return unreadable(r, reply)


def gang(s, gcs, node):
    pg = gcs.create_group([{"mobula_gpu": 2}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'exit 0' TERM; i=0; while :; do echo $i; i=$((i+1)); sleep 0.1;"
              " done"])
    d.expect("launched")
    d.hears(b"0\n")
    return pg, d


def listen(d, seconds, until=lambda: True):
    """What a driver does, for so long and until that is so: it renews its lease, and hears lines; none is missing."""
    end = time.monotonic() + seconds
    with d.renewing():
        while time.monotonic() < end or not until():
            assert time.monotonic() < end + cluster.DEADLINE_S, "it has not come to that"
            try:
                d.expect("rank_exit", "failure", "ended", deadline_s=0.5)
                return False
            except AssertionError as e:
                assert "within" in str(e), e
    lines = d.logs.get(0, b"").split()
    assert lines == [b"%d" % i for i in range(len(lines))], lines
    return True


def of_nonsense(seed):
    r = random.Random(seed)

    def twist(_method, reply, context):
        if r.random() < 0.2:
            context.abort(r.choice(NOT_SAID), "what a head never says")
        return unreadable(r, reply)

    return twist


def is_away(s, gcs, node, between, twist):
    """As if the head were: the node keeps its id, the gang goes on."""
    pg, d = gang(s, gcs, node)
    before = node.file()
    n_again = node.log().count("answers again")
    between.n_twisted, between.twist = 0, twist
    silent = node.log().count(SILENT)
    heard = listen(d, 15, lambda: between.n_twisted > 2 and node.log().count(SILENT) > silent)
    between.twist = between.honest
    assert heard, (between.n_twisted, node.log()[-3000:])
    cluster.wait_for("the node is heard", lambda: node.log().count("answers again") > n_again)
    now = node.file()
    assert (now["node_id"], now["pid_agent"]) == (before["node_id"], before["pid_agent"]), now
    assert before["node_id"] in gcs.alive() and node.state()["gangs"][0]["state"] == "RUNNING"
    ends(gcs, node, pg, d)


def case_unreadable(s, gcs, node, between):
    """Of every answer for a while nothing can be read."""
    is_away(s, gcs, node, between, of_nonsense(SEED))


def case_mute(s, gcs, node, between):
    """No call is answered; connections stand."""
    over = threading.Event()

    def twist(_method, reply, _context):
        over.wait()
        return reply

    try:
        is_away(s, gcs, node, between, twist)
    finally:
        over.set()


def case_too_much(s, gcs, node, between):
    """True answers with megabytes in them that nobody asked for: the node may take or refuse them."""
    pg, d = gang(s, gcs, node)
    before = node.file()
    more = b"\xfa\x7f" + b"\x80\x80\x80\x20" + bytes(64 << 20)  # field 2047
    between.n_twisted = 0
    between.twist = lambda _method, reply, _context: reply + more
    assert listen(d, 15, lambda: between.n_twisted > 2), (between.n_twisted, node.log()[-3000:])
    between.twist = between.honest
    ends(gcs, node, pg, d)
    assert node.file()["pid_agent"] == before["pid_agent"], node.log()[-3000:]
    cluster.wait_for("a node of the head's", lambda: node.file().get("node_id") in gcs.alive())


COUNTS = "i=0; until test -e {}; do echo line $i; i=$((i+1)); sleep 0.1; done; echo line $i; echo end"


def is_whole(text):
    lines = [line for line in text.splitlines() if line.startswith(("line ", "end"))]
    return len(lines) > 20 and lines == [*(f"line {i}" for i in range(len(lines) - 1)), "end"]


def case_driver(s, gcs, node, between):
    """mobula's own driver, which hears the head through the same twister, ends well."""
    over = pathlib.Path(s.dir, "driver-is-over")
    job = subprocess.Popen([f"{BIN}/mobula", "run", "--address", between.address, "--", "sh", "-c",
                            COUNTS.format(over)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cluster.wait_for("its rank", lambda: any(g["ranks_running"] for g in node.state()["gangs"]))
    between.n_twisted, between.twist = 0, of_nonsense(SEED + 3)
    since = time.monotonic()
    cluster.wait_for("some nonsense", lambda: between.n_twisted > 20 and
                     time.monotonic() - since > 15)
    over.touch()
    cluster.wait_for("the end of its ranks", lambda: not any(
        g["ranks_running"] for g in node.state()["gangs"]))
    between.twist = between.honest
    text = job.communicate(timeout=cluster.DEADLINE_S)[0].decode()
    assert job.returncode == 0 and is_whole(text), (job.returncode, text)
    cluster.wait_for("free slots", lambda: node.state()["resources_available"] ==
                     node.state()["resources_total"])


def case_job_agent(s, head, between):
    """A job of the dashboard's ends while nothing that Ray's head says can be read. It comes before
    all groups: the dashboard asks the drivers of their jobs, and these are none."""
    over = pathlib.Path(s.dir, "job-is-over")
    node, _ = job_agent(s, head, "--no-token", "--address", between.address)
    code, text = head.ray("submit", "--no-wait", "--submission-id", "odd", "--", "sh", "-c",
                          COUNTS.format(over))
    assert code == 0, text
    head.wait_state("odd", "RUNNING")
    between.n_twisted, between.twist = 0, of_nonsense(SEED + 4)
    cluster.wait_for("some nonsense", lambda: between.n_twisted > 20)
    over.touch()
    cluster.wait_for("the end", lambda: "job=odd RUNNING -> SUCCEEDED" in node.log())
    since = time.monotonic()
    cluster.wait_for("more nonsense", lambda: time.monotonic() - since > 5)
    between.twist = between.honest
    head.wait_state("odd", "SUCCEEDED")
    code, text = head.ray("logs", "odd")
    assert code == 0 and is_whole(text), text
    assert node.stop() == 0


def ends(gcs, node, pg, d):
    gcs.remove_group(pg)
    d.expect("failure")
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")
    d.close()
    cluster.wait_for("free GPUs", lambda: node.state()["resources_available"]["mobula_gpu"] == 4)


def case_anything(s, gcs, node, between):
    """It is lied to, that it is dead or its group is gone: the agent lives, is a node of the head's
    when that is honest again, and holds nothing for a gang that is over."""
    r = random.Random(SEED + 1)
    pg, d = gang(s, gcs, node)
    pid = node.file()["pid_agent"]
    between.n_twisted = 0
    between.twist = lambda _method, reply, _context: anything(r, reply)
    heard = listen(d, 15)
    between.twist = between.honest
    print(f"     {between.n_twisted} lies; the gang {'went on' if heard else 'ended'}", flush=True)
    assert node.file()["pid_agent"] == pid, node.log()[-3000:]
    if heard:
        listen(d, 1)
    gcs.remove_group(pg)
    d.close()
    cluster.wait_for("a node of the head's", lambda: node.file().get("node_id") in gcs.alive() and
                     node.state()["resources_available"]["mobula_gpu"] == 4)
    pg, d = gang(s, gcs, node)
    assert listen(d, 1)
    ends(gcs, node, pg, d)
    assert node.file()["pid_agent"] == pid, node.log()[-3000:]


def case_calls_of_a_head(s, gcs, node, between):
    """Bytes instead of its requests, at the node's own port; those that are orders only unreadable."""
    r = random.Random(SEED + 2)
    pg, d = gang(s, gcs, node)
    pid = node.file()["pid_agent"]
    orders = ("ShutdownRaylet", "DrainRaylet", "ReleaseUnusedBundles", "RemovePlacementGroupBundles",
              "CancelResourceReserve")
    channel = grpc.insecure_channel(node.grpc_address(), options=OPTIONS)
    methods = [m.name for m in
               s.pool.FindServiceByName("ray.rpc.NodeManagerService").methods]
    assert set(methods) >= {"PrepareBundleResources", "CommitBundleResources", *orders[:4]}, methods
    status = {}
    with d.renewing():
        for _ in range(20):
            for name in methods:
                data = r.randbytes(r.randrange(60))
                data = unreadable(r, data) if name in orders else anything(r, data)
                try:
                    channel.unary_unary(f"/ray.rpc.NodeManagerService/{name}")(data, timeout=cluster.DEADLINE_S)
                    code = "OK"
                except grpc.RpcError as e:
                    code = e.code().name
                status.setdefault(code, set()).add(name)
    assert not {"DEADLINE_EXCEEDED", "UNAVAILABLE"} & set(status), status
    assert listen(d, 1)
    assert node.file()["pid_agent"] == pid and len(node.state()["bundles"]) == 1, node.state()
    ends(gcs, node, pg, d)
    channel.close()


def of_version(s, version):
    def twist(method, reply, _context):
        if not method.endswith("/CheckAlive"):
            return reply
        m = s.message("ray.rpc.CheckAliveReply").FromString(reply)
        m.ray_version = version
        return m.SerializeToString()

    return twist


def case_newer(s, gcs, between):
    """It is said, and the newest rules hold."""
    between.twist = of_version(s, "2.99.0")
    node = s.node(BIN, "--address", between.address, "--no-token", "--num-gpus", "4")
    node.wait_alive()
    assert "Ray 2.99.0, newer than 2.60" in node.log(), node.log()
    pg, d = gang(s, gcs, node)
    assert listen(d, 7)  # longer than a node lives that the head does not hear
    assert node.info["node_id"] in gcs.alive()
    ends(gcs, node, pg, d)
    assert node.stop() == 0
    between.twist = between.honest


def case_http_port(s):
    """--address names a dashboard: whoever is started so ends by itself, and says it."""
    head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", "0")
    address = f"127.0.0.1:{head.wait_alive()['dashboard_port']}"
    node = s.node(BIN, "--address", address)
    status = node.process.wait(cluster.DEADLINE_S)
    assert (status, "answers in HTTP/1, not in gRPC" in node.file()["error"]) == (78, True), \
        (status, node.log())
    done = subprocess.run([f"{BIN}/mobula", "run", "--address", address, "--", "true"],
                          capture_output=True, text=True, timeout=cluster.DEADLINE_S)
    assert (done.returncode, "answers in HTTP/1, not in gRPC" in done.stderr) == (78, True), done
    done = subprocess.run([f"{BIN}/mobula", "job", "submit", "--address", address, "--", "true"],
                          capture_output=True, text=True, timeout=cluster.DEADLINE_S)
    assert (done.returncode, done.stderr.count("answers in HTTP/1, not in gRPC")) == (78, 1), done
    assert head.stop() == 0


class Elsewhere:
    """A node and a driver at ports of the same machine where no head is; they wait for one first."""

    def __init__(self, s, gcs):
        (ray,) = gcs.nodes().values()
        self.says = {f"{ray.node_manager_address}:{ray.node_manager_port}":  # a raylet's
                     (78, "answers in gRPC, but there is no GCS"),
                     f"127.0.0.1:{free_port()}": (69, "Connection refused")}
        self.nodes = {a: s.node(BIN, "--address", a, "--no-token") for a in self.says}
        self.drivers = {a: subprocess.Popen([f"{BIN}/mobula", "run", "--address", a, "--", "true"],
                                            stderr=subprocess.PIPE, text=True) for a in self.says}

    def assert_said(self):
        for address, (status, text) in self.says.items():
            node, driver = self.nodes[address], self.drivers[address]
            assert (node.process.wait(cluster.DEADLINE_S), text in node.file()["error"]) == \
                (status, True), node.log()
            said = driver.communicate(timeout=cluster.DEADLINE_S)[1]
            assert (driver.returncode, said.count(text)) == (status, 1), said


def case_no_address(s):
    """Nor a name. Nothing is dialled."""
    for flag, value, says in (("--name", b"\xff", "--name is no UTF-8"), ("--name", b"a/b", "plain name")):
        done = subprocess.run([f"{BIN}/mobula", "run", "--address", "10.0.0.1:1", flag, value, "--", "true"],
                              capture_output=True, text=True, timeout=cluster.DEADLINE_S)
        assert done.returncode == 64 and says in done.stderr, done
    for address in "10.0.0.1", "10.0.0.1:99999", "10.0.0.1:0", ":6379", "http://10.0.0.1:6379":
        node = s.node(BIN, "--address", address)
        said = f"--address {address}: "
        assert node.process.wait(cluster.DEADLINE_S) == 64 and \
            f"{said}expected HOST:PORT of the head's GCS" in node.log(), node.log()
        done = subprocess.run([f"{BIN}/mobula", "run", "--address", address, "--", "true"],
                              capture_output=True, text=True, timeout=cluster.DEADLINE_S)
        assert done.returncode == 64 and re.search(f"{re.escape(said)}.*HOST:PORT", done.stderr), done


def main():
    print(f"seed {SEED}", flush=True)
    with cluster.Sandbox() as s, Head() as head:
        gcs = cluster.Gcs(s, head.address)
        elsewhere = Elsewhere(s, gcs)
        case_http_port(s)
        print("ok   http_port", flush=True)
        case_no_address(s)
        print("ok   no_address", flush=True)
        between = Between(head.address)
        case_job_agent(s, head, between)
        print("ok   job_agent", flush=True)
        case_newer(s, gcs, between)
        print("ok   newer", flush=True)
        node = s.node(BIN, "--address", between.address, "--no-token", "--num-gpus", "4")
        node.wait_alive()
        for case in (case_unreadable, case_mute, case_too_much, case_driver, case_anything,
                     case_calls_of_a_head):
            case(s, gcs, node, between)
            print(f"ok   {case.__name__[5:]}", flush=True)
        assert node.stop() == 0
        elsewhere.assert_said()
        print("ok   elsewhere", flush=True)
        between.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
