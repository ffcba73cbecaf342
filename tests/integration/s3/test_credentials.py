"""Where credentials come from, each way to a real server that checks the signatures: test_credentials.py STORE_TOOL KIND [CASE...]

KIND: minio, or minio-https with TLS and the bucket in the host's name.

The keys are temporary ones of a real MinIO. What hands them out is a stand-in: see identities.py.
"""

import contextlib
import os
import pathlib
import re
import sys
import tempfile
import time

import servers
from faults import error
from identities import Identities, assume_role, sts_is_up

TOOL, KIND = sys.argv[1:3]
WEB_IDENTITY = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/train", "AWS_ROLE_SESSION_NAME": "node+1"}


class World:
    def __init__(self, server, proxy, reach, identities, directory):
        self.server, self.proxy, self.identities, self.dir = server, proxy, identities, directory
        self.reach = reach  # what processes with keys would need to reach the proxy
        self.secrets = [*identities.keys[1:], servers.SECRET_KEY]

    def env(self, **more):
        """No keys, and nothing of this machine's own; proxies that are dead."""
        env = {**self.reach, "AWS_ENDPOINT_URL_S3": self.reach["BUCKET_STORAGE_HOST"], "HOME": str(self.dir),
               "AWS_EC2_METADATA_DISABLED": "true"}
        for name in "HOST", "ACCESS_KEY", "SECRET_KEY":
            del env[f"BUCKET_STORAGE_{name}"]
        env.update(more)
        return {k: v for k, v in env.items() if v is not None}

    @contextlib.contextmanager
    def tool(self, **env):
        with servers.Tool(TOOL, self.env(**env)) as tool:
            try:
                yield tool
            finally:
                log = tool.text()
        for secret in self.secrets:
            assert secret not in log, "a secret is in the log"

    def write(self, name, text):
        path = self.dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    def used(self):
        """The access key of the newest request."""
        return self.proxy.requests[-1].header("Authorization").split("Credential=")[1].split("/")[0]


def check(w, tool, key="k"):
    tool.must("put", key=key, text="text")
    assert tool.must("get", key=key)["data"] == "text"


def environment(w):
    keys = w.identities.keys
    with w.tool(AWS_ACCESS_KEY_ID=keys[0], AWS_SECRET_ACCESS_KEY=keys[1], AWS_SESSION_TOKEN=keys[2]) as tool:
        check(w, tool)
        assert w.used() == keys[0]
        # Keys that stand in the environment cannot be fetched anew: what the server says is the end.
        w.proxy.rule("PUT", "", error(400, "ExpiredToken"), times=1)
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "ExpiredToken" in answer["text"], answer
    # The store's own names go first.
    with w.tool(AWS_ACCESS_KEY_ID="other", AWS_SECRET_ACCESS_KEY="other-secret",
                BUCKET_STORAGE_ACCESS_KEY=servers.ACCESS_KEY, BUCKET_STORAGE_SECRET_KEY=servers.SECRET_KEY) as tool:
        check(w, tool)
        assert w.used() == servers.ACCESS_KEY
    with w.tool(BUCKET_STORAGE_ACCESS_KEY="half") as tool:
        answer = tool.fails("EDENIED", "open")
        assert "BUCKET_STORAGE_SECRET_KEY is not" in answer["text"], answer
    # A temporary key without its token is nobody's.
    with w.tool(AWS_ACCESS_KEY_ID=keys[0], AWS_SECRET_ACCESS_KEY=keys[1]) as tool:
        tool.fails("EDENIED", "put", key="k", text="x")


def web_identity(w):
    i = w.identities
    token_file = w.write("token", "token-1\n")
    with w.tool(AWS_ENDPOINT_URL_STS=i.url, AWS_WEB_IDENTITY_TOKEN_FILE=token_file, **WEB_IDENTITY) as tool:
        check(w, tool)
        check(w, tool)
        assert i.requests == ["POST /"], i.requests
        # The server says that they are over: fetched anew with the token that is in the file now.
        i.token = "token-2"
        w.write("token", "token-2")
        w.proxy.rule("PUT", "", error(400, "ExpiredToken"), times=1)
        check(w, tool)
        assert i.requests == ["POST /"] * 2, i.requests
        # The answer to a HEAD has no body that would say so.
        w.proxy.rule("HEAD", "", error(400), times=1)
        tool.must("head", key="k")
        assert i.requests == ["POST /"] * 3, i.requests
        # A token that STS refuses is said, with STS's word for it.
        i.token = "token-3"
        w.proxy.rule("PUT", "", error(400, "ExpiredToken"), times=1)
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "ExpiredTokenException" in answer["text"] and "token-2" not in answer["text"], answer
        i.token = "token-2"
        check(w, tool)
        # An STS that is busy is asked again.
        w.proxy.rule("PUT", "", error(400, "ExpiredToken"), times=1)
        i.status, i.code = 503, "ServiceUnavailable"
        before = len(i.requests)
        tool.send("put", key="k", text="x")
        servers.wait_for("two attempts", lambda: len(i.requests) >= before + 2)
        i.status = 200
        assert tool.answer()["code"] == "OK"
    with w.tool(AWS_ENDPOINT_URL_STS=i.url, AWS_WEB_IDENTITY_TOKEN_FILE=str(w.dir / "nope"), **WEB_IDENTITY) as tool:
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "nope" in answer["text"], answer


