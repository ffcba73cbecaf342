"""The S3 client through a proxy that makes faults, in front of a real server: test_faults.py STORE_TOOL KIND

KIND-https: with TLS on both sides of the proxy, and the bucket in the host's name.
"""

import os
import pathlib
import socket
import sys
import tempfile
import threading
import time

import servers
from faults import RETRANSMIT_S, FaultProxy, corrupt, drop_answer, error, replace, reset, stall, truncate

TOOL = sys.argv[1]
MIB = 1 << 20


class World:
    """A server, a proxy in front of it and a client that talks to the proxy."""

    def __init__(self, server, proxy, directory):
        self.server, self.proxy, self.dir = server, proxy, directory

    def tool(self, **env):
        url = f"https://localhost:{self.proxy.port}" if self.proxy.tls else f"http://127.0.0.1:{self.proxy.port}"
        return servers.Tool(TOOL, self.server.environment(url, **env))

    def file(self, name, size):
        path = self.dir / name
        path.write_bytes(os.urandom(size))
        return path


def storms(w):
    """503 SlowDown and 500 for a while, and 408 of a gateway: everything comes through in the end, with fewer requests at a time."""
    w.proxy.rule("PUT", "", error(503, "SlowDown"), times=12)
    w.proxy.rule("PUT", "", error(500, "InternalError"), times=6)
    w.proxy.rule("PUT", "", error(408), times=2)
    w.proxy.rule("GET", "", error(503, "SlowDown"), times=2)
    with w.tool() as tool:
        tool.must("many", n=20, text="stormy")
        assert tool.must("get", key="many/19")["data"] == "stormy"
        assert len(tool.must("list", prefix="many/")["keys"]) == 20


def resets(w):
    """A part that breaks off in the middle is sent again, the others are not."""
    path = w.file("big", 70 * MIB)
    w.proxy.rule("PUT", "partNumber=[1-3]&", reset(after=5 * MIB), times=2)
    with w.tool() as tool:
        tool.must("put_file", key="big", path=str(path))
        copy = w.dir / "copy"
        w.proxy.clear()
        w.proxy.rule("GET", "", reset(), times=2)
        w.proxy.rule("GET", "", truncate(0.3), times=2)
        tool.must("get_file", key="big", path=str(copy))
        assert copy.read_bytes() == path.read_bytes()
    whole = [r for r in w.proxy.seen("PUT", "partNumber=") if r.status == 200]
    assert len(whole) == 5, "parts that the server had were sent again"


def parts_and_transfers(w):
    """As large and as many as the environment says; nonsense is refused."""
    path = w.file("cut", 70 * MIB)
    with w.tool(BUCKET_STORAGE_PART_MIB="5", BUCKET_STORAGE_CONCURRENCY="1") as tool:
        tool.must("put_file", key="cut", path=str(path))
        assert tool.must("head", key="cut")["size"] == 70 * MIB
    parts = w.proxy.seen("PUT", "partNumber=")
    assert [int(r.header("content-length")) for r in parts] == [5 * MIB] * 14, parts
    assert w.proxy.n_connections == 1, w.proxy.n_connections  # two at once would need two
    for name, allowed, values in [("PART_MIB", "from 5 to 5120", ["4", "5121", "x", "5 MiB", "1e1", "9" * 30]),
                                  ("CONCURRENCY", "from 1 to 16", ["0", "17", "-1", "many"])]:
        for value in values:
            tool = w.tool(**{f"BUCKET_STORAGE_{name}": value})
            assert tool.close() != 0
            assert f'BUCKET_STORAGE_{name} "{value}": ' in tool.text() and allowed in tool.text(), tool.text()


def parts_of_another_size(w):
    """An upload goes on with other parts than it was begun with: what is there in the end is the file."""
    for before, after in [("5", "16"), ("16", "5")]:
        path = w.file("recut", 70 * MIB)
        key = f"recut-{before}"
        with w.tool(BUCKET_STORAGE_PART_MIB=before, BUCKET_STORAGE_CONCURRENCY="1") as tool:
            upload = tool.fails("ECANCELED", "put_file", key=key, path=str(path), stop_at=33 * MIB)["upload_id"]
        with w.tool(BUCKET_STORAGE_PART_MIB=after) as tool:
            done = tool.must("put_file", key=key, path=str(path), resume=upload)
            copy = w.dir / "copy"
            got = tool.must("get_file", key=key, path=str(copy))
        assert copy.read_bytes() == path.read_bytes() and got["crc"] == done["crc"]
        assert len(w.proxy.seen("POST", f"{key}[?]uploads")) == 1, "another upload was begun"


