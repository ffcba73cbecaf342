"""A multipart upload to a real S3 server survives the agent's SIGKILL, and the server's absence for longer
than a request is repeated: test_upload_s3.py BIN_DIR

The server is versitygw: $MOBULA_VERSITYGW or ~/.cache/mobula/bin/versitygw.
"""

import filecmp
import os
import pathlib
import signal
import socket
import subprocess
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "s3")]
import cluster  # noqa: E402
from faults import FaultProxy, hold  # noqa: E402

SIZE = 200 << 20
PROGRAM = os.environ.get("MOBULA_VERSITYGW",
                         os.path.expanduser("~/.cache/mobula/bin/versitygw"))


def connects(port):
    with socket.socket() as c:
        return c.connect_ex(("127.0.0.1", port)) == 0


class Server:
    def __init__(self, directory):
        self.root = pathlib.Path(directory, "s3")
        (self.root / "bucket").mkdir(parents=True)
        with socket.socket() as c:
            c.bind(("127.0.0.1", 0))
            self.port = c.getsockname()[1]
        self.start()
        self.proxy = FaultProxy(self.port).__enter__()

    def keep_back(self):
        """All but the first parts, until release(): whatever happens meanwhile, the upload is not over."""
        self.proxy.rule("PUT", "big.pt.*partNumber=", hold(), skip=5)

    def release(self):
        self.proxy.clear()

    def start(self):
        self.process = subprocess.Popen(
            [PROGRAM, "--port", f"127.0.0.1:{self.port}", "--access", "testkey", "--secret",
             "testsecret123", "--keep-alive", "--quiet", "posix", str(self.root)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cluster.wait_for("the S3 server", lambda: connects(self.port))

    def env(self):
        return {"BUCKET_STORAGE_HOST": f"http://127.0.0.1:{self.proxy.port}",
                "BUCKET_STORAGE_ACCESS_KEY": "testkey",
                "BUCKET_STORAGE_SECRET_KEY": "testsecret123", "NO_PROXY": "127.0.0.1"}

    def parts(self):
        """Part files of unfinished uploads: name -> (inode, size, time of the last change)."""
        found = {}
        # os.walk: the server moves and removes directories while they are read.
        for directory, _, names in os.walk(self.root / "bucket" / ".sgwtmp"):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    st = os.stat(path)
                except FileNotFoundError:
                    continue
                found[path] = (st.st_ino, st.st_size, st.st_mtime_ns)
        return found

    def whole_parts(self):
        return {n: p for n, p in self.parts().items() if p[1] >= 16 << 20}

    def stop(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.proxy.__exit__()
        self.stop()


def upload_of(part):
    return pathlib.Path(part).parent.name.split(".")[0]  # while it is completed the name has a tail


def kill_agent(server, node):
    node.wait_alive(other_than_pid=node.kill_agent())
    return server.release


def outage(server, node):
    """Until the uploader has the file back, to look at the fence before it tries again."""
    server.proxy.refuse = True
    server.stop()
    server.proxy.cut()
    cluster.wait_for("the file is given back", lambda: "big.pt" in node.log() and "(try 1 of" in node.log())
    server.start()

    def ends():
        server.release()
        server.proxy.refuse = False

    return ends


def run_stopped(s, server):
    """The node is told to stop, and its agent crashes while it sends what was saved: it is started again for that."""
    node = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0", env=server.env())
    gcs = cluster.Gcs(s, node.wait_alive()["gcs_address"])
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    local = pathlib.Path(s.dir, "local")
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    server.keep_back()
    d.launch(["/bin/sh", "-c", f"mkdir -p $D/iter_0000001 && head -c {SIZE} /dev/urandom > "
              "$D/iter_0000001/big.pt && printf 1 > $D/latest_checkpointed_iteration.txt; sleep 1000"],
             env=[f"D={local}"],
             checkpoint={"local_dir": str(local), "url": "s3://bucket/run", "watch_tracker": True})
    d.expect("launched")
    cluster.wait_for("parts on the server", lambda: len(server.whole_parts()) > 3)
    node.process.send_signal(signal.SIGTERM)
    cluster.wait_for("the agent is told", lambda: "received SIGTERM" in node.log())
    target = server.root / "bucket/run/iter_0000001/big.pt"
    node.kill_agent()
    assert not target.exists(), "the upload was over before the trouble"
    server.release()
    assert node.process.wait(cluster.DEADLINE_S) == 0, node.log()
    assert filecmp.cmp(local / "iter_0000001/big.pt", target, shallow=False)
    assert (server.root / "bucket/run/latest_checkpointed_iteration.txt").read_text() == "1"
    print("     stopped and killed: what was saved is durable", flush=True)


def run(s, server, trouble):
    node = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0", env=server.env())
    gcs = cluster.Gcs(s, node.wait_alive()["gcs_address"])
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    local = pathlib.Path(s.dir, "local")
    checkpoint = {"local_dir": str(local), "url": "s3://bucket/run", "watch_tracker": True}
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    server.keep_back()
    d.launch(["/bin/sh", "-c", f"mkdir -p $D/iter_0000001 && head -c {SIZE} /dev/urandom > "
              "$D/iter_0000001/big.pt && printf 1 > $D/latest_checkpointed_iteration.txt"],
             env=[f"D={local}"], checkpoint=checkpoint)
    d.expect("launched")
    cluster.wait_for("parts on the server", lambda: len(server.whole_parts()) > 3)
    whole = server.whole_parts()
    target = server.root / "bucket/run/iter_0000001/big.pt"
    ends = trouble(server, node)
    assert not target.exists(), "the upload was over before the trouble"
    ends()
    again = set()
    uploads = {upload_of(n) for n in whole}

    def finished():
        for n, p in server.parts().items():
            if p != whole.get(n, p):
                again.add(n)
            if p[1] >= 16 << 20:
                uploads.add(upload_of(n))
        return target.exists()

    cluster.wait_for("the object", finished)
    if trouble == kill_agent:
        d = cluster.Driver(s, node.grpc_address(), pg)
        assert d.expect("hello_reply").running
        d.expect("launched")
    assert d.expect("rank_exit").exit_code == 0
    d.send(end={})
    d.expect("ended")
    assert d.uploads[-1].committed, d.uploads
    assert filecmp.cmp(local / "iter_0000001/big.pt", target, shallow=False)
    latest = server.root / "bucket/run/latest_checkpointed_iteration.txt"
    assert latest.read_text() == "1"
    assert not again, f"parts were sent again: {again}"
    assert len(uploads) == 1, f"begun anew: {uploads}"
    print(f"     {trouble.__name__}: {len(whole)} parts were there, none was sent again", flush=True)
    assert node.stop() == 0


def main():
    if not os.access(PROGRAM, os.X_OK):
        sys.exit(f"no S3 server {PROGRAM}: tools/test builds it; MOBULA_VERSITYGW names another one")
    for trouble in kill_agent, outage:
        with cluster.Sandbox() as s:
            server = Server(s.dir)
            try:
                run(s, server, trouble)
            finally:
                server.close()
    with cluster.Sandbox() as s:
        server = Server(s.dir)
        try:
            run_stopped(s, server)
        finally:
            server.close()
    print("ok   multipart_upload_resumed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
