"""Every store operation against a real server, plain and TLS, path and virtual-host: test_store.py STORE_TOOL KIND"""

import hashlib
import os
import pathlib
import sys
import tempfile
import time

import servers
from faults import FaultProxy

TOOL = sys.argv[1]
MIB = 1 << 20
NAMES = ["plain", "dir/with space", "a+b=c:d@e,f;g", "\u00e9/\u20ac", "p%20q&r?s#t", "(x)'*!~", "a=b/c=d+e", "\U0001f40b",
         "dir/deep/er/0"]


def small_objects(tool):
    for name in NAMES:
        tag = tool.must("put", key=name, text=name)["etag"]
        got = tool.must("get", key=name)
        assert (got["data"], got["etag"]) == (name, tag), got
        head = tool.must("head", key=name)
        assert (head["size"], head["etag"]) == (len(name.encode()), tag), head
    assert tool.must("list", prefix="")["keys"] == sorted(NAMES, key=str.encode)
    assert tool.must("list", prefix="dir/")["keys"] == ["dir/deep/er/0", "dir/with space"]
    tool.must("put", key="empty", text="")
    assert tool.must("get", key="empty")["size"] == 0
    tool.fails("EFULL", "get", key="plain", max=3)
    for name in NAMES + ["empty"]:
        tool.must("delete", key=name)
        tool.must("delete", key=name)
        tool.fails("ENOENT", "head", key=name)
        tool.fails("ENOENT", "get", key=name)
    assert tool.must("list", prefix="")["keys"] == []


def ranges(tool):
    first = tool.must("put", key="r", text="0123456789")["etag"]
    assert tool.must("range", key="r", offset=3, size=4, etag=first)["data"] == "3456"
    assert tool.must("range", key="r", offset=8, size=4)["data"] == "89"
    tool.must("put", key="r", text="other bytes")
    tool.fails("ESTATE", "range", key="r", offset=3, size=4, etag=first)


def conditions(tool):
    tool.fails("EEXIST", "put", key="latest", text="10", **{"if": "match"}, etag='"0123"')
    first = tool.must("put", key="latest", text="10", **{"if": "absent"})["etag"]
    tool.fails("EEXIST", "put", key="latest", text="11", **{"if": "absent"})
    tool.must("put", key="latest", text="20", **{"if": "match"}, etag=first)
    tool.fails("EEXIST", "put", key="latest", text="30", **{"if": "match"}, etag=first)
    assert tool.must("get", key="latest")["data"] == "20"


def write_file(path, size):
    block = os.urandom(MIB)
    with open(path, "wb") as f:
        for i in range(0, size, MIB):
            f.write(i.to_bytes(8, "little") + block[8:min(MIB, size - i)] if size - i > 8 else block[:size - i])
    return path