def renewal(w):
    """Keys are fetched anew before they end, behind the back of requests; a failure of that is no failure yet."""
    i = w.identities
    i.lifetime_s = 10
    env = {"AWS_ENDPOINT_URL_STS": i.url, "AWS_WEB_IDENTITY_TOKEN_FILE": w.write("token", i.token), **WEB_IDENTITY}
    with w.tool(**env) as tool:
        check(w, tool)
        end = time.monotonic() + 60
        while len(i.requests) < 2:
            assert time.monotonic() < end, i.requests
            check(w, tool)
        i.status, i.code = 500, "InternalFailure"
        before = len(i.requests)
        while len(i.requests) < before + 1:
            assert time.monotonic() < end, i.requests
            check(w, tool)
        check(w, tool)
        servers.wait_for("the warning", lambda: check(w, tool) or "the old ones are still good" in tool.text())
        i.status = 200
        i.lifetime_s = 3600
        check(w, tool)


def container(w):
    i = w.identities
    url = i.url + "/container?id=1"
    token = w.write("container-token", i.token + "\n")
    with w.tool(AWS_CONTAINER_CREDENTIALS_FULL_URI=url, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=token,
                HTTP_PROXY="http://127.0.0.1:1", http_proxy="http://127.0.0.1:1") as tool:
        check(w, tool)
        assert i.requests == ["GET /container?id=1"], i.requests
    with w.tool(AWS_CONTAINER_CREDENTIALS_FULL_URI=url, AWS_CONTAINER_AUTHORIZATION_TOKEN=i.token) as tool:
        check(w, tool)
    with w.tool(AWS_CONTAINER_CREDENTIALS_FULL_URI=url, AWS_CONTAINER_AUTHORIZATION_TOKEN="wrong") as tool:
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "401" in answer["text"], answer
    with w.tool(AWS_CONTAINER_CREDENTIALS_FULL_URI="http://example.com/x") as tool:
        answer = tool.fails("EINVAL", "open")
        assert "AWS_CONTAINER_CREDENTIALS_FULL_URI" in answer["text"], answer


def metadata(w):
    i = w.identities
    env = {"AWS_EC2_METADATA_DISABLED": None, "AWS_EC2_METADATA_SERVICE_ENDPOINT": i.url + "/",
           "AWS_METADATA_SERVICE_TIMEOUT": "10"}
    base = "/latest/meta-data/iam/security-credentials/"
    with w.tool(http_proxy="http://127.0.0.1:1", **env) as tool:
        check(w, tool)
        assert i.requests == ["PUT /latest/api/token", "GET " + base, "GET " + base + "train%2Ber"], i.requests
    for i.role in ("", None):
        with w.tool(**env) as tool:
            answer = tool.fails("EDENIED", "put", key="k", text="x")
            assert "no S3 credentials" in answer["text"], answer
    # Nothing there: said soon, not after a minute.
    dead = f"http://127.0.0.1:{servers.free_port()}"
    with w.tool(**{**env, "AWS_EC2_METADATA_SERVICE_ENDPOINT": dead}) as tool:
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "no S3 credentials" in answer["text"] and "BUCKET_STORAGE_ACCESS_KEY" in answer["text"], answer
    # Nothing is named at all: said when the store is opened, before anything is begun that would need it.
    with w.tool() as tool:
        answer = tool.fails("EDENIED", "open")
        assert "no S3 credentials" in answer["text"], answer
    with w.tool(AWS_EC2_METADATA_DISABLED=None, BUCKET_STORAGE_HOST=dead) as tool:
        tool.fails("EDENIED", "open")


