"""`mobula preprocess` that is killed, cancelled, out of space, or met by a second one.

Usage: test_resume.py MOBULA. Whatever happens, the same command ends with the bytes of a run that nothing happened
to; before that, what was there before is there unchanged.
"""

import gzip
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

MOBULA = sys.argv[1]
ENDS = ("_text_document.bin", "_text_document.idx", "_other_document.bin", "_other_document.idx")


def make_lines(rng, n):
    ids = lambda k: " ".join(str(rng.randrange(60000)) for _ in range(k))
    lines = []
    for i in range(n):
        text = rng.choice([ids(300), ids(40), [ids(20), ids(3)], []])
        lines.append(json.dumps({"text": text, "other": ids(5), "pad": "é" * rng.randrange(200)}, ensure_ascii=False))
    return lines


def start_and_hold(place):
    """A run that has begun and cannot end before its lines are read: they fill a pipe of one page, and Python's buffer."""
    child = subprocess.Popen(place.command("--log-interval", "20"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             pipesize=4096)
    child.stderr.readline()
    return child


class Place:
    """A folder with an input and the command that reads it."""

    def __init__(self, folder, lines):
        self.folder, self.prefix = folder, folder + "/out"
        os.makedirs(folder, exist_ok=True)
        self.input = folder + "/in.jsonl"
        with open(self.input, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")

    def command(self, *args, workers=2):
        return [MOBULA, "preprocess", "--input", self.input, "--output-prefix", self.prefix, "--json-keys", "text", "other",
                "--tokenizer-type", "NullTokenizer", "--vocab-size", "60000", "--append-eod", "--workers", str(workers),
                "--resume-interval", "1ms", *args]

    def run(self, *args, workers=2, **kw):
        return subprocess.run(self.command(*args, workers=workers), capture_output=True, text=True, **kw)

    def hashes(self):
        return {e: hashlib.sha256(open(self.prefix + e, "rb").read()).hexdigest() for e in ENDS}

    def names(self):
        return sorted(n for n in os.listdir(self.folder) if n.startswith("out"))

    def clear(self):
        for n in self.names():
            path = os.path.join(self.folder, n)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


WHOLE = sorted("out" + e for e in ENDS)


def finish(place, want, *args, workers=2):
    done = place.run(*args, workers=workers)
    assert done.returncode == 0, done.stderr
    assert place.hashes() == want
    assert place.names() == WHOLE, place.names()
    return done.stderr


def check_visible(place, want):
    """Where there is an .idx, it is whole, and so is the .bin beside it."""
    for key in ("text", "other"):
        if os.path.exists(f"{place.prefix}_{key}_document.idx"):
            for end in (f"_{key}_document.bin", f"_{key}_document.idx"):
                assert hashlib.sha256(open(place.prefix + end, "rb").read()).hexdigest() == want[end], end


def check_kills(place, rng, want, *args):
    """SIGKILL after some progress line, or some time, several times over, with any number of workers."""
    went_on = kills = 0
    for _ in range(100):  # how many runs end before they are killed depends on the machine
        if kills >= 20 and went_on >= 5:
            break
        place.clear()
        for _ in range(rng.randrange(1, 4)):
            child = subprocess.Popen(place.command("--log-interval", "100", *args, workers=rng.choice([1, 2, 5])),
                                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if rng.random() < 0.7:
                for _ in range(rng.randrange(1, 120)):
                    line = child.stderr.readline()
                    went_on += "going on at" in line
                    if not line:
                        break
            else:
                time.sleep(rng.random() * 0.2)
            child.kill()
            child.stderr.close()
            child.wait()
            kills += child.returncode == -signal.SIGKILL
            check_visible(place, want)
        went_on += "going on at" in finish(place, want, *args, workers=rng.choice([1, 3, 7]))
    print(f"{kills} kills, gone on {went_on} times")
    assert kills >= 20 and went_on >= 5, (kills, went_on)


def check_sources(folder, lines, rng):
    """Several inputs, one of them compressed: the run goes on inside any of them."""
    place = Place(folder, lines[:8000])
    second = folder + "/second.jsonl.gz"
    with gzip.open(second, "wt", 1) as f:
        f.write("\n".join(lines[8000:]) + "\n")
    plain = place.command
    place.command = lambda *args, **kw: [a for x in plain(*args, **kw) for a in ([x, second] if x == place.input else [x])]
    assert place.run("--no-resume").returncode == 0
    want = place.hashes()
    seen = ""
    for n in range(50):  # how many runs end before they are killed depends on the machine
        if n >= 5 and "going on at" in seen:
            break
        place.clear()
        for _ in range(2):
            child = subprocess.Popen(place.command("--log-interval", "100"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                     text=True)
            seen += "".join(child.stderr.readline() for _ in range(rng.randrange(60, 170)))
            child.kill()
            child.stderr.close()
            child.wait()
        seen += finish(place, want)
    assert "going on at" in seen
    print(sorted(set(re.findall(r"going on at \S*/(\S+?):", seen))))


def check_calls(place, want):
    """SIGKILL at the first, second, ... call of each kind that makes a step durable or visible."""
    if shutil.which("strace") is None:
        sys.exit("strace is missing: it is in tools/packages-test.txt")
    kills = 0
    for call in ("rename", "unlink", "fsync", "fdatasync", "mkdir"):
        for n in range(1, 40):
            place.clear()
            done = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + call, "-e",
                                   f"inject={call}:signal=SIGKILL:when={n}", *place.command()], capture_output=True, text=True)
            if done.returncode == 0:
                break
            assert done.returncode in (-9, 137), done
            kills += 1
            check_visible(place, want)
            finish(place, want)
    print(f"{kills} kills at system calls")
    assert kills >= 12, kills


def stopped_run(place, *args):
    """A run that was killed in the middle and left a journal."""
    while True:
        place.clear()
        child = subprocess.Popen(place.command("--log-interval", "100", *args), stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True)
        for line in child.stderr:
            if os.path.exists(place.prefix + ".preprocess/journal"):
                break
        child.kill()
        child.stderr.close()
        child.wait()
        if os.path.exists(place.prefix + ".preprocess/journal"):
            return


def check_changes(place, want, lines):
    stopped_run(place)
    assert "going on" not in finish(place, want, "--no-resume")
    stopped_run(place)
    done = place.run("--skip-bad-lines")
    assert done.returncode == 0 and "the options changed" in done.stderr and place.hashes() == want, done.stderr
    stopped_run(place)
    os.utime(place.input, ns=(1, 1))
    assert "the input changed" in finish(place, want)
    stopped_run(place)
    with open(place.prefix + ".preprocess/journal", "r+b") as f:
        f.seek(200)
        f.write(b"x")
    assert "journal is damaged" in finish(place, want)
    stopped_run(place)
    os.unlink(place.prefix + ".preprocess/0.0.bin")
    assert "starting over" in finish(place, want)
    place.clear()
    assert place.run("--no-resume", "--partitions", "2").returncode == 0
    dealt = place.hashes()
    assert dealt != want
    stopped_run(place, "--partitions", "2")
    assert "going on at" in finish(place, dealt, "--partitions", "2", workers=4)
    place.clear()
    finish(place, want)


def check_model_beside(folder):
    """What lies beside a tokenizer.json counts, when the file is named as well."""
    import hf_files
    place = Place(folder, [json.dumps({"text": "the quick brown fox " * 20}) for _ in range(40000)])
    hf_files.write(folder + "/model", hf_files.small())
    place.command = lambda *args, workers=1: [
        MOBULA, "preprocess", "--input", place.input, "--output-prefix", place.prefix, "--workers", str(workers),
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder + "/model/tokenizer.json",
        "--resume-interval", "1ms", *args]
    stopped_run(place)
    with open(folder + "/model/tokenizer_config.json", "w", encoding="utf-8") as out:
        out.write("{}")
    done = place.run()
    assert done.returncode == 0 and "the tokenizer changed" in done.stderr, done


def check_failed_write(place, want):
    """A write that fails half-way, with an error that may pass: what follows begins before it."""
    went_on = 0
    for call, n in [("writev", n) for n in (1, 2, 5, 9, 14)] + [("pwritev", 3), ("write", 40), ("write", 90)]:
        for error in ("ETIMEDOUT", "EPIPE", "EIO"):
            place.clear()
            done = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + call, "-e",
                                   f"inject={call}:error={error}:when={n}", *place.command()], capture_output=True, text=True)
            went_on += "going on" in finish(place, want) if done.returncode != 0 else 0
    print(f"{went_on} went on behind a failed write")


