"""mobula checkpoint ls, pull, diff, rm, verify against a real server behind a proxy: test_checkpoint.py MOBULA KIND"""

import fcntl
import ctypes
import json
import mmap
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
import unittest

import servers
from checkpoint_case import MIB, NAMES, Case
from faults import drop_answer, error, hold, stall, truncate

LATEST = "latest_checkpointed_iteration.txt"


def resident(path):
    """How much of a file is in the page cache, 0 to 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as m:
        pages = (len(m) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        at, seen = ctypes.c_char.from_buffer(m), (ctypes.c_ubyte * pages)()
        rc = libc.mincore(ctypes.c_void_p(ctypes.addressof(at)), ctypes.c_size_t(len(m)), seen)
        del at
        if rc != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    return sum(p & 1 for p in seen) / pages


def can_be_direct(directory):
    """Whether what is written with O_DIRECT there stays out of the page cache: tmpfs has nothing else."""
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, MIB) as block:
            os.write(fd, block)
        return resident(path) < 0.5
    finally:
        os.close(fd)
        path.unlink()


class Checkpoints(Case):
    def pushed(self, *iterations, size=2000, **files):
        for n in iterations:
            self.last = self.checkpoint(n, files or {name: os.urandom(size) if name != "zero" else b"" for name in NAMES},
                                        name=f"src-{n}")
            self.mobula("push", self.last, self.url)
        return self.last

    def put(self, key, data, **env):
        """One object as some other program would put it."""
        where, _, name = key.rpartition("/")
        top = self.dir / "put"
        top.mkdir()
        (top / name).write_bytes(data)
        self.mobula("push", "--plain", top, f"{self.url}/{where}".rstrip("/"), **env)
        shutil.rmtree(top)

    def iterations(self):
        found = json.loads(self.mobula("ls", "--json", self.url))
        return {i["iteration"]: i["state"] for i in found["iterations"]}, found["latest"]


class Ls(Checkpoints):
    def test_states(self):
        self.assertIn("no checkpoint", self.mobula("ls", self.url))
        self.pushed(5, 10, 15)
        self.put("iter_0000020/half", b"x" * 500)
        self.put("iter_0000010/" + NAMES[0], b"x" * 100)
        self.put("iter_0000015/not-listed", b"x")
        self.put("iter_5/x", b"")
        self.assertEqual(self.iterations(), ({5: "whole", 10: "damaged", 15: "whole", 20: "unfinished"}, 15))
        out = self.mobula("ls", self.url)
        self.assertRegex(out, r"15 +latest +whole +5 +7.8 KiB +push")
        self.assertRegex(out, r"10 +damaged .*has another size")
        self.put("iter_0000005/.mobula/manifest.json", b"{}")
        self.assertEqual(self.iterations()[0][5], "damaged")
        self.put(LATEST, b"99")
        self.assertIn("names iteration 99, which is not there", self.mobula("ls", self.url))
        self.put(LATEST, b"rubbish")
        self.assertIn("is damaged", self.mobula("ls", self.url))

    def test_errors(self):
        self.assertIn("NoSuchBucket", self.mobula("ls", "s3://missing/x", status=66))
        self.proxy.rule("GET", "list-type", error(403, "AccessDenied"))
        self.assertIn("AccessDenied", self.mobula("ls", self.url, status=77))


class Pull(Checkpoints):
    def expect(self, dir, iteration, src):
        self.assertEqual((dir / LATEST).read_text(), str(iteration))
        self.assertIn("the same in both", self.mobula("diff", dir, self.url))
        for path in (src / f"iter_{iteration:07d}").rglob("*"):
            if path.is_file():
                self.assertEqual((dir / path.relative_to(src)).read_bytes(), path.read_bytes())
        self.assertEqual([p for p in dir.rglob("*") if "pull" in p.name or "tmp" in p.name or "lock" in p.name], [])

    def test_whole(self):
        src = self.pushed(20, **{"big": os.urandom(40 * MIB), "small": b"1"})
        to = self.dir / "to"
        self.assertIn("pulled: iteration 20, 2 files, 40.0 MiB (0 B there before)", self.mobula("pull", self.url, to))
        self.expect(to, 20, src)
        before = len(self.proxy.seen("GET", "big"))
        (to / "iter_0000020/small").write_bytes(b"2")
        (to / "iter_0000020/big.mobula-lock").touch()  # of one that was killed when big had its name already
        self.assertIn("(40.0 MiB there before)", self.mobula("pull", self.url, to))
        self.assertEqual(len(self.proxy.seen("GET", "big")), before)
        self.expect(to, 20, src)

    def test_past_the_page_cache(self):
        """Sizes around buffers, blocks and ranges: all bytes arrive, also where attempts break off, and stay out of the page cache
        unless somebody wants them there."""
        files = {f"f{n}": os.urandom(n) for n in (0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 5 * MIB + 4095, 16 * MIB, 16 * MIB + 1,
                                                   17 * MIB + 4097, 33 * MIB - 513)}
        self.pushed(7, **files)
        is_direct = can_be_direct(self.dir)
        for name, words in (("direct", ()), ("cached", ("--cached",)), ("plain", ("--plain",))):
            self.mobula("pull", *words, self.url, self.dir / name)
            for path, data in files.items():
                file = self.dir / name / "iter_0000007" / path
                if len(data) >= 4 * MIB:
                    self.assertEqual(resident(file) < 0.1, name != "cached" and is_direct, (name, path))
                self.assertEqual(file.read_bytes(), data, (name, path))
        self.proxy.rule("GET", "f17", truncate(0.3), times=3)
        self.mobula("pull", self.url, self.dir / "again")
        self.expect(self.dir / "again", 7, self.last)

    def test_fall_back(self):
        src = self.pushed(5)
        self.pushed(10, 15)
        self.put("iter_0000015/" + NAMES[1], b"y" * 2000)  # same size
        self.put("iter_0000010/" + NAMES[0], b"x" * 100)
        to = self.dir / "to"
        out = self.mobula("pull", self.url, to)
        self.assertIn("not whole: 2", out)
        self.assertIn("iteration 15 is not whole", out)
        self.expect_old(to, 5, src)
        self.assertIn("is not whole", self.mobula("pull", "--iteration", 10, self.url, self.dir / "no", status=65))
        self.mobula("pull", "--iteration", 5, self.url, self.dir / "five")
        self.assertIn("CRC64NVME", self.mobula("verify", self.url, status=65))
        self.mobula("verify", "--iteration", 5, self.url)
        self.put(LATEST, b"9" * 100)  # too long for a number
        self.mobula("pull", self.url, self.dir / "six")
        self.expect_old(self.dir / "six", 5, src)

    def test_removed_while_it_is_fetched(self):
        """keep-last removes it, twice: the newer one is taken, each time."""
        self.pushed(5, **{f"x{i:02}": os.urandom(1000) for i in range(50)})

        def next_one(old, new):
            def moves(request):  # the first shard that is asked for
                if request.method == "GET" and f"{old:07d}/x" in request.target and not done.get(old):
                    done[old] = self.checkpoint(new, {f"x{i:02}": os.urandom(1000) for i in range(50)}, name=f"n-{new}")
                    direct = self.server.direct()
                    self.mobula("push", done[old], self.url, **direct)
                    self.mobula("rm", "--keep-last", 1, self.url, **direct)
                return False
            return moves

        done = {}
        for old, new in ((5, 10), (10, 15)):
            self.proxy.rule("GET", "x", error(500), when=next_one(old, new))
        out = self.mobula("pull", self.url, self.dir / "to")
        self.assertIn("iteration 5 was removed while it was fetched", out)
        self.assertIn("starting over with iteration 15", out)
        self.expect(self.dir / "to", 15, done[10])

    def test_gone_without_a_newer_one(self):
        """The pointer names it for ever: the one before is taken."""
        src = self.pushed(5)
        self.pushed(10)
        self.proxy.rule("GET", "iter_0000010/zero", error(404, "NoSuchKey"))
        self.assertIn("not whole: 1", self.mobula("pull", self.url, self.dir / "to"))
        self.expect_old(self.dir / "to", 5, src)
        pointers = self.proxy.seen("GET", LATEST)
        self.proxy.rule("GET", "iter_0000005/zero", error(404, "NoSuchKey"))
        self.assertIn("no whole checkpoint", self.mobula("pull", self.url, self.dir / "no", status=65))
        self.assertLessEqual(len(self.proxy.seen("GET", LATEST)) - len(pointers), 6)

    def test_diff_is_interrupted(self):
        src = self.pushed(5)
        self.proxy.rule("GET", "manifest.json", stall(answer=True))
        process = self.start("diff", src, self.url)
        servers.wait_for("it asks", lambda: any(
            r.fault for r in self.proxy.seen("GET", "manifest.json")))
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 130, out)

    def expect_old(self, to, iteration, src):
        self.assertEqual((to / LATEST).read_text(), str(iteration))
        for name in NAMES:
            path = f"iter_{iteration:07d}/{name}"
            self.assertEqual((to / path).read_bytes(), (src / path).read_bytes())

    def test_some_files(self):
        self.pushed(5, **{"model.0": b"m" * 100, "model.1": b"n" * 100, "optim": b"o" * 100})
        to = self.dir / "to"
        self.mobula("pull", "--files", "model*", self.url, to)
        self.assertEqual(sorted(p.name for p in (to / "iter_0000005").iterdir()), ["model.0", "model.1"])
        self.assertEqual(self.proxy.seen("GET", "optim"), [])
        self.assertIn("no file that matches", self.mobula("pull", "--files", "x*", self.url, self.dir / "n", status=66))

    def test_none(self):
        self.assertIn("no checkpoint", self.mobula("pull", self.url, self.dir / "to", status=66))
        self.put("iter_0000020/.mobula/manifest.json", json.dumps({
            "version": 1, "iteration": 20, "node_rank": -1, "num_nodes": 1, "job_id": "j", "placement_group_id": "",
            "attempt": 1, "claim": True, "files": []}).encode())
        self.assertIn("no checkpoint", self.mobula("pull", self.url, self.dir / "to", status=66))

    def test_without_a_pointer(self):
        """All nodes died between a manifest and the first move of the pointer."""
        store = self.dir / "store"
        self.url = f"file://{store}"
        src = self.pushed(5)
        self.pushed(10)
        (store / LATEST).unlink()
        (store / "iter_0000010" / NAMES[0]).unlink()
        out = self.mobula("pull", self.url, self.dir / "to")
        self.assertIn("there is no pointer", out)
        self.assertIn("not whole: 1", out)
        self.expect_old(self.dir / "to", 5, src)
        (store / "iter_0000005" / NAMES[0]).unlink()
        self.assertIn("no whole checkpoint", self.mobula("pull", self.url, self.dir / "no", status=65))

    def test_a_manifest_that_is_too_large(self):
        store = self.dir / "store"
        self.url = f"file://{store}"
        src = self.pushed(5)
        self.pushed(10)
        os.truncate(store / "iter_0000010/.mobula/manifest.json", 300 * MIB)
        out = self.mobula("pull", self.url, self.dir / "to")
        self.assertIn("iteration 10 is not whole: its manifest is larger", out)
        self.expect_old(self.dir / "to", 5, src)

    def test_a_store_that_goes_away(self):
        """After the first bytes: over after the time that was said, with the reason, and nothing half stays."""
        src, to = self.pushed(20, **{"big": os.urandom(50 * MIB)}), self.dir / "to"
        for verb, url, *where in (("pull", self.url, to), ("pull", f"{self.url}/iter_0000020", to / "plain", "--plain"),
                                  ("verify", self.url)):
            self.proxy.rule("GET", "/big", error(503, "SlowDown"), skip=1)
            self.assertIn("SlowDown", self.mobula(verb, "--retry-for", "1s", url, *where, status=69))
            self.proxy.clear()
        self.assertEqual(list(to.rglob("big*")), [])
        self.mobula("pull", self.url, to)
        self.expect(to, 20, src)

    def test_a_store_that_refuses(self):
        """Verbs that somebody waits for: over after 10 s, or what was said (+ 3 s for a machine that is busy)."""
        top = self.checkpoint(5)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))  # nobody listens
            where = {"BUCKET_STORAGE_HOST": f"http://127.0.0.1:{s.getsockname()[1]}"}
            for words, seconds in (((), 10), (("--retry-for", "2s"), 2)):
                for verb, args in (("ls", [self.url]), ("rm", ["--iteration", 5, self.url]), ("diff", [top, self.url])):
                    began = time.monotonic()
                    self.mobula(verb, *words, *args, status=69, **where)
                    took_s = time.monotonic() - began
                    self.assertLess(took_s, seconds + 3, verb)
                    self.assertGreater(took_s, seconds - 1, verb)

    def test_interrupted(self):
        src = self.pushed(20, **{"big": os.urandom(50 * MIB), "other": os.urandom(1 * MIB)})
        to = self.dir / "to"
        for signum in (signal.SIGKILL, signal.SIGTERM):
            began = len(self.proxy.seen("GET", "big"))
            self.proxy.rule("GET", "big", hold(), skip=1)
            process = self.start("pull", self.url, to)
            servers.wait_for("it fetches", lambda: len(self.proxy.seen("GET", "big")) > began + 1)
            process.send_signal(signum)
            process.communicate()
            self.assertFalse((to / LATEST).exists())
            self.proxy.clear()
        self.proxy.rule("GET", "big", truncate(0.5), times=2)
        self.mobula("pull", self.url, to)
        self.assertEqual((to / "iter_0000020/big").read_bytes(), (src / "iter_0000020/big").read_bytes())
        self.assertEqual(sorted(p.name for p in (to / "iter_0000020").iterdir()), ["big", "other"])

    def test_interrupted_while_it_compares(self):
        """A file that is there already, of 1 TiB, is read for minutes."""
        self.put("iter_0000007/.mobula/manifest.json", json.dumps({
            "version": 1, "iteration": 7, "node_rank": -1, "num_nodes": 1, "job_id": "j", "placement_group_id": "",
            "attempt": 1, "files": [{"path": "big", "size": 1 << 40, "crc64nvme": "0" * 16}]}).encode())
        self.put(LATEST, b"7")
        big = self.dir / "to/iter_0000007/big"
        big.parent.mkdir(parents=True)
        big.touch()
        os.truncate(big, 1 << 40)
        process = self.start("pull", self.url, self.dir / "to")
        self.interrupt(process, "it reads the file", lambda: self.read_bytes(process) > 512 * MIB)

    def test_interrupted_twice(self):
        """The second signal ends it at once, also where the first one's end has to wait; nothing stays behind."""
        self.pushed(20, **{"big": os.urandom(40 * MIB)})
        to = self.dir / "to"
        self.proxy.rule("GET", "big", stall(answer=True))
        process = self.start("pull", self.url, to)
        servers.wait_for("it fetches", lambda: any(to.rglob("big.pull-*")))
        process.send_signal(signal.SIGSTOP)  # so that both are there when it looks
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 130, out)
        self.assertEqual(list(to.rglob("big*")), [])

    def test_an_end_that_hangs(self):
        """A read that never returns, as of a disk that hangs: the first signal waits for it, the second one does not."""
        self.pushed(20, **{"big": b"b", "other": b"o"})
        pipe = self.dir / "to/iter_0000020/big"
        pipe.parent.mkdir(parents=True)
        os.mkfifo(pipe)
        process = self.start("pull", self.url, self.dir / "to")
        servers.wait_for("the other one is there", (self.dir / "to/iter_0000020/other").exists)
        process.send_signal(signal.SIGINT)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)  # of two that are the same one may be lost
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 130, out)

    def test_together(self):
        """Two into one directory: a big file is fetched once, the other one finds it there."""
        self.pushed(20, **{"big": os.urandom(50 * MIB), "other": os.urandom(20 * MIB), "small": b"s"})
        to = self.dir / "to"
        self.proxy.rate = 40 * MIB
        before = len(self.proxy.requests)
        pullers = [self.start("pull", "--json", self.url, to) for _ in range(3)]
        ends = [json.loads(p.communicate(timeout=100)[0].splitlines()[-1]) for p in pullers]
        self.assertEqual([p.returncode for p in pullers], [0, 0, 0], ends)
        ranges = [r.header("range") for r in self.proxy.requests[before:]
                  if r.method == "GET" and r.target.endswith("/big")]
        self.assertEqual(len(ranges), len(set(ranges)))
        self.assertEqual(sorted(p.name for p in (to / "iter_0000020").iterdir()), ["big", "other", "small"])
        self.assertIn("the same in both", self.mobula("diff", to, self.url))

    def test_one_of_two_is_killed(self):
        """The other one ends with the whole checkpoint, and takes away what the dead one left."""
        src = self.pushed(20, **{"big": os.urandom(20 * MIB), "small": b"s"})
        to = self.dir / "to"
        self.proxy.rule("GET", "big", hold(), skip=1)
        first = self.start("pull", self.url, to)
        servers.wait_for("it fetches", lambda: any(to.rglob("big.pull-*")))
        second = self.start("pull", self.url, to)
        lock = to / "iter_0000020/.mobula-pull.lock"
        servers.wait_for("both are there", lambda: self.n_open(second, lock))
        first.send_signal(signal.SIGKILL)
        first.communicate()
        self.proxy.clear()
        out = second.communicate(timeout=100)[0]
        self.assertEqual(second.returncode, 0, out)
        self.expect(to, 20, src)

    def n_open(self, process, path):
        """How often a process has a file open."""
        links = pathlib.Path(f"/proc/{process.pid}/fd").iterdir()
        return sum(os.path.realpath(link) == str(path) for link in links)

    def test_names_like_our_own(self):
        """Files of a checkpoint that are called as what pullers leave, or as the lock of another; and a name that is as long
        as names may be."""
        src = self.pushed(20, **{"big": os.urandom(9 * MIB), "big.mobula-lock": b"", "x.pull-1": b"x", "y.mobula-lock": b"",
                                 "sub/z.pull-7": b"z", "n" * 255: b"n"})
        to = self.dir / "to"
        for there in "0 B", "9.0 MiB":
            self.assertIn(f"({there} there before)", self.mobula("pull", self.url, to))
            self.assertIn("is the same in both, 6 files", self.mobula("diff", to, self.url))
            self.assertEqual(sorted(p.relative_to(to) for p in to.rglob("*")), sorted(p.relative_to(src) for p in src.rglob("*")))

    def test_full_disk(self):
        self.pushed(20, **{"big": os.urandom(40 * MIB)})
        process = self.start("pull", self.url, self.dir / "to", limit_bytes=20 * MIB)
        out = process.communicate()[0]
        self.assertEqual(process.returncode, 73, out)
        self.assertIn("big", out)
        self.assertEqual([p.name for p in (self.dir / "to").rglob("big*")], [])


