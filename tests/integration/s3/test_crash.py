"""Kills at random while checkpoints are uploaded: test_crash.py KIND [--kills N] [--seed S] [--size BYTES] [--spare-driver]

A job on two nodes saves one checkpoint after the other into a real S3 server (KIND: versitygw or
minio, and -https behind it: with TLS, and the bucket in the host's name). Agents, ranks, drivers and
the server are killed, connections are cut, at random. A reader looks at the bucket all the time. What
must hold:

 - what the pointer names is whole: the manifest is there, and every file with its size and checksum;
   the pointer never goes back
 - data that the server acknowledged is never sent again (counted in front of the server), nor under another upload id
 - when all has come to rest, no unfinished multipart upload is left
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e"), str(HERE.parent)]

import faults  # noqa: E402
import servers  # noqa: E402
from cluster import TERMINAL, Cluster, command_of, wait_until  # noqa: E402

PREFIX = "run"
LATEST = "latest_checkpointed_iteration.txt"
KEEP_LAST = 3
UNREAD_S = 0.2  # a sender has read an answer after that


class Reader(threading.Thread):
    """Reads the newest checkpoint by the store tool again and again, past the proxy. `wrong` is what it found."""

    def __init__(self, tool, pace, scratch):
        super().__init__(daemon=True)
        self.tool = tool
        self.pace, self.scratch = pace, pathlib.Path(scratch, "read-back")
        self.wrong, self.newest, self.looks, self.files = [], 0, 0, 0
        self.ending = threading.Event()
        self.checked = {}  # key -> etag of what was read as a whole

    def get(self, key):
        answer = self.tool("get", key=key, max=1 << 20, timeout_ms=30000)
        return answer["data"] if answer["code"] == "OK" else None, answer

    def file_is_right(self, key, f):
        head = self.tool("head", key=key, timeout_ms=30000)
        if head["code"] != "OK" or head["size"] != f["size"]:
            return head["code"] not in ("OK", "ENOENT"), head  # the server is away: says nothing
        if self.checked.get(key) != (head["etag"], f["crc64nvme"]):
            answer = self.tool("get_file", key=key, path=str(self.scratch), timeout_ms=60000)
            if answer["code"] == "OK" and answer["crc"] != f["crc64nvme"]:
                return False, answer
            if answer["code"] != "OK":
                return answer["code"] != "ENOENT", answer
            self.checked[key] = (head["etag"], f["crc64nvme"])
            self.files += 1
        return True, head

    def look(self):
        """None, or what is wrong of the newest checkpoint. A pointer that went back is wrong for good, wherever it is later."""
        text, _ = self.get(LATEST)
        if text is None:
            return None
        latest = int(text)
        if latest < self.newest:
            self.wrong.append(f"latest went from {self.newest} back to {latest}")
            return None
        self.newest = latest
        self.pace.write_text(str(latest))
        directory = f"iter_{latest:07d}"
        text, answer = self.get(f"{directory}/.mobula/manifest.json")
        if text is None:
            return f"latest is {latest}: {answer}" if answer["code"] == "ENOENT" else None
        manifest = json.loads(text)
        if "files" not in manifest:
            return f"latest is {latest}, which is only claimed"
        place = f"{directory}/{manifest['data']}" if "data" in manifest else directory
        for f in manifest["files"]:
            right, answer = self.file_is_right(f"{place}/{f['path']}", f)
            if not right:
                return f"latest is {latest}, {f} is wrong: {answer}"
        self.looks += 1
        return None

    def is_deleted(self):
        """Whether the pointer has left what was read and its manifest is gone: older checkpoints are deleted, and what took
        so long to read may be one of those by now."""
        if self.get(LATEST)[0] == str(self.newest):
            return False
        text, answer = wait_until(self.manifest_or_none, "an answer of the server")
        return answer["code"] == "ENOENT" or "files" not in json.loads(text)

    def manifest_or_none(self):
        """Asked until the server, which may be away, says one or the other."""
        text, answer = self.get(f"iter_{self.newest:07d}/.mobula/manifest.json")
        return (text, answer) if answer["code"] in ("OK", "ENOENT") else None

    def run(self):
        try:
            while not self.ending.is_set() and not self.wrong:
                wrong = self.look()
                if wrong and not self.is_deleted():
                    self.wrong.append(wrong)
        except Exception as error:  # a reader that ends must not look like one that found nothing
            self.wrong.append(repr(error))
            raise


def check_the_reader(directory):
    """A pointer that goes back and comes again is found; so is a file that is wrong, unless its checkpoint was deleted."""
    def manifest(crc):
        return json.dumps({"files": [{"path": "w", "size": 3, "crc64nvme": crc}]})

    def found(moves):
        """Of a reader that sees what `moves` yields, one step at a time: the pointer and the manifests by iteration."""
        state = {}

        def tool(verb, key, **_):
            if verb == "get" and key == LATEST:
                step = next(moves, None)
                if step is None:
                    reader.ending.set()
                else:
                    state["latest"], state["manifests"] = step
                return {"code": "OK", "data": str(state["latest"])}
            if verb == "get":
                text = state["manifests"].get(int(key[5:12]))
                return {"code": "OK", "data": text} if text else {"code": "ENOENT"}
            return {"code": "OK", "size": 3, "etag": "e", "crc": "right"}

        reader = Reader(tool, pathlib.Path(directory, "pace"), directory)
        reader.run()
        return reader.wrong

    good, bad = manifest("right"), manifest("other")
    both = {1: good, 2: good}
    assert not found(iter([(1, both), (2, both), (2, both)]))
    assert found(iter([(1, both), (2, both), (1, both), (2, both)])) == ["latest went from 2 back to 1"]
    assert len(found(iter([(1, {1: bad}), (1, {1: bad})]))) == 1
    assert len(found(iter([(1, {1: bad}), (2, {1: bad, 2: good})]))) == 1
    assert not found(iter([(1, {1: bad}), (2, {2: good}), (2, {2: good})]))
    assert len(found(iter([(1, {}), (1, {})]))) == 1


def sent_under_a_new_id(requests, aborts_excuse):
    """Parts that went again under another upload id, of a key whose former upload had them acknowledged and was not
    completed: the id was forgotten, and what the server had with it. An abort is an excuse where writers follow each
    other in one place (aborts_excuse), since the later one aborts what the former one began."""
    held, again = {}, []  # (key, part number, bytes, checksum) -> (upload id, acknowledged at)
    for r in sorted(requests, key=lambda r: r.done or r.time):
        upload = re.search(r"uploadId=([^&]*)", r.target)
        if not upload or "/iter_" not in r.target:
            continue
        key = r.target.partition("?")[0]
        if r.method == "POST" or (r.method == "DELETE" and aborts_excuse):
            held = {part: of for part, of in held.items() if part[0] != key or of[0] != upload[1]}
        elif r.method == "PUT" and r.status == 200 and r.done:
            part = (key, re.search(r"partNumber=(\d+)", r.target)[1], r.body_bytes,
                    r.header("x-amz-checksum-crc64nvme"))
            former = held.get(part)
            if former and former[0] != upload[1] and former[1] + UNREAD_S < r.time:
                again.append(f"{r!r}: upload {former[0]} had it {r.time - former[1]:.3f} s before")
            held[part] = (upload[1], r.done)
    return again


def check_the_counter():
    """A part that goes again is seen under whichever id, and one of a completed upload, or of other bytes, is not."""
    def request(at, method, upload_id, sum_of="a"):
        r = faults.Request(method, f"/bucket/run/iter_0000001/big?partNumber=1&uploadId={upload_id}",
                           [("x-amz-checksum-crc64nvme", sum_of)])
        r.time, r.done, r.status, r.body_bytes = at, at + 0.1, 200, 5
        return r

    first, again = request(1, "PUT", "one"), request(3, "PUT", "two")
    assert len(sent_under_a_new_id([first, again], True)) == 1
    assert not sent_under_a_new_id([first, request(2, "POST", "one"), again], False)
    assert not sent_under_a_new_id([first, request(2, "DELETE", "one"), again], True)
    assert len(sent_under_a_new_id([first, request(2, "DELETE", "one"), again], False)) == 1
    assert not sent_under_a_new_id([first, request(3, "PUT", "two", "b")], False)


class Crash:
    def __init__(self, options, cluster, server, proxy, directory):
        self.options, self.cluster, self.server, self.proxy = options, cluster, server, proxy
        self.random = random.Random(options.seed)
        self.save = pathlib.Path(directory, "save")
        self.save.mkdir()
        self.kills = {}
        self.cuts = []  # from when to when
        self.strikes = []  # (when, what)
        self.n_jobs = 0
        self.job = None
        self.began = time.monotonic()

    # ---- the job ----

    def submit(self):
        self.n_jobs += 1
        self.job = self.cluster.submit(
            ["mobula", "run", "--num-nodes", "2", "--checkpoint-url", f"s3://{servers.BUCKET}/{PREFIX}",
             "--checkpoint-keep-last", str(KEEP_LAST), "--save", str(self.save), "--max-restarts", "100000",
             "--restart-delay", "1ms", "--stop-grace", "5s", "--", sys.executable, str(HERE / "crash_rank.py"),
             str(self.save), str(self.options.size)], submission_id=f"crash-{self.n_jobs}")

    def keep_job(self):
        """The head may be away for a moment."""
        try:
            if self.cluster.job(self.job)["status"] in TERMINAL:
                self.submit()
        except OSError:
            pass

    # ---- who is killed ----

    def victims(self, what):
        pids = self.cluster.own_pids()
        if what == "rank":
            return list(self.cluster.rank_pids("crash_rank.py").values())
        if what == "driver":
            return [p for p in pids if command_of(p).startswith("mobula run ")]
        return [n["pid_agent"] for n in self.cluster.nodes()]

    def strike(self):
        what = self.random.choices(["agent", "rank", "driver", "server", "cut", "both agents"],
                                   [40, 15, 0 if self.options.spare_driver else 7, 12, 20, 6])[0]
        if what == "cut":
            began = time.monotonic()
            self.proxy.cut()  # one connection after the other: answers go out meanwhile, some to those that are cut next
            self.cuts.append((began, time.monotonic()))
        elif what == "server":
            self.server.stop()
            self.server.start()
        else:
            found = self.victims(what)
            if not found:
                return
            for pid in found if what == "both agents" else [self.random.choice(sorted(found))]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    return
        self.kills[what] = self.kills.get(what, 0) + 1
        self.strikes.append((time.monotonic(), what))

    def pause(self):
        """Kills come at random moments: this is the distance of two of them."""
        time.sleep(self.random.expovariate(1 / self.options.distance))

    # ---- what is counted ----

    def sent_again(self):
        """Data that was sent although its sender could know that the server has it: the acknowledgement had gone
        out, and to whom a kill made forget that, before it asked the server for the parts that are there. A
        connection that is cut takes along what its reader has not read yet, however long that waits for a processor."""
        acknowledged, asked, again = {}, {}, []
        for r in list(self.proxy.requests):
            upload = re.search(r"uploadId=[^&]*", r.target)
            if r.method == "GET" and upload:
                asked[upload[0]] = r.time
            if r.method != "PUT" or "/iter_" not in r.target or "/.mobula/" in r.target or r.status != 200 or not r.done:
                continue
            key = (r.target, None if upload else r.header("x-amz-checksum-crc64nvme"))
            if key in acknowledged:
                former = acknowledged[key]
                sent_at, done_at = former.time, former.done
                asked_at = asked.get(upload[0], 0) if upload else 0
                is_lost = former.is_unread or any(began <= done_at <= ended for began, ended in self.cuts)
                if done_at < (asked_at if asked_at > sent_at else r.time) and not is_lost:
                    again.append(f"{r!r}: acknowledged {r.time - done_at:.3f} s before")
            acknowledged[key] = r
        return again, len(acknowledged)

    def unfinished(self):
        root = self.server.root
        if self.server.kind == "versitygw":
            # A server that was killed inside CompleteMultipartUpload leaves a directory that it does not list.
            found = (root / servers.BUCKET / ".sgwtmp/multipart").glob("*/*")
            return [str(p) for p in found if not p.name.endswith(".inprogress")]
        return [str(p) for p in (root / ".minio.sys/multipart").glob("*/*")]

    def rest(self):
        """The job ends, and with it all uploads."""
        def stopped():
            try:
                self.cluster.call("POST", f"/api/jobs/{self.job}/stop")
                return self.cluster.job(self.job)["status"] in TERMINAL
            except OSError:
                return False

        wait_until(stopped, "the job stops", 120)
        self.cluster.assert_all_free(60)
        wait_until(lambda: not self.living_gangs(), lambda: f"not ended: {self.living_gangs()}", 120)

    def living_gangs(self):
        """What has not ended may still upload, or abort what it began."""
        found = []
        for node in self.cluster.nodes():
            for path in sorted((node["dir"] / "gangs").glob("*/gang.json")):
                try:
                    state = json.loads(path.read_text())["state"]
                except FileNotFoundError:  # its node has forgotten it meanwhile
                    continue
                if state != "ENDED":
                    found.append(f"{path}: {state}")
        return found


def print_uploads(cluster):
    """For a test that failed: what the uploaders and gangs did last."""
    for node in cluster.nodes():
        text = (node["dir"] / "agent.log").read_text(errors="replace")
        lines = [line for line in text.splitlines() if re.search(r" (upload|gang|control|s3): ", line)]
        print(f"---- {node['dir']}", *lines[-80:], sep="\n", file=sys.stderr)


def print_left(crash, left):
    """What was asked of the server about the key of an upload that is left, and what was killed at that time."""
    requests = list(crash.proxy.requests)
    strikes = [(at, f"killed: {what}") for at, what in crash.strikes]
    for path in map(pathlib.Path, left):
        print(f"---- {path}: {[(p.name, p.stat().st_size) for p in path.rglob('*')]}", file=sys.stderr)
        keys = {r.target.partition("?")[0].lstrip("/") for r in requests}
        # Both servers name its directory by a hash of the key, one of them with the bucket.
        key = next((k for k in keys for text in (k, k.partition("/")[2])
                    if hashlib.sha256(text.encode()).hexdigest() == path.parent.name), None)
        asked = [r for r in requests if key and urllib.parse.quote(key.partition("/")[2], safe="")
                 in urllib.parse.quote(urllib.parse.unquote(r.target), safe="")]
        if not asked:
            continue
        began, ended = asked[0].time - 2, max(r.done or r.time for r in asked) + 2
        lines = strikes + [(r.time, f"{r!r} .. {(r.done or 0) - crash.began:.3f}") for r in asked]
        for at, line in sorted(lines):
            if began < at < ended:
                print(f"{at - crash.began:.3f} {line}", file=sys.stderr)
        away = time.time() - time.monotonic()
        stamps = [time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at + away)) for at in (began, ended)]
        print(f"{began - crash.began:.3f} is {stamps[0]}", file=sys.stderr)
        for node in crash.cluster.nodes():
            text = (node["dir"] / "agent.log").read_text(errors="replace")
            print(f"---- {node['dir']}", *[line for line in text.splitlines() if stamps[0] <= line[:19] <= stamps[1]],
                  sep="\n", file=sys.stderr)


def run(options, directory):
    with servers.behind_a_proxy(options.kind, directory) as (server, proxy, env), Cluster(nodes=2, env=env) as cluster:
        crash = Crash(options, cluster, server, proxy, directory)
        try:
            tell(options, crash, *crash_and_rest(options, crash))
        except BaseException:
            print_uploads(cluster)
            newest = (crash.save / "pace").read_text() if (crash.save / "pace").exists() else "0"
            print("---- requests for it", file=sys.stderr)
            for r in list(proxy.requests):
                if f"iter_{int(newest):07d}" in r.target or LATEST in r.target:
                    print(f"{r.time - crash.began:.3f} .. {(r.done or 0) - crash.began:.3f} {r!r} "
                          f"{r.header('if-match') or r.header('if-none-match')}", file=sys.stderr)
            raise


def crash_and_rest(options, crash):
    tool = servers.Tool(options.tool, crash.server.direct(), url=f"s3://{servers.BUCKET}/{PREFIX}")
    reader = Reader(tool, crash.save / "pace", crash.save.parent)
    crash.submit()
    reader.start()
    began, told = time.monotonic(), 50
    wait_until(lambda: reader.newest or reader.wrong, "the first checkpoint", 60)
    while sum(crash.kills.values()) < options.kills and not reader.wrong:
        crash.pause()
        crash.keep_job()
        crash.strike()
        if options.verbose and sum(crash.kills.values()) >= told:
            told += 50
            print(f"{time.monotonic() - began:.0f} s {crash.kills} latest={reader.newest}", flush=True)
    mark = reader.newest
    wait_until(lambda: crash.keep_job() or reader.newest > mark or reader.wrong,
               f"a checkpoint after iteration {mark}, the newest at the last kill", 120)
    crash.rest()
    reader.ending.set()
    reader.join(60)
    assert not reader.wrong, reader.wrong
    reader.tool.close()
    return reader, time.monotonic() - began


def tell(options, crash, reader, took_s):
    again, acknowledged = crash.sent_again()
    again += sent_under_a_new_id(list(crash.proxy.requests), aborts_excuse=not options.spare_driver)
    left = crash.unfinished()
    verified = crash.cluster.mobula("checkpoint", "verify", f"s3://{servers.BUCKET}/{PREFIX}")
    print(f"{options.kind}: seed {options.seed}: {sum(crash.kills.values())} kills {crash.kills} in {took_s:.0f} s; "
          f"{crash.n_jobs} jobs, latest={reader.newest}, {reader.looks} looks of the reader, {reader.files} files read "
          f"back; {acknowledged} acknowledged writes of data, {len(again)} sent again; {len(left)} unfinished uploads "
          "left", flush=True)
    print_left(crash, left)
    assert not again, again[:5]
    assert not left, left[:5]
    assert verified.returncode == 0, verified.stdout
    assert reader.newest > 2 and reader.looks > 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool", help="store_tool")
    parser.add_argument("kind", choices=servers.KINDS_AND_HOW)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--size", type=int, default=68 << 20, help="of the big file of each checkpoint")
    parser.add_argument("--distance", type=float, default=1.0, help="mean seconds between two kills")
    parser.add_argument("--spare-driver", action="store_true", help="one job, whose driver lives")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    check_the_counter()
    with tempfile.TemporaryDirectory(prefix="mb-crash-") as directory:
        check_the_reader(directory)
        run(options, directory)


if __name__ == "__main__":
    main()