def lost_answers(w):
    """The server acted, its answer was lost: repeating it is not a failure, and nothing is there twice."""
    with w.tool() as tool:
        for condition in "", "absent":
            w.proxy.rule("PUT", "", drop_answer(), times=1)
            tag = tool.must("put", key=f"lost{condition}", text="mine", **{"if": condition})["etag"]
            assert tool.must("head", key=f"lost{condition}")["etag"] == tag
        w.proxy.rule("PUT", "", drop_answer(), times=1)
        tool.must("put", key="lostabsent", text="next", **{"if": "match"}, etag=tag)
        # Someone else's bytes behind a lost answer are no success.
        w.proxy.rule("PUT", "lostother", replace(503), times=1)
        w.proxy.rule("PUT", "lostother", replace(412), times=1)
        tool.must("put", key="lostother", text="a")
        tool.fails("EEXIST", "put", key="lostother", text="b", **{"if": "absent"})
        w.proxy.rule("DELETE", "", drop_answer(), times=1)
        tool.must("delete", key="lostother")
        path = w.file("big", 65 * MIB)
        w.proxy.rule("POST", "uploadId=", drop_answer(), times=1)
        tool.must("put_file", key="completed", path=str(path))
        assert tool.must("head", key="completed")["size"] == 65 * MIB
        # ... nor by a server that still completes what it was asked before.
        w.proxy.rule("POST", "uploadId=", drop_answer(), times=1)
        w.proxy.rule("POST", "uploadId=", error(404, "NoSuchUpload"), times=1)
        w.proxy.rule("HEAD", "", error(404), times=2)
        w.proxy.rule("GET", "uploadId=", error(404, "NoSuchUpload"), times=1)
        tool.must("put_file", key="late", path=str(path))
        assert tool.must("head", key="late")["size"] == 65 * MIB
        parts = w.proxy.seen("PUT", "late.*partNumber=")
        assert len(parts) == 5, parts


def errors_in_200(w):
    """CompleteMultipartUpload that fails after its 200, with the white space that keeps connections alive."""
    path = w.file("big", 65 * MIB)
    body = b"\n  \n<Error><Code>InternalError</Code><Message>m</Message></Error>"
    rule = w.proxy.rule("POST", "uploadId=", {**error(200), "body": body}, times=2)
    with w.tool() as tool:
        tool.must("put_file", key="late", path=str(path))
    assert rule["used"] == 2


def stalls(w):
    """Bytes that stop coming are noticed, and the request goes out again on another connection."""
    w.proxy.rule("PUT", "", stall(after=2), times=1)
    w.proxy.rule("GET", "", stall(answer=True), times=1)
    with w.tool(BUCKET_STORAGE_STALL_SECONDS="1") as tool:
        tool.must("put", key="stalled", text="four")
        assert tool.must("get", key="stalled")["data"] == "four"
        assert w.proxy.n_connections >= 3, w.proxy.n_connections
    # A slow link is not a stalled one.
    w.proxy.clear()
    w.proxy.rate = MIB
    w.proxy.delay_s = 0.2
    path = w.file("slow", 7 * MIB)
    with w.tool(BUCKET_STORAGE_STALL_SECONDS="6") as tool:
        before = len(w.proxy.requests)
        took = tool.must("put_file", key="slow", path=str(path))["ms"]
        assert took >= 6500, took
        assert len(w.proxy.requests) == before + 1, w.proxy.requests[before:]
    w.proxy.rate = w.proxy.delay_s = 0


def losses(w):
    """A link that is far and loses: slow connections, no failure, and nothing is sent twice; the others go on meanwhile,
    so that the waiting for lost blocks is done by all at once."""
    path, copy = w.file("lossy", 70 * MIB), w.dir / "copy"
    w.proxy.delay_s, w.proxy.loss = 0.05, 0.05
    with w.tool() as tool:
        ms = tool.must("put_file", key="lossy", path=str(path))["ms"]
        up = w.proxy.n_lost
        tool.must("get_file", key="lossy", path=str(copy))
        assert copy.read_bytes() == path.read_bytes()
        assert "retry in" not in tool.text(), tool.text()
    assert up >= 20 and w.proxy.n_lost - up >= 20, (up, w.proxy.n_lost)
    assert [r.status for r in w.proxy.seen("PUT", "lossy.*partNumber=")] == [200] * 5
    assert ms < up * RETRANSMIT_S * 1000, (ms, up)
    w.proxy.delay_s = w.proxy.loss = 0