def files(w):
    keys = w.identities.keys
    profile = "aws_access_key_id = {}\naws_secret_access_key = {} # of MinIO\naws_session_token={}\n".format(*keys)
    w.write(".aws/credentials", f"# ours\n[default]\n{profile}\n[old]\naws_access_key_id=gone\naws_secret_access_key=s\n")
    w.write(".aws/config", "[default]\nregion = eu-west-1\ns3 =\n  max_concurrent_requests = 20\n[profile chained]\n"
            "role_arn = arn:aws:iam::1:role/x\nsource_profile = default\n[profile role]\n"
            f"role_arn = {WEB_IDENTITY['AWS_ROLE_ARN']}\nweb_identity_token_file = {w.write('token', w.identities.token)}\n")
    with w.tool() as tool:
        check(w, tool)
        assert w.used() == keys[0]
        assert "/eu-west-1/s3/" in w.proxy.requests[0].header("Authorization"), "the profile's region was not used"
    with w.tool(AWS_PROFILE="old") as tool:
        tool.fails("EDENIED", "put", key="k", text="x")
        # Rotated: the file is read again when the server knows the key no more.
        w.write(".aws/credentials", f"[old]\n{profile}")
        check(w, tool)
    with w.tool(AWS_PROFILE="chained") as tool:
        answer = tool.fails("EUNSUPPORTED", "put", key="k", text="x")
        assert "source_profile" in answer["text"], answer
    with w.tool(AWS_PROFILE="role", AWS_ENDPOINT_URL_STS=w.identities.url) as tool:
        check(w, tool)
        assert w.identities.requests == ["POST /"], w.identities.requests
    with w.tool(AWS_PROFILE="nobody") as tool:
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        assert "nobody" in answer["text"] and ".aws/config" in answer["text"], answer
    other = w.write("elsewhere", f"[x]\n{profile}")
    with w.tool(AWS_SHARED_CREDENTIALS_FILE=other, AWS_CONFIG_FILE="/nope", AWS_DEFAULT_PROFILE="x") as tool:
        check(w, tool)


def permissions(w):
    """Keys that may read and not write."""
    policy = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": ' \
        '["arn:aws:s3:::bucket/*"]}]}'
    keys = assume_role(w.server, policy)
    with w.tool(AWS_ACCESS_KEY_ID=servers.ACCESS_KEY, AWS_SECRET_ACCESS_KEY=servers.SECRET_KEY) as tool:
        tool.must("put", key="readable", text="text")
    with w.tool(AWS_ACCESS_KEY_ID=keys[0], AWS_SECRET_ACCESS_KEY=keys[1], AWS_SESSION_TOKEN=keys[2]) as tool:
        assert tool.must("get", key="readable")["data"] == "text"
        for op in "put", "delete", "list":
            answer = tool.fails("EDENIED", op, key="readable", text="x")
            assert "AccessDenied" in answer["text"], answer
        assert tool.must("get", key="readable")["data"] == "text"


def copies(pid, word):
    """Of a word in what a process may write to: in pages that core dumps leave out, and in all others."""
    found = {True: 0, False: 0}
    with open(f"/proc/{pid}/smaps") as smaps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in smaps:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
                begin, end, rights = int(match[1], 16), int(match[2], 16), match[3]
            elif line.startswith("VmFlags:") and rights.startswith("rw"):
                memory.seek(begin)
                found["dd" in line.split()] += memory.read(end - begin).count(word.encode())
    return found[True], found[False]


def memory(w):
    """A secret key lies where core dumps do not go, and nowhere else: what it went through on its way was overwritten."""
    if os.getuid() != 0:
        print("     skipped: only root may look at the memory of a client")
        return
    keys = w.identities.keys
    w.write(".aws/credentials", "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\naws_session_token={}\n".format(*keys))
    token_file = w.write("token", w.identities.token)
    for env in ({}, {"AWS_ENDPOINT_URL_STS": w.identities.url, "AWS_WEB_IDENTITY_TOKEN_FILE": token_file, **WEB_IDENTITY},
                {"AWS_CONTAINER_CREDENTIALS_FULL_URI": w.identities.url + "/container?id=1",
                 "AWS_CONTAINER_AUTHORIZATION_TOKEN": w.identities.token, "AWS_SHARED_CREDENTIALS_FILE": "/nope"}):
        with w.tool(**env) as tool:
            check(w, tool)
            hidden, elsewhere = copies(tool.process.pid, keys[1])
            assert hidden == 1 and elsewhere == 0, (env, hidden, elsewhere)


CASES = [environment, web_identity, renewal, container, metadata, files, permissions, memory]


def main():
    only = sys.argv[3:]
    with tempfile.TemporaryDirectory(prefix="mobula-s3-") as directory:
        with servers.behind_a_proxy(KIND, directory) as (server, proxy, reach):
            servers.wait_for("MinIO's own STS", lambda: sts_is_up(server))
            for case in CASES:
                if only and case.__name__ not in only:
                    continue
                began = time.monotonic()
                home = pathlib.Path(tempfile.mkdtemp(dir=directory))
                proxy.clear()
                proxy.requests.clear()
                with Identities(assume_role(server)) as identities:
                    case(World(server, proxy, reach, identities, home))
                print(f"ok   {case.__name__} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