class Diff(Checkpoints):
    def test_all_kinds(self):
        src = self.pushed(7)
        top = src / "iter_0000007"
        self.assertIn("is the same in both, 5 files", self.mobula("diff", src, self.url))
        (top / NAMES[0]).write_bytes(os.urandom(2000))
        (top / NAMES[1]).write_bytes(b"short")
        (top / "zero").unlink()
        (top / "new").write_bytes(b"")
        self.assertEqual(self.mobula("diff", src, self.url, status=1).splitlines(), [
            f"contents differ: {NAMES[0]}", "only in the directory: new", f"size differs: {NAMES[1]}",
            "only in the store: zero"])
        self.assertIn("not there", self.mobula("diff", self.checkpoint(8, name="eight"), self.url, status=66))


class Rm(Checkpoints):
    def stored(self):
        """Keys below the url."""
        found = json.loads(self.mobula("ls", "--json", self.url))
        return sum(i["stored_objects"] for i in found["iterations"])

    def test_one(self):
        self.pushed(5, 10)
        self.assertIn("--force removes it", self.mobula("rm", "--iteration", 10, self.url, status=71))
        self.assertIn("would remove: iteration 5", self.mobula("rm", "--dry-run", "--iteration", 5, self.url))
        self.assertEqual(self.iterations(), ({5: "whole", 10: "whole"}, 10))
        before = len(self.proxy.requests)
        self.assertIn("removed: iteration 5, 7 objects", self.mobula("rm", "--iteration", 5, self.url))
        gone = [r.target for r in self.proxy.requests[before:] if r.method == "DELETE"]
        self.assertTrue(gone[0].endswith("/.mobula/manifest.json"), gone)
        self.assertEqual(self.iterations(), ({10: "whole"}, 10))
        self.assertIn("has no iteration 5", self.mobula("rm", "--iteration", 5, self.url, status=66))

    def test_with_a_damaged_pointer(self):
        """Readers take the newest whole one then, so that is the one to keep."""
        self.pushed(2, 3, 5, 10)
        for rubbish, gone in (b"rubbish", 2), (b"9" * 100000, 3):  # the second one is too long to be read
            self.put(LATEST, rubbish)
            self.assertIn("--force removes it", self.mobula("rm", "--iteration", 10, self.url, status=71))
            self.assertIn("is damaged", self.mobula("ls", self.url))
            self.mobula("rm", "--iteration", gone, self.url)
            self.assertEqual(self.iterations()[1], 10)
        self.assertEqual(self.iterations()[0], {5: "whole", 10: "whole"})
        self.put(LATEST, rubbish)
        self.mobula("rm", "--force", "--iteration", 10, self.url)
        self.assertEqual(self.iterations(), ({5: "whole"}, 5))

    def test_a_damaged_pointer_is_mended_meanwhile(self):
        """One that is too long is looked at twice: what came in between stays."""
        self.put(LATEST, b"9" * 100000)
        five = self.checkpoint(5, name="five")
        self.proxy.rule("HEAD", LATEST, hold(), times=1)
        process = self.start("push", five, self.url)
        servers.wait_for("its second look", lambda: any(r.fault for r in self.proxy.seen("HEAD", LATEST)))
        self.mobula("push", self.checkpoint(10, name="ten"), self.url, **self.server.direct())
        self.proxy.clear()
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 0, out)
        self.assertEqual(self.iterations(), ({5: "whole", 10: "whole"}, 10))

    def test_forced(self):
        self.pushed(5, 10)
        self.mobula("rm", "--force", "--iteration", 10, self.url)
        self.assertEqual(self.iterations(), ({5: "whole"}, 5))
        self.mobula("rm", "--force", "--iteration", 5, self.url)
        self.assertEqual(self.iterations(), ({}, None))

    def test_keep_last(self):
        self.pushed(2, 4, 6, 8, 10)
        self.put("iter_0000006/" + NAMES[0], b"")  # damaged: no reserve
        self.put("iter_0000003/x", b"")            # given up long ago
        self.put("iter_0000012/x", b"")            # being written
        self.mobula("rm", "--keep-last", 3, self.url)
        self.assertEqual(self.iterations()[0],
                         {4: "whole", 6: "damaged", 8: "whole", 10: "whole", 12: "unfinished"})
        self.mobula("rm", "--keep-last", 1, self.url)
        self.assertEqual(self.iterations(), ({10: "whole", 12: "unfinished"}, 10))
        self.put(LATEST, b"rubbish")
        self.mobula("rm", "--keep-last", 1, self.url, status=71)
        self.assertIn("which iterations", self.mobula("rm", self.url, status=64))

    def test_the_pointer_moves_meanwhile(self):
        """Between the look at the pointer and the manifest's end somebody moves it there."""
        old = self.pushed(5)
        self.pushed(10)
        self.proxy.rule("DELETE", "manifest.json", hold(), times=1)
        process = self.start("rm", "--iteration", 5, self.url)
        servers.wait_for("the manifest goes", lambda: self.proxy.seen("DELETE", "manifest.json"))
        self.put(LATEST, b"5", **self.server.direct())
        self.proxy.clear()
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 71, out)
        self.assertIn("it stays", out)
        self.assertEqual(self.iterations(), ({5: "whole", 10: "whole"}, 5))
        self.mobula("verify", self.url)
        self.assertTrue(old.exists())

    def test_removed_while_a_push_waits(self):
        """The push has looked at the pointer, and its move comes late: after the iteration was removed."""
        self.pushed(5)
        ten = self.checkpoint(10, name="ten")
        self.proxy.rule("PUT", LATEST, hold())
        process = self.start("push", ten, self.url)
        servers.wait_for("the pointer waits", lambda: any(r.fault for r in self.proxy.seen("PUT", LATEST)))
        self.mobula("rm", "--iteration", 10, self.url, **self.server.direct())
        self.proxy.clear()
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 71, out)
        self.assertIn("was removed", out)
        self.assertEqual(self.iterations(), ({5: "whole"}, 5))
        self.mobula("push", ten, self.url)
        self.assertEqual(self.iterations(), ({5: "whole", 10: "whole"}, 10))

    def test_a_push_holds_what_it_reads(self):
        """With the lock that keeps an agent from removing an older iteration (--keep-last-k)."""
        ten = self.checkpoint(10)
        self.proxy.rule("PUT", LATEST, hold())
        process = self.start("push", ten, self.url)
        servers.wait_for("the pointer waits", lambda: any(r.fault for r in self.proxy.seen("PUT", LATEST)))
        fd = os.open(ten / "iter_0000010", os.O_RDONLY)
        with self.assertRaises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.proxy.clear()
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 0, out)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)

    def test_interrupted(self):
        """What is left has no manifest, so nobody takes it; the same call ends it."""
        self.pushed(5, 10)
        self.proxy.rule("DELETE", "sub", error(403, "AccessDenied"))
        self.mobula("rm", "--iteration", 5, self.url, status=77)
        self.assertEqual(self.iterations()[0][5], "unfinished")
        self.proxy.clear()
        self.proxy.rule("DELETE", "", drop_answer(), times=2)
        self.mobula("rm", "--iteration", 5, self.url)
        self.assertEqual(self.iterations(), ({10: "whole"}, 10))


