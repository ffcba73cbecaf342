"""What surrounds the S3 client: a real HTTP proxy (tinyproxy), a clock that is wrong, and those who would like to read
its secrets: test_surroundings.py STORE_TOOL SKEWED_CLOCK"""

import contextlib
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import servers

TOOL, SKEWED_CLOCK = map(os.path.abspath, sys.argv[1:3])


@contextlib.contextmanager
def tinyproxy(directory):
    """Yields its port and a function that counts the requests it has served."""
    port = servers.free_port()
    log = pathlib.Path(directory, "tinyproxy.log")
    config = pathlib.Path(directory, "tinyproxy.conf")
    config.write_text(f"Port {port}\nListen 127.0.0.1\nTimeout 60\nMaxClients 50\nAllow 127.0.0.1\n"
                      f"LogFile \"{log}\"\nLogLevel Connect\n")
    process = subprocess.Popen(["tinyproxy", "-d", "-c", str(config)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        servers.wait_for("tinyproxy listens", lambda: log.exists() and servers.listens(port))
        yield port, lambda: log.read_text().count("Request (file descriptor")
    finally:
        process.terminate()
        process.wait()


def proxies(directory):
    certificates = servers.Certificates(directory)
    path = pathlib.Path(directory, "file")
    path.write_bytes(os.urandom(3 << 20))
    copy = pathlib.Path(directory, "copy")
    with tinyproxy(directory) as (port, served):
        proxy = f"http://127.0.0.1:{port}"
        for tls, names in (False, ["HTTP_PROXY", "http_proxy"]), (True, ["HTTPS_PROXY", "https_proxy"]):
            with servers.server("versitygw", directory, certificates=certificates if tls else None) as server:
                for name in names:
                    before = served()
                    with servers.Tool(TOOL, server.environment(**{name: proxy, "NO_PROXY": ""})) as tool:
                        tool.must("put", key="a+b = c", text="x")
                        assert tool.must("get", key="a+b = c")["data"] == "x"
                        tool.must("put_file", key="file", path=str(path))
                        tool.must("get_file", key="file", path=str(copy))
                        assert copy.read_bytes() == path.read_bytes()
                    assert served() > before, f"{name} was not used"
                    before = served()
                    for without in "127.0.0.1", "example.com,127.0.0.1", "*":
                        with servers.Tool(TOOL, server.environment(**{name: proxy, "NO_PROXY": without})) as tool:
                            tool.must("put", key="k", text="x")
                    assert served() == before, f"NO_PROXY was not heeded with {name}"


def clocks(directory):
    """The servers refuse a time that is 15 minutes off; the client learns theirs."""
    for kind in servers.KINDS:
        with servers.server(kind, directory) as server:
            for skew in "-7200", "86400":
                with servers.Tool(TOOL, server.environment(LD_PRELOAD=SKEWED_CLOCK, SKEW_SECONDS=skew)) as tool:
                    tool.must("put", key="k", text="x")
                    tool.must("get", key="k")
                    tool.must("many", n=5, text="x")
                    assert tool.text().count("clock differs") == 1, tool.text()
                # The answer to a HEAD that comes first has no body to say what is wrong.
                with servers.Tool(TOOL, server.environment(LD_PRELOAD=SKEWED_CLOCK, SKEW_SECONDS=skew)) as tool:
                    assert tool.must("head", key="k")["size"] == 1
                    tool.fails("ENOENT", "head", key="none")
                    assert tool.text().count("clock differs") == 1, tool.text()


def secrets(directory):
    """Nothing of a secret in arguments, logs, errors; no core dump; another process of this user may not look."""
    secret = "hush-" + "".join(chr(97 + b % 26) for b in os.urandom(24))
    token = "token-" + secret
    with servers.server("versitygw", directory) as server:
        env = server.environment(AWS_ACCESS_KEY_ID=servers.ACCESS_KEY,
                                 AWS_SECRET_ACCESS_KEY=secret, AWS_SESSION_TOKEN=token)
        del env["BUCKET_STORAGE_ACCESS_KEY"], env["BUCKET_STORAGE_SECRET_KEY"]
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        where = pathlib.Path(directory, "cores")
        elsewhere = pathlib.Path(directory, "other-cores")
        for d in where, elsewhere:
            d.mkdir()
            d.chmod(0o777)
        os.chmod(directory, 0o755)
        mine = shutil.copy(TOOL, directory)
        # root may look at everything, so where this runs as root the client and who looks at it are somebody else.
        somebody = {"user": 65534} if os.getuid() == 0 else {}
        tool = servers.Tool(mine, env, cwd=where, **somebody)
        answer = tool.fails("EDENIED", "put", key="k", text="x")
        pid = tool.process.pid
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        for word in secret, token:
            assert word not in answer["text"] and word not in tool.text(), "a secret was told"
            assert word.encode() not in command
        sleeper = subprocess.Popen(["sleep", "60"], env=env, cwd=elsewhere, **somebody)
        for other, open_to_others in (sleeper.pid, True), (pid, False):
            for name in "environ", "maps":
                seen = subprocess.run(["cat", f"/proc/{other}/{name}"], capture_output=True, **somebody)
                assert (seen.returncode == 0) == open_to_others, (name, open_to_others, seen.stderr)
        # A signal that dumps the core of any other process dumps none of this one.
        for process in sleeper, tool.process:
            process.send_signal(signal.SIGQUIT)
        dumped = [core_was_dumped(p) for p in (sleeper, tool.process)]
        assert not dumped[1] and not list(where.iterdir()), "a core was dumped"
        cores = [f.read_bytes() for f in elsewhere.iterdir()]
        print(f"     of another process {'a core was' if dumped[0] else 'no core was'} dumped"
              f"{', with the secret in it' if any(secret.encode() in c for c in cores) else ''}; of the client none")
        tool.process.stdin.close()
        tool.process.stdout.close()
        tool.log.close()


def core_was_dumped(process):
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -signal.SIGQUIT
    assert os.WIFSIGNALED(status), status
    return os.WCOREDUMP(status)


CASES = [proxies, clocks, secrets]


def main():
    only = sys.argv[3:]
    for case in CASES:
        if only and case.__name__ not in only:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mobula-s3-") as directory:
            case(directory)
        print(f"ok   {case.__name__} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
