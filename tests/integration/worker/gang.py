"""Plays the node agent: starts ranks with a report socket each and speaks worker/report.h with them."""

import errno
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time

DEADLINE_S = 180  # without a report of any rank

MODEL = (
    "--distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --log-interval 1 --eval-interval 5 --eval-iters 2 --log-params-norm"
).split()
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100".split()


class Rank:
    def __init__(self, worker, rank, world, args, cwd, env, home=None):
        ours, theirs = socket.socketpair()
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
               "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MOBULA_REPORT_FD": str(theirs.fileno()), **env}
        self.log_path = os.path.join(cwd, f"rank-{rank}.log")
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([worker, *args], env=env, cwd=home or cwd, stdout=log,
                                            stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()])
        theirs.close()
        self.socket, self.buffer, self.messages = ours, b"", []

    def read(self):
        """Take what is there; False at the end of the stream."""
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            data = b""
        self.buffer += data
        while len(self.buffer) >= 4:
            n = struct.unpack_from("<I", self.buffer)[0]
            if len(self.buffer) < 4 + n:
                break
            self.messages.append(json.loads(self.buffer[4:4 + n]))
            self.buffer = self.buffer[4 + n:]
        return bool(data)

    def tell(self, **message):
        text = json.dumps(message).encode()
        self.socket.sendall(struct.pack("<I", len(text)) + text)

    def of(self, kind):
        return [m for m in self.messages if m["t"] == kind]

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()


class Gang:
    def __init__(self, worker, world, args, cwd, env=(), env_of_rank=lambda rank: {}, home_of_rank=lambda rank: None):
        """home_of_rank: another working directory than cwd, where the logs are."""
        os.makedirs(cwd, exist_ok=True)
        self.ranks = [Rank(worker, r, world, args, cwd, {**dict(env), **env_of_rank(r)}, home_of_rank(r))
                      for r in range(world)]
        self.open = list(self.ranks)

    def wait(self, condition):
        """Read reports until condition() holds; none for the deadline is an error with all logs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            left = deadline - time.monotonic()
            if left < 0 or not self.open:
                raise AssertionError("the gang did not come so far:\n" + "\n".join(r.log() for r in self.ranks))
            for s in select.select([r.socket for r in self.open], [], [], min(left, 1))[0]:
                rank = next(r for r in self.ranks if r.socket is s)
                known = len(rank.messages)
                if not rank.read():
                    self.open.remove(rank)
                if len(rank.messages) > known:
                    deadline = time.monotonic() + DEADLINE_S

    def start(self):
        self.wait(lambda: all(r.of("endpoint") for r in self.ranks))
        endpoints = [r.of("endpoint")[0]["text"] for r in self.ranks]
        for r in self.ranks:
            r.tell(t="start", endpoints=endpoints)
        return self

    def reached(self, iteration):
        self.wait(lambda: all(any(m["iteration"] >= iteration for m in r.of("progress")) for r in self.ranks))

    def finish(self):
        """Exit statuses, when all have ended and all their reports are read."""
        self.wait(lambda: not self.open)
        codes = [r.process.wait(DEADLINE_S) for r in self.ranks]
        for r in self.ranks:
            r.socket.close()
        return codes

    def kill(self):
        for r in self.ranks:
            if r.process.poll() is None:
                r.process.send_signal(signal.SIGKILL)
                r.process.wait()
            r.socket.close()


def bad_disk(library, file, what, value):
    """The environment of a program with such a disk (bad_disk.c). AddressSanitizer need not be loaded before the library."""
    checks = os.environ.get("ASAN_OPTIONS", "").split(":") + ["verify_asan_link_order=0"]
    return {"LD_PRELOAD": library, "BAD_DISK_FILE": file, f"BAD_DISK_{what}": str(value),
            "ASAN_OPTIONS": ":".join(c for c in checks if c)}


class Hold:
    """One rank's save stands still where such a file of it goes onto the disk, until it is let go. library: bad_disk.c."""

    def __init__(self, library, pipe, rank, file):
        self.rank, self.pipe, self.end = rank, pipe, None
        self.env = bad_disk(library, file, "HOLD", pipe)
        os.mkfifo(pipe)

    def env_of_rank(self, rank):
        return self.env if rank == self.rank else {}

    def has_come(self):
        try:
            self.end = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as e:
            if e.errno != errno.ENXIO:  # nobody there yet
                raise
        return self.end is not None

    def let_go(self):
        os.close(self.end)


def lose_in_save(case, hold, lost, gang):
    """A rank is killed while one of two stands still in the first save: the other one ends, and nothing looks saved."""
    case.addCleanup(gang.kill)
    gang.start().wait(hold.has_come)
    gang.ranks[lost].process.send_signal(signal.SIGKILL)
    gang.ranks[lost].process.wait()
    hold.let_go()
    codes = gang.finish()
    case.assertEqual((codes[lost], codes[1 - lost]), (-signal.SIGKILL, 69))
    case.assertRegex(gang.ranks[1 - lost].of("failed")[0]["text"], f"rank {lost} (went away|gave up)")
    case.assertEqual([r.of("saved") for r in gang.ranks], [[], []])


def run(worker, world, args, cwd, **more):
    gang = Gang(worker, world, args, cwd, **more)
    try:
        codes = gang.start().finish()
    finally:
        gang.kill()
    if any(codes):
        raise AssertionError(f"exit statuses {codes}:\n" + "\n".join(r.log() for r in gang.ranks))
    return gang


def tool(*words, status=0, env=None):
    """What a program prints that ends with such a status. Names of files may be any bytes."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, errors="replace", timeout=300, check=False,
                          env={**os.environ, **(env or {})})
    assert done.returncode == status, (words, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


def unsealed(state):
    """The text of a state.json without its checksum, to be edited."""
    return re.sub(r'^ "crc64nvme": "[0-9a-f]{16}",\n', "", state, count=1, flags=re.M)


def content(directory):
    """{name: bytes} of its files."""
    out = {}
    for name in os.listdir(directory):
        with open(os.path.join(directory, name), "rb") as f:
            out[name] = f.read()
    return out


def iterations(rank):
    """What a run logs of each iteration, without its times."""
    lines = re.findall(r"iteration +(\d+)/.*?(\| learning rate.*)", rank.log())
    return {int(i): text for i, text in lines}


def numbers(gang):
    """{iteration: (loss, gradient norm)} with all digits. Reports may be lost, but for the last one."""
    return {m["iteration"]: (m["loss"], m["grad_norm"]) for m in gang.ranks[0].of("progress")}


def losses(gang):
    """{iteration: loss}, seven digits of each."""
    return {i: float(re.search(r"lm loss: (\S+)", text).group(1)) for i, text in iterations(gang.ranks[-1]).items()}


def validations(gang):
    return [float(x) for x in re.findall(r"lm loss value: (\S+)", gang.ranks[-1].log())]