def connections(w):
    """Idle connections that died, and an endpoint that is away for a while."""
    with w.tool() as tool:
        tool.must("put", key="c", text="1")
        w.proxy.cut()
        tool.must("put", key="c", text="2")
        w.proxy.cut()
        w.proxy.refuse = True
        tool.send("put", key="c", text="3")
        before = w.proxy.n_connections
        servers.wait_for("attempts", lambda: w.proxy.n_connections >= before + 2)
        w.proxy.refuse = False
        assert tool.answer()["code"] == "OK"
        w.server.stop()
        before = w.proxy.n_connections
        tool.send("put", key="c", text="4")
        servers.wait_for("attempts", lambda: w.proxy.n_connections >= before + 2)
        w.server.start()
        assert tool.answer()["code"] == "OK"
        assert tool.must("get", key="c")["data"] == "4"


def outages(w):
    """Each one is told of, the second as soon as the first, and not after the minute that lies between two lines of one."""
    told = []
    with w.tool() as tool:
        for n in 1, 2:
            w.proxy.rule("PUT", "", error(503, "SlowDown"))
            tool.send("put", key="o", text="x")
            servers.wait_for("it is told", lambda n=n: tool.text().count(": failing for ") == n)
            told.append(time.monotonic())
            w.proxy.clear()
            assert tool.answer()["code"] == "OK"
    assert told[1] - told[0] < 50, told


def cuts(w):
    """Of the proxy itself: what came before a cut, also on a connection that nobody had accepted yet, is never begun after it."""
    proxy = FaultProxy(w.server.port)  # it accepts nothing before it is entered
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        cut = threading.Thread(target=proxy.cut)
        cut.start()
        servers.wait_for("the cut has begun", lambda: proxy._own_port or not cut.is_alive())
        with proxy:
            cut.join()
            before = len(proxy.requests)
            try:
                while client.recv(1000):
                    pass
            except ConnectionError:
                pass
            assert len(proxy.requests) == before, proxy.requests


def regions(w):
    """The server names the bucket's region; the request is signed anew, for the same host."""
    for status in 301, 307, 400:
        w.proxy.rule("PUT", "", error(status, "AuthorizationHeaderMalformed" if status == 400 else "PermanentRedirect",
                                      [("x-amz-bucket-region", "us-east-1"),
                                       ("Location", f"http://127.0.0.1:{servers.free_port()}/elsewhere")]), times=1)
        with w.tool(AWS_REGION="eu-west-1") as tool:
            tool.must("put", key="region", text="x")
        last = w.proxy.seen("PUT", "/region$")[-2:]
        assert "/eu-west-1/s3/" in last[0].header("Authorization"), last[0].headers
        assert "/us-east-1/s3/" in last[1].header("Authorization"), last[1].headers


def broken_bytes(w):
    """A bit that changes on the way is noticed by the server, and the bytes are sent again; for ever it is an error."""
    path = w.file("big", 65 * MIB)
    small = w.proxy.rule("PUT", "/p/sum$", corrupt(), times=2)
    part = w.proxy.rule("PUT", "partNumber=2&", corrupt(), times=1)
    with w.tool() as tool:
        tool.must("put", key="sum", text="some bytes")
        assert tool.must("get", key="sum")["data"] == "some bytes"
        tool.must("put_file", key="big", path=str(path))
        copy = w.dir / "copy"
        tool.must("get_file", key="big", path=str(copy))
        assert copy.read_bytes() == path.read_bytes()
        w.proxy.rule("PUT", "/p/never$", corrupt())
        tool.fails("ECORRUPT", "put", key="never", text="some bytes")
        tool.fails("ENOENT", "head", key="never")
    assert small["used"] == 2 and part["used"] == 1


def checksums(w):
    """Endpoints that know fewer checksums: the next weaker one is taken, the server verifies that one too, and
    multipart uploads go through."""
    path = w.file("big", 65 * MIB)
    copy = w.dir / "copy"
    sums = ["x-amz-checksum-crc64nvme", "x-amz-checksum-crc32c", "content-md5"]

    def refuses(n):
        names = {*sums[:n], "x-amz-checksum-algorithm"}
        return lambda r: any(name.lower() in names for name, _ in r.headers)

    for n in 1, 2, 3:
        w.proxy.clear()
        w.proxy.requests.clear()
        w.proxy.rule("", "", error(501, "NotImplemented") if n == 1 else error(400, "InvalidRequest"), when=refuses(n))
        with w.tool() as tool:
            tool.must("put", key=f"sums{n}", text="some bytes")
            tool.must("put_file", key="big", path=str(path))
            tool.must("get_file", key="big", path=str(copy))
            assert copy.read_bytes() == path.read_bytes()
            if n < 3:
                assert w.proxy.seen("PUT", f"/sums{n}$")[-1].header(sums[n]), w.proxy.requests
                assert all(r.header("content-md5") for r in w.proxy.seen("PUT", "partNumber=")), "a part without a sum"
                w.proxy.clear()
                bent = w.proxy.rule("PUT", "", corrupt(), times=1)
                tool.must("put", key="bent", text="some bytes")
                assert tool.must("get", key="bent")["data"] == "some bytes" and bent["used"] == 1
            assert len([r for r in w.proxy.requests if r.status in (400, 501) and r.fault == "error"]) <= n + 1


