"""Commands that users give, ours and Ray's, and what they have to say."""

import os
import pathlib
import subprocess
import sys

RAY = str(pathlib.Path(sys.executable).parent / "ray")
TOKEN = "s3cret-of-this-test"
GANG = ["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", "echo this is rank $RANK"]
DEADLINE_S = 300


def clean_env(**more):
    """Nothing of a Ray that the caller may be in."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, **more}


def with_token(token=TOKEN):
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def machine_ip():
    """What Ray makes of 127.0.0.1: the address by which others reach this machine."""
    import ray
    return ray.util.get_node_ip_address()


def call(env, *words, cwd="/"):
    """The exit status, and what was printed to either stream."""
    done = subprocess.run([str(w) for w in words], env=env, cwd=cwd, timeout=DEADLINE_S,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.decode(errors="replace")


def check(name, got, want, *says):
    code, text = got
    assert code == want, f"{name}: status {code}, not {want}:\n{text}"
    for word in says:
        assert word in text, f"{name}: not a word of {word!r}:\n{text}"
    print(f"ok   {name}", flush=True)
    return text
