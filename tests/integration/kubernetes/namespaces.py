"""A network, a process tree and mounts of one's own, for a test that makes many: when it ends, the kernel takes all of it away."""

import os
import subprocess
import sys

WORDS = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
TRY = 'ip link add try0 type bridge && mount -t tmpfs t /mnt && mkdir /mnt/a /mnt/b /mnt/c && ' \
      'mount -t overlay t -o lowerdir=/,upperdir=/mnt/a,workdir=/mnt/b /mnt/c'


def enter():
    """Starts this program again in them; None when that is done, else why it cannot be."""
    if os.environ.get("MB_NAMESPACES") == "1":
        return None
    done = subprocess.run([*WORDS, "/bin/sh", "-c", TRY], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no network and mount namespaces here, as root may make them: {done.stderr.strip()}"
    os.environ["MB_NAMESPACES"] = "1"
    # The shell is PID 1 there and collects processes whose parent has ended; without it their namespaces would not end.
    os.execvp(WORDS[0], [*WORDS, "/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, *sys.argv])
