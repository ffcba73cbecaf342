"""100,000 small files through `mobula checkpoint push` and `pull`: test_many.py MOBULA KIND [--files N]

KIND-https: with TLS, and the bucket in the host's name.
Bounds: the wall clock of either, and the memory of the program at its peak.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import tempfile
import time

import servers

URL = f"s3://{servers.BUCKET}/many"
IN_A_DIRECTORY = 1000
FILES_PER_SECOND = 150  # at least, on a machine that is busy with other things
RSS_BYTES_PER_FILE, RSS_BYTES = 600, 60 << 20  # twice what a push of 100,000 was measured to take


def content(i):
    return hashlib.sha256(str(i).encode()).digest() * (i % 7)  # 0 to 192 bytes


def name(i):
    return f"{i // IN_A_DIRECTORY:03}/shard-{i:06}"


def make(top, n):
    directory = top / "iter_0000001"
    for i in range(n):
        if i % IN_A_DIRECTORY == 0:
            (directory / name(i)).parent.mkdir(parents=True)
        (directory / name(i)).write_bytes(content(i))
    (top / "latest_checkpointed_iteration.txt").write_text("1")


def timed(what, n, command, env, directory):
    """Runs it to its end, within its bounds."""
    log = directory / "log"
    began = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    took_s, rss = time.monotonic() - began, usage.ru_maxrss * 1024
    print(f"{what}: {n} files in {took_s:.1f} s ({n / took_s:.0f} a second), {usage.ru_utime + usage.ru_stime:.1f} s of "
          f"CPU, {rss / 2**20:.0f} MiB at most", flush=True)
    text = log.read_text(errors="replace")
    assert process.returncode == 0, text[-2000:]
    assert took_s < 20 + n / FILES_PER_SECOND, took_s
    assert rss < RSS_BYTES + n * RSS_BYTES_PER_FILE, rss
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mobula")
    parser.add_argument("kind", choices=servers.KINDS_AND_HOW)
    parser.add_argument("--files", type=int, default=100_000)
    options = parser.parse_args()
    n = options.files
    with tempfile.TemporaryDirectory(prefix="mb-many-") as directory:
        directory = pathlib.Path(directory)
        make(directory / "from", n)
        with servers.server_of(options.kind, directory) as server:
            env = {**servers.clean_environment(), **server.environment()}
            checkpoint = [options.mobula, "checkpoint"]
            out = timed("push", n, [*checkpoint, "push", str(directory / "from"), URL], env, directory)
            assert f"pushed: iteration 1, {n} files" in out, out
            out = timed("push again", n, [*checkpoint, "push", str(directory / "from"), URL], env, directory)
            assert "with the same contents" in out, out
            out = timed("pull", n, [*checkpoint, "pull", URL, str(directory / "to")], env, directory)
            assert f"pulled: iteration 1, {n} files" in out, out
        for i in range(n):
            assert (directory / "to/iter_0000001" / name(i)).read_bytes() == content(i), name(i)


if __name__ == "__main__":
    main()