def check_failed_rename(place, want):
    """What cannot be put in its place stays, and so does what was there."""
    place.clear()
    done = place.run("--json-keys", "a/b")
    assert done.returncode != 0 and "file name" in done.stderr and place.names() == [], done
    os.mkdir(place.prefix + "_text_document.bin")
    with open(place.prefix + "_text_document.idx", "w", encoding="utf-8") as out:
        out.write("old")
    done = place.run()
    assert done.returncode != 0 and "is a directory" in done.stderr and "same command goes on" in done.stderr, done
    assert open(place.prefix + "_text_document.idx", encoding="utf-8").read() == "old"
    os.rmdir(place.prefix + "_text_document.bin")
    finish(place, want)


def check_cancel(place, want):
    for number in (signal.SIGTERM, signal.SIGINT):
        place.clear()
        child = start_and_hold(place)
        child.send_signal(number)
        text = child.stderr.read()
        child.stderr.close()
        assert child.wait() == 130 and "no output file was changed; the same command goes on" in text, text[-300:]
        assert place.names() == ["out.preprocess"]
        assert "going on at" in finish(place, want)


def check_two(place, want):
    """A second one on the same prefix is refused while the first lives, and harms nothing."""
    place.clear()
    first = start_and_hold(place)
    first.send_signal(signal.SIGSTOP)
    second = place.run()
    assert second.returncode == 71 and "another process is writing there" in second.stderr, second
    first.send_signal(signal.SIGCONT)
    first.stderr.read()
    first.stderr.close()
    assert first.wait() == 0 and place.hashes() == want and place.names() == WHOLE