def digest(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha1").hexdigest() if hasattr(hashlib, "file_digest") else \
            hashlib.sha1(f.read()).hexdigest()


def files(tool, directory):
    for name, size in ("zero", 0), ("ten", 10), ("big", 70 * MIB + 12345):
        path = write_file(directory / name, size)
        sent = tool.must("put_file", key=f"f/{name}+ =", path=str(path))
        assert sent["size"] == size and ("upload_id" in sent) == (size > 64 * MIB), sent
        copy = directory / "copy"
        tool.must("get_file", key=f"f/{name}+ =", path=str(copy))
        assert digest(copy) == digest(path), name
        copy.unlink()
    # A completed upload is not known any more: the object itself proves that nothing is left to do.
    again = tool.must("put_file", key="f/big+ =", path=str(directory / "big"), resume=sent["upload_id"])
    assert "upload_id" not in again, again
    tool.fails("ENOENT", "put_file", key="x", path="/nope")
    tool.fails("ENOENT", "get_file", key="nope", path=str(directory / "nope"))
    assert not (directory / "nope").exists()


def holes(tool, directory):
    """A hole within a part, over parts, and up to the end; of a single PUT as well."""
    for name, size in ("sparse", 90 * MIB + 77), ("small-sparse", 3 * MIB + 5):
        path = directory / name
        with open(path, "wb") as f:
            for at in 0, size // 2:
                f.seek(at)
                f.write(os.urandom(100000))
            f.truncate(size)
        tool.must("put_file", key=name, path=str(path))
        copy = directory / "copy"
        tool.must("get_file", key=name, path=str(copy))
        assert digest(copy) == digest(path), name
        copy.unlink()
        path.unlink()


def resume(tool, server, directory):
    path = str(directory / "big")
    stopped = tool.fails("ECANCELED", "put_file", key="resume", path=path, stop_at=1)
    tool.fails("ENOENT", "head", key="resume")
    resumed = tool.must("put_file", key="resume", path=path, resume=stopped["upload_id"])
    assert "upload_id" not in resumed, "a new upload was begun"
    copy = directory / "copy"
    tool.must("get_file", key="resume", path=str(copy))
    assert digest(copy) == digest(path)
    copy.unlink()


def many(tool):
    tool.must("many", n=1010, text="x")
    assert len(tool.must("list", prefix="many/")["keys"]) == 1010  # a page is 1000


def refusals(server):
    """Wrong things a user can say, and that the answer names the thing and no secret."""
    secret = "not-the-secret-at-all"
    with servers.Tool(TOOL, server.environment(BUCKET_STORAGE_SECRET_KEY=secret)) as tool:
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "SignatureDoesNotMatch" in answer["text"] and secret not in answer["text"], answer
        assert secret not in tool.text()
    with servers.Tool(TOOL, server.environment(BUCKET_STORAGE_ACCESS_KEY="nobody")) as tool:
        answer = tool.fails("EDENIED", "list", prefix="")
        assert "InvalidAccessKeyId" in answer["text"], answer
    with servers.Tool(TOOL, server.environment(), "s3://missing/p") as tool:
        for op in "put", "get", "list", "delete":
            answer = tool.fails("ENOENT", op, key="k", text="x")
            assert "NoSuchBucket" in answer["text"] and "missing" in answer["text"], answer
    if server.kind == "versitygw" and not server.virtual:  # MinIO's users without permission: test_credentials.py
        server.add_user("guest", "guest-secret")
        with servers.Tool(TOOL, server.environment(BUCKET_STORAGE_ACCESS_KEY="guest",
                                                   BUCKET_STORAGE_SECRET_KEY="guest-secret")) as tool:
            for op in "put", "get", "list", "delete":
                answer = tool.fails("EDENIED", op, key="ten", text="x")
                assert "AccessDenied" in answer["text"], answer
    # The region of both is us-east-1, and both say so when a request is signed for another.
    with servers.Tool(TOOL, server.environment(AWS_REGION="mars-north-1")) as tool:
        tool.must("put", key="region", text="x")
        assert "us-east-1" in tool.text(), tool.text()
    with servers.Tool(TOOL, server.environment(BUCKET_STORAGE_HOST=f"http://127.0.0.1:{servers.free_port()}")) as tool:
        answer = tool("put", key="k", text="x", timeout_ms=1500)
        assert answer["code"] in ("EUNAVAIL", "ETIMEOUT") and answer["ms"] < 20000, answer


def untrusted(server):
    """A certificate that nobody known signed, and one for another name."""
    env = server.environment()
    del env["AWS_CA_BUNDLE"]
    with servers.Tool(TOOL, env) as tool:
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "certificate" in answer["text"], answer
    with servers.Tool(TOOL, {**env, "SSL_CERT_FILE": server.certificates.ca}) as tool:
        tool.must("put", key="k", text="x")
    with FaultProxy(server.port, certificate=server.certificates.pair, target_ca=server.certificates.ca,
                    host="127.0.0.2") as proxy:
        wrong = f"https://127.0.0.2:{proxy.port}"
        with servers.Tool(TOOL, server.environment(wrong, BUCKET_STORAGE_ADDRESSING_STYLE="path",
                                                   NO_PROXY="*")) as tool:
            answer = tool.fails("EDENIED", "put", key="k", text="x")
            assert "127.0.0.2" in answer["text"], answer
        assert not proxy.requests, "a request went to a server whose name is not its certificate's"


def run(kind, directory, tls, virtual):
    certificates = servers.Certificates(directory) if tls else None
    with servers.server(kind, directory, certificates=certificates, virtual=virtual) as server:
        began = time.monotonic()
        with servers.Tool(TOOL, server.environment()) as tool:
            small_objects(tool)
            ranges(tool)
            conditions(tool)
            files(tool, directory)
            holes(tool, directory)
            resume(tool, server, directory)
            if not tls and not virtual:
                many(tool)
        refusals(server)
        if tls:
            untrusted(server)
        print(f"ok   {kind} {'https' if tls else 'http'} {'virtual' if virtual else 'path'} "
              f"{time.monotonic() - began:.1f} s", flush=True)


def main():
    for tls in False, True:
        for virtual in False, True:
            with tempfile.TemporaryDirectory(prefix="mobula-s3-") as directory:
                run(sys.argv[2], pathlib.Path(directory), tls, virtual)


if __name__ == "__main__":
    main()