class Shown(Case):
    def assert_bar(self, out, begin, end):
        """It moves, only forward, over one line that is gone when the last one is written."""
        bar = begin + r" \[=*>? *\] +(\d+)% [^\r]* of 80\.0 MiB, \d/1 files, [\d.]+ "
        seen = [int(percent) for percent in re.findall(r"\r" + bar, out)]
        self.assertGreater(len(set(seen)), 1, out)
        self.assertEqual(seen, sorted(seen))
        self.assertLessEqual(seen[-1], 100)
        before, _, last = out.rstrip("\r\n").rpartition("\r\x1b[K")
        self.assertTrue(before)
        self.assertRegex(last, end)
        self.assertNotIn("\n", before[before.index("\r"):])

    def test_bars_on_a_terminal(self):
        top = self.checkpoint(2, {"big": os.urandom(80 * MIB)})
        self.mobula("push", top, self.url)
        self.proxy.rate = 30 * MIB
        pulled = self.dir / "pulled"
        self.assert_bar(self.on_a_terminal("pull", self.url, pulled), "pull iteration 2 fetching", "^pulled: iteration 2")
        self.assertEqual((pulled / "iter_0000002/big").read_bytes(), (top / "iter_0000002/big").read_bytes())
        self.assert_bar(self.on_a_terminal("verify", self.url), "verify iteration 2 reading", "^verified: iteration 2")
        plain = self.on_a_terminal("pull", "--plain", f"{self.url}/iter_0000002", self.dir / "plain")
        self.assertRegex(plain, r"\rpull fetching \[=*> *\] +\d+% ")


if __name__ == "__main__":
    unittest.main()