def check_no_space(place, lines, folder):
    """Files that may not grow, and as root a full disk: the earlier output stays, temporaries go."""
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    before = place.hashes()
    done = place.run(preexec_fn=limited)
    assert done.returncode == 73 and "no output file was changed" in done.stderr, done
    assert place.hashes() == before and place.names() == WHOLE
    disk = folder + "/disk"
    os.mkdir(disk)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk]).returncode != 0:
        print("no tmpfs can be mounted here: the full disk was a limit on file sizes only")
        return
    try:
        small = Place(folder + "/small", lines[:50])
        small.prefix = disk + "/out"
        small.folder = disk
        assert small.run().returncode == 0
        before = small.hashes()
        small.input = place.input
        done = small.run()
        assert done.returncode == 73 and "No space left" in done.stderr and "no output file was changed" in done.stderr, done
        assert small.hashes() == before and small.names() == WHOLE
    finally:
        subprocess.run(["umount", disk], check=True)


def main():
    rng = random.Random(29)
    with tempfile.TemporaryDirectory() as folder:
        lines = make_lines(rng, 20000)
        place = Place(folder + "/a", lines)
        assert place.run("--no-resume", workers=1).returncode == 0
        want = place.hashes()
        for workers in (2, 7, 16):
            finish(place, want, workers=workers)
        check_kills(place, rng, want)
        check_sources(folder + "/c", lines, rng)
        check_changes(place, want, lines)
        check_cancel(place, want)
        check_two(place, want)
        check_no_space(place, lines, folder)
        small = Place(folder + "/b", lines[:6000])
        assert small.run("--no-resume").returncode == 0
        check_calls(small, small.hashes())
        check_failed_write(small, (small.clear(), small.run("--no-resume"), small.hashes())[2])
        check_failed_rename(small, small.hashes())
        check_model_beside(folder + "/d")
    print("same bytes after every end")


main()
