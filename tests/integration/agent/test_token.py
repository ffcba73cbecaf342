"""A cluster with --token-file, as its users see it: test_token.py BIN_DIR

Two nodes of one machine; a job that is a gang over both, submitted by mobula and by Ray's own
command; then callers with no token and with a wrong one. The token stands in no log.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ray_head import free_port  # noqa: E402

TOKEN = "s3cret-of-this-test"
RAY = pathlib.Path(sys.executable).parent / "ray"
BARE = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}


def with_token(token):
    return {**BARE, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def call(env, cwd, *words):
    done = subprocess.run([str(w) for w in words], env=env, cwd=cwd, timeout=90,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def check(name, got, want):
    code, text = got
    assert code == want, f"{name}: status {code}, not {want}:\n{text}"
    print(f"ok   {name}", flush=True)


def run(mobula, folder):
    gcs, http = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    ports = ["--port", gcs.split(":")[1], "--dashboard-port", http.rsplit(":", 1)[1]]
    start = [mobula, "start", "--temp-dir", folder]
    gang = ["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", "echo rank $RANK"]
    own = with_token(TOKEN)

    # The path is relative: what runs elsewhere on the node must find the file all the same.
    check("a head", call(BARE, folder, *start, "--head", *ports, "--token-file", "token"), 0)
    check("a second node, by its environment", call(own, folder, *start, "--address", gcs), 0)
    check("a third with a wrong token ends",
          call(with_token("wrong"), folder, *start, "--address", gcs), 77)
    check("mobula's job", call(own, "/", mobula, "job", "submit", "--address", http, "--", *gang), 0)
    check("Ray's job", call(own, "/", RAY, "job", "submit", "--address", http, "--", *gang), 0)
    for name, env in ("no token", BARE), ("a wrong token", with_token("wrong")):
        check(f"{name}: job list", call(env, "/", mobula, "job", "list", "--address", http), 77)
        check(f"{name}: health-check", call(env, "/", mobula, "health-check", "--address", gcs), 1)
    logs = [p for p in pathlib.Path(folder).rglob("*.log")]
    assert logs
    for p in logs:
        assert TOKEN not in p.read_text(errors="replace"), f"{p} holds the token"
    print(f"ok   no token in {len(logs)} logs", flush=True)


def main():
    mobula = pathlib.Path(sys.argv[1], "mobula")
    folder = tempfile.mkdtemp(prefix="mbtoken-")
    try:
        pathlib.Path(folder, "token").write_text(TOKEN + "\n")
        run(mobula, folder)
    except BaseException:
        for p in pathlib.Path(folder).rglob("agent.log"):
            print(f"--- {p}\n{p.read_text(errors='replace')[-4000:]}", flush=True)
        raise
    finally:
        stopped = call(BARE, "/", mobula, "stop", "--temp-dir", folder)
        shutil.rmtree(folder)
    check("stop", stopped, 0)


if __name__ == "__main__":
    main()