def no_conditions(w):
    """A server without conditional writes: said loudly, once; no such write is sent as an unconditional one."""
    w.proxy.rule("", "", error(501, "NotImplemented"),
                 when=lambda r: r.header("If-None-Match") or (r.method == "PUT" and r.header("If-Match")))
    with w.tool() as tool:
        tag = tool.must("put", key="plain", text="x")["etag"]
        for condition in {"if": "absent"}, {"if": "match", "etag": tag}, {"if": "absent"}:
            answer = tool.fails("EUNSUPPORTED", "put", key="conditional", text="x", **condition)
            assert "conditional" in answer["text"], answer
        tool.fails("ENOENT", "head", key="conditional")
        tool.must("put", key="plain", text="y")
        assert tool.text().count("DOES NOT IMPLEMENT CONDITIONAL WRITES") == 1, tool.text()
    assert len(w.proxy.seen("PUT", "/conditional$")) == 1, w.proxy.requests


def ignored_conditions(w):
    """A server that takes conditions and does not heed them: found out at the first creation."""
    w.proxy.rule("PUT", "/first$", replace(200, headers=[("ETag", '"e"')]))
    with w.tool() as tool:
        answer = tool.fails("EUNSUPPORTED", "put", key="first", text="x", **{"if": "absent"})
        assert "does not heed" in answer["text"], answer
        assert tool.text().count("DOES NOT IMPLEMENT CONDITIONAL WRITES") == 1, tool.text()
        tool.fails("EUNSUPPORTED", "put", key="second", text="x", **{"if": "absent"})
    with w.tool() as tool:  # the server as it is
        tool.must("put", key="third", text="x", **{"if": "absent"})
        tool.must("put", key="fourth", text="x", **{"if": "absent"})
        tool.fails("EEXIST", "put", key="fourth", text="x", **{"if": "absent"})
    assert len(w.proxy.seen("PUT", "/third$")) == 2 and len(w.proxy.seen("PUT", "/fourth$")) == 2, w.proxy.requests


def dead_address(w):
    """A name that moves: its old address answers no more, the new one is found without a restart."""
    hosts = w.dir / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.9 s3.mobula.test\n")
    wrapper = w.dir / "in-own-hosts"
    wrapper.write_text(f"#!/bin/sh\nmount --bind {hosts} /etc/hosts && exec {TOOL} \"$@\"\n")
    wrapper.chmod(0o755)
    unshare = w.dir / "tool"
    unshare.write_text(f"#!/bin/sh\nexec unshare --mount --map-root-user {wrapper} \"$@\"\n")
    unshare.chmod(0o755)
    env = w.server.environment(f"http://s3.mobula.test:{w.proxy.port}", NO_PROXY="*")
    with servers.Tool(str(unshare), env) as tool:
        tool.send("put", key="moved", text="x")
        servers.wait_for("a failed attempt", lambda: "retry in" in tool.text())
        hosts.write_text("127.0.0.1 localhost\n127.0.0.1 s3.mobula.test\n")
        answer = tool.answer()
        assert answer["code"] == "OK" and answer["ms"] < 20000, answer
    assert w.proxy.seen("PUT", "/moved$")


CASES = [storms, resets, parts_and_transfers, parts_of_another_size, lost_answers, errors_in_200, stalls,
         losses, connections, outages, cuts, regions, broken_bytes, checksums, no_conditions,
         ignored_conditions, dead_address]


def main():
    kind, _, how = sys.argv[2].partition("-")
    assert how in ("", "https"), how
    only = sys.argv[3:]
    with tempfile.TemporaryDirectory(prefix="mobula-s3-") as directory:
        # A name below localhost is never looked up: that one moves without TLS only.
        cases, options, tls = CASES, {}, {}
        if how:
            pki, port = servers.Certificates(directory), servers.free_port()
            cases = [case for case in CASES if case is not dead_address]
            options = {"certificates": pki, "virtual": True, "virtual_port": port}
            tls = {"certificate": pki.pair, "target_ca": pki.ca, "port": port}
        with servers.server(kind, directory, **options) as server:
            for case in cases:
                if only and case.__name__ not in only:
                    continue
                began = time.monotonic()
                with FaultProxy(server.port, **tls) as proxy:
                    case(World(server, proxy, pathlib.Path(directory)))
                print(f"ok   {sys.argv[2]} {case.__name__} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
