"""mobula checkpoint push against a real server behind a proxy: test_push.py MOBULA KIND"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
import unittest

import servers
from checkpoint_case import HOW, KIND, MIB, NAMES, Case
from faults import drop_answer, error, hold, stall


class Whole(Case):
    def test_all_of_it(self):
        top = self.checkpoint(20, {n: os.urandom(3000) if n != "zero" else b"" for n in NAMES} |
                              {"big": os.urandom(70 * MIB)})
        out = self.mobula("push", top, self.url)
        self.assertIn("pushed: iteration 20, 6 files", out)
        self.assertIn("verified: iteration 20", self.mobula("verify", self.url))
        self.assertEqual(self.journals(top), [])
        # The order: data, part, manifest, pointer.
        puts = [r.target.split("/", 3)[-1] for r in self.proxy.seen("PUT", "") if "partNumber" not in r.target]
        self.assertEqual([p.split("/")[-1] for p in puts[-3:]],
                         ["part-0-of-1.json", "manifest.json", "latest_checkpointed_iteration.txt"])
        self.assertEqual(puts[0].split("/")[-1], "manifest.json")  # the claim
        before = len(self.proxy.seen("PUT", ""))
        self.assertIn("already, with the same contents", self.mobula("push", top, self.url))
        self.assertEqual(len(self.proxy.seen("PUT", "")), before)

    def test_whole_ones_are_not_replaced(self):
        top = self.checkpoint(4)
        self.mobula("push", top, self.url)
        (top / "iter_0000004" / NAMES[0]).write_bytes(os.urandom(1000))
        before = len(self.proxy.seen("PUT", ""))
        self.assertIn("is another one", self.mobula("push", top, self.url, status=72))
        (top / "iter_0000004" / "more").write_bytes(b"x")
        self.assertIn("with other files", self.mobula("push", top, self.url, status=72))
        self.assertEqual(len(self.proxy.seen("PUT", "")), before)
        self.mobula("verify", self.url)

    def test_pointer_never_goes_back(self):
        self.mobula("push", self.checkpoint(8, name="new"), self.url)
        old = self.checkpoint(6, name="old")
        self.assertIn("pointer stays at iteration 8", self.mobula("push", old, self.url))
        self.assertIn("iteration 8", self.mobula("verify", self.url))
        self.mobula("push", "--force", old, self.url)
        self.assertIn("iteration 6", self.mobula("verify", self.url))
        self.assertEqual(json.loads(self.mobula("push", "--json", self.checkpoint(9, name="next"), self.url)
                                    .splitlines()[-1])["latest"], 9)

    def test_leftovers_of_others_are_replaced(self):
        """Objects under the names of a push that was never whole."""
        files = {n: os.urandom(5000) for n in NAMES}
        self.mobula("push", "--plain", self.checkpoint(3, files, "first") / "iter_0000003", f"{self.url}/iter_0000003")
        files[NAMES[0]] = os.urandom(4000)
        files[NAMES[1]] = os.urandom(5000)
        self.mobula("push", self.checkpoint(3, files, "second"), self.url)
        self.mobula("verify", self.url)

    def test_claims(self):
        """Another writer's claim is respected; with --force it is taken over, and that one ends."""
        first, second = (self.checkpoint(3, {"x": os.urandom(70 * MIB)}, name) for name in ("a", "b"))
        stopped = []
        self.proxy.rule("PUT", "partNumber", stall(), when=lambda _: not stopped)
        process = self.start("push", first, self.url)
        servers.wait_for("it sends", lambda: self.proxy.seen("PUT", "partNumber"))
        self.assertIn("is writing iteration 3 there", self.mobula("push", second, self.url, status=71))
        self.assertIn("unfinished", self.mobula("ls", self.url))
        process.send_signal(signal.SIGSTOP)  # or it would be over before the other one begins
        stopped.append(process)
        self.mobula("push", "--force", second, self.url)
        self.proxy.clear()
        process.send_signal(signal.SIGCONT)
        self.assertIn("another writer", process.communicate(timeout=100)[0])
        self.assertIn(process.returncode, (71, 72))
        self.mobula("verify", self.url)
        self.assertIn("is the same in both", self.mobula("diff", second, self.url))
        self.mobula("push", "--abandon", first, self.url)
        self.assertEqual(self.open_uploads(), [])

    def test_the_part_of_who_took_over(self):
        """A push that stood still before its part went does not write over the part of the next writer."""
        first, second = (self.checkpoint(3, name=name) for name in ("a", "b"))
        stopped = []
        self.proxy.rule("PUT", "part-0-of-1", error(503, "SlowDown"), when=lambda _: not stopped)
        process = self.start("push", first, self.url)
        servers.wait_for("its part goes", lambda: self.proxy.seen("PUT", "part-0-of-1"))
        process.send_signal(signal.SIGSTOP)
        stopped.append(process)
        self.mobula("push", "--force", second, self.url)
        process.send_signal(signal.SIGCONT)
        self.assertIn("another writer", process.communicate(timeout=100)[0])
        self.assertEqual(process.returncode, 71)
        statuses = [r.server_status for r in self.proxy.seen("PUT", "part-0-of-1")]
        self.assertEqual(statuses.count(200), 1, statuses)
        self.mobula("verify", self.url)

    def test_without_conditional_writes(self):
        def is_conditional(request):
            return request.method in ("PUT", "POST") and (request.header("If-None-Match") or request.header("If-Match"))

        self.proxy.rule("", "", error(501, "NotImplemented"), when=is_conditional)
        top = self.checkpoint(3, {"x": os.urandom(70 * MIB), "y": b"y"})
        self.assertIn("DOES NOT IMPLEMENT CONDITIONAL WRITES", self.mobula("push", top, self.url))
        self.mobula("verify", self.url)
        self.mobula("push", self.checkpoint(5, name="newer"), self.url)
        # Whole already, so that the pointer is the first write.
        self.mobula("push", "--force", top, self.url)
        self.assertIn("iteration 3", self.mobula("verify", self.url))
        self.assertEqual(self.open_uploads(), [])

    def test_a_pointer_that_is_none(self):
        top = self.checkpoint(3)
        wrong = self.dir / "wrong"
        wrong.mkdir()
        (wrong / "latest_checkpointed_iteration.txt").write_text("9" * 200000)
        self.mobula("push", "--plain", wrong, self.url)
        self.mobula("push", top, self.url)
        self.assertIn("iteration 3", self.mobula("verify", self.url))

    def test_plain(self):
        top = self.dir / "plain"
        (top / "sub").mkdir(parents=True)
        (top / "sub/x").write_bytes(b"x" * 1000)
        (top / "y").write_bytes(b"")
        out = self.mobula("push", top, self.url)
        self.assertIn("pushed: 2 files", out)
        self.assertIn("no manifest", out)
        release = self.dir / "release"
        (release / "release").mkdir(parents=True)
        (release / "release/w").write_bytes(b"w" * 100)
        (release / "latest_checkpointed_iteration.txt").write_text("release")
        self.assertIn("--plain", self.mobula("push", release, self.url + "/base", status=78))
        self.mobula("push", "--plain", release, self.url + "/base")
        self.assertTrue(self.proxy.seen("PUT", "")[-1].target.endswith("latest_checkpointed_iteration.txt"))


    def test_plain_ones_come_back(self):
        """What push --plain has sent, file by file; again, only what another size tells to be new."""
        top, back = self.dir / "plain", self.dir / "back"
        files = {f"{i}/{n}": os.urandom(i * 1000) for i in range(20) for n in NAMES[:3]} | {"big": os.urandom(70 * MIB)}
        for name, data in files.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_bytes(data)
        self.mobula("push", "--plain", top, self.url)
        self.assertIn("pulled: 61 files", self.mobula("pull", "--plain", self.url, back))
        for name, data in files.items():
            self.assertEqual((back / name).read_bytes(), data, name)
        self.assertEqual(sum(p.is_file() for p in back.rglob("*")), 61)  # no temporary one
        with (top / "1" / NAMES[0]).open("ab") as f:
            f.write(b"more")
        self.mobula("push", "--plain", top, self.url)
        before = len(self.proxy.seen("GET", ""))
        done = json.loads(self.mobula("pull", "--plain", "--json", self.url, back).splitlines()[-1])
        self.assertEqual((done["files"], done["bytes"] - done["kept_bytes"]), (61, 1004))
        self.assertLessEqual(len(self.proxy.seen("GET", "")) - before, 2)  # the listing and that one
        self.assertEqual((back / "1" / NAMES[0]).read_bytes(), files[f"1/{NAMES[0]}"] + b"more")
        some = self.dir / "some"
        self.mobula("pull", "--plain", "--files", "1?/zero", self.url, some)
        self.assertEqual(sum(p.is_file() for p in some.rglob("*")), 10)

    def test_a_plain_pull_that_fails(self):
        top, back = self.dir / "plain", self.dir / "back"
        top.mkdir()
        for i in range(100):
            (top / str(i)).write_bytes(b"x" * 1000)
        self.assertIn("no object", self.mobula("pull", "--plain", self.url, back, status=66))
        self.assertIn("have none", self.mobula("pull", "--plain", "--iteration", 1, self.url, back, status=64))
        self.mobula("push", "--plain", top, self.url)
        self.assertIn("that matches y", self.mobula("pull", "--plain", "--files", "y", self.url, back, status=66))
        refused = []
        self.proxy.rule("GET", "/57", error(403, "AccessDenied"), when=lambda _: not refused)
        self.assertIn("57", self.mobula("pull", "--plain", self.url, back, status=77))
        self.assertEqual({p.stat().st_size for p in back.iterdir()} - {1000}, set())  # whole ones alone
        refused.append(1)
        self.mobula("pull", "--plain", self.url, back)
        self.assertEqual(len(list(back.iterdir())), 100)


class Refused(Case):
    def test_partial_directories(self):
        top = self.checkpoint(5)
        tracker = top / "latest_checkpointed_iteration.txt"
        for text, status in (("", 65), ("1e", 65), ("-5", 65), ("6", 66)):
            tracker.write_text(text)
            out = self.mobula("push", top, self.url, status=status)
            self.assertIn("latest_checkpointed_iteration.txt" if status == 65 else "is partial", out)
        tracker.write_text("5")
        (top / "iter_0000005/state.json").write_text('{"data_parallel_size": 2}')
        self.assertIn("model_tp00_pp00.safetensors", self.mobula("push", top, self.url, status=66))
        (top / "iter_0000007").mkdir()
        self.assertIn("has no files", self.mobula("push", "--iteration", 7, top, self.url, status=66))
        self.assertIn("is no directory", self.mobula("push", self.dir / "nope", self.url, status=66))
        self.assertEqual(self.proxy.seen("PUT", ""), [])

    def test_no_writes_at_all(self):
        """A server that refuses plain writes too, as a wrong endpoint does."""
        self.proxy.rule("PUT", "", error(501, "NotImplemented"))
        self.assertIn("NotImplemented", self.mobula("push", self.checkpoint(5), self.url, status=78))
        self.assertLess(len(self.proxy.seen("PUT", "")), 20)

    def test_names(self):
        for name, shown in ((b"esc\x1b[2Jape", "[2Jape"), (b"not-\xff-utf8", "not-\\xff-utf8"),
                            ("bidi\u202e".encode() + b"\xff", "\\xe2\\x80\\xae")):
            top = self.dir / "names"
            top.mkdir()
            with open(os.fsencode(top) + b"/" + name, "wb"):
                pass
            out = self.mobula("push", top, self.url, status=64)
            self.assertNotIn("\x1b", out)
            self.assertNotIn("\u202e", out)
            self.assertIn(shown, out)
            shutil.rmtree(top)

    def test_rights(self):
        top = self.checkpoint(5)
        secret = "wrong-secret-of-the-test"
        out = self.mobula("push", top, self.url, status=77, BUCKET_STORAGE_SECRET_KEY=secret)
        self.assertNotIn(secret, out)
        self.assertIn("NoSuchBucket", self.mobula("push", top, "s3://missing/x", status=66))
        self.proxy.rule("PUT", "iter_", error(403, "AccessDenied"))
        self.assertIn("AccessDenied", self.mobula("push", top, self.url, status=77))
        self.proxy.clear()
        self.mobula("push", top, self.url)

    def test_a_server_that_is_away(self):
        top = self.checkpoint(5)
        self.proxy.rule("PUT", r"iter_\d+/[^.]", error(503, "SlowDown"))
        self.assertIn("SlowDown", self.mobula("push", "--retry-for", "1s", top, self.url, status=69))
        # Before it gives up it says for what it waits, once.
        out = self.mobula("push", "--retry-for", "8s", top, self.url, status=69)
        self.assertEqual(len(re.findall(r"failing for \S+ s, asking again in \S+ s: .*SlowDown", out)), 1, out)
        self.proxy.clear()
        self.mobula("push", top, self.url)

    @unittest.skipIf(HOW or KIND != "versitygw", "once is enough: no server takes part")
    def test_a_server_that_is_dead(self):
        """It refuses, its host does not answer, or it takes connections and is silent: over after the time that was said
        (+ 3 s for the start of a program on a machine that is busy); one that took a request has 10 s for its answer."""
        top = self.checkpoint(5)
        for deaf, left_s in (("refuses", 2), ("no answer", 2), ("silent", 10)):
            with contextlib.ExitStack() as stack:
                s = stack.enter_context(socket.socket())
                s.bind(("127.0.0.1", 0))
                if deaf != "refuses":
                    s.listen(0 if deaf == "no answer" else 100)
                while deaf == "no answer":  # its queue is full: Linux drops what comes then
                    held = stack.enter_context(socket.socket())
                    held.settimeout(0.2)
                    try:
                        held.connect(s.getsockname())
                    except TimeoutError:
                        break
                began = time.monotonic()
                self.mobula("push", "--retry-for", "2s", top, self.url, status=69,
                            BUCKET_STORAGE_HOST=f"http://127.0.0.1:{s.getsockname()[1]}")
                took_s = time.monotonic() - began
                self.assertLess(took_s, left_s + 3, deaf)
                self.assertGreater(took_s, 1, deaf)

    def test_state_cannot_be_written(self):
        top = self.checkpoint(5)
        self.assertIn("--state-dir", self.mobula("push", "--state-dir", self.dir / "nope", top, self.url, status=66))
        state = self.dir / "state"
        state.mkdir()
        self.mobula("push", "--state-dir", state, top, self.url)
        self.assertEqual(list(state.iterdir()) + self.journals(top), [])

    def test_full_disk(self):
        """No room for the journal, from its first record or a later one on: that ends it, nothing is visible, and with
        room again it goes on."""
        for limit in (1, 400):
            top = self.checkpoint(5, {"big": os.urandom(70 * MIB), "small": b"s" * 5000}, name=str(limit))
            url = f"{self.url}-{limit}"
            process = self.start("push", top, url, limit_bytes=limit)
            out = process.communicate(timeout=100)[0]
            self.assertEqual(process.returncode, 73, out)
            self.assertIn(".mobula-push-", out)
            self.assertIn("no checkpoint", self.mobula("verify", url, status=66))
            self.mobula("push", top, url)
            self.mobula("verify", url)
        self.assertEqual(self.open_uploads(), [])


class Interrupted(Case):
    def big(self):
        return self.checkpoint(2, {"big": os.urandom(100 * MIB), "other": os.urandom(66 * MIB), "small": b"s" * 5000})

    def acknowledged(self):
        return [r.target for r in self.proxy.seen("PUT", "partNumber=") if r.status == 200 and r.done]

    def start_and_keep_back(self, n_parts, top):
        """A push of which that many parts more are sent, and no others until the proxy's rules are cleared."""
        want = len(self.acknowledged()) + n_parts
        self.proxy.rule("PUT", "partNumber=", hold(), skip=n_parts)
        process = self.start("push", top, self.url)
        self.addCleanup(process.kill)
        servers.wait_for("some parts are sent", lambda: len(self.acknowledged()) >= want or process.poll() is not None)
        self.assertIsNone(process.poll())
        return process

    def kill_after(self, n_parts, top, signum=signal.SIGKILL):
        process = self.start_and_keep_back(n_parts, top)
        process.send_signal(signum)
        out = process.communicate(timeout=100)[0]
        self.proxy.cut()  # or what it had begun to send would go on without it
        self.proxy.clear()
        return process.returncode, out

    def expect_new(self, acknowledged, began):
        again = acknowledged & {r.target for r in self.proxy.seen("PUT", "partNumber=")[began:]}
        self.assertEqual(again, set(), "acknowledged parts were sent again")

    def test_kills(self):
        top = self.big()
        acknowledged = set()
        for n in (1, 2, 2, 2):
            began = len(self.proxy.seen("PUT", "partNumber="))
            self.kill_after(n, top)
            self.expect_new(acknowledged, began)
            acknowledged = set(self.acknowledged())
        self.assertEqual(len(acknowledged), 7)
        began = len(self.proxy.seen("PUT", "partNumber="))
        self.mobula("push", top, self.url)
        self.expect_new(acknowledged, began)
        self.assertEqual(len({r.target for r in self.proxy.seen("PUT", "partNumber=") if r.status == 200}), 7 + 5)
        self.mobula("verify", self.url)
        self.assertEqual(self.open_uploads(), [])
        self.assertEqual(self.journals(top), [])

    def completing(self, top, n_looks):
        """Killed behind CompleteMultipartUpload; the server knows neither the upload nor the object for some looks."""
        self.proxy.rule("POST", "big.*uploadId=", stall(answer=True))
        process = self.start("push", top, self.url)
        servers.wait_for("the server completes it", lambda: any(
            r.server_status for r in self.proxy.seen("POST", "big.*uploadId=")))
        process.kill()
        process.communicate()
        self.proxy.clear()
        self.proxy.rule("GET", "big.*uploadId=", error(404, "NoSuchUpload"), times=n_looks)
        return self.proxy.rule("HEAD", "big", error(404), times=n_looks), len(self.proxy.seen("PUT", "big.*partNumber="))

    def test_killed_while_the_server_completes(self):
        top = self.big()
        heads, began = self.completing(top, 3)
        self.mobula("push", top, self.url)
        self.assertEqual(heads["used"], 3)
        self.assertEqual(self.proxy.seen("PUT", "big.*partNumber=")[began:], [])
        self.mobula("verify", self.url)
        self.assertEqual(self.open_uploads(), [])

    def test_gone_from_the_server(self):
        """Neither the upload nor the object comes again: after a while it is sent once more."""
        top = self.big()
        heads, began = self.completing(top, 1000)
        begun = time.monotonic()
        process = self.start("push", top, self.url)
        servers.wait_for("a new upload is begun", lambda: len(self.proxy.seen("POST", "big.*uploads")) == 2)
        self.assertGreater(time.monotonic() - begun, 4)  # it was given 6 s
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 0, out)
        self.assertGreater(heads["used"], 3)
        self.assertEqual(len(self.proxy.seen("PUT", "big.*partNumber=")[began:]), 7)
        self.proxy.clear()
        self.mobula("verify", self.url)
        self.assertEqual(self.open_uploads(), [])

    def test_the_file_changes_between(self):
        top = self.big()
        self.kill_after(3, top)
        (top / "iter_0000002/big").write_bytes(os.urandom(90 * MIB))
        (top / "iter_0000002/other").unlink()
        self.mobula("push", top, self.url)
        self.mobula("verify", self.url)
        self.assertEqual(self.open_uploads(), [])

    def small_ones_sent(self):
        """A push that ends after its small files, before its big one."""
        top = self.checkpoint(2, {"big": os.urandom(70 * MIB), "one": b"1" * 5000, "two": b"2" * 5000})
        self.proxy.rule("POST", "uploads", stall())
        process = self.start("push", top, self.url)
        servers.wait_for("the small ones are noted", lambda: [
            j for j in self.journals(top) if j.read_bytes().count(b'"done"') == 2])
        process.kill()
        process.communicate()
        self.proxy.clear()
        return top

    def test_the_same_size_and_time(self):
        """Other bytes in a file that was sent, by a program that restores its time (rsync --inplace -t)."""
        top = self.small_ones_sent()
        one = top / "iter_0000002/one"
        before = one.stat()
        one.write_bytes(b"x" * 5000)
        os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.assertEqual((one.stat().st_size, one.stat().st_ino), (before.st_size, before.st_ino))
        self.mobula("push", top, self.url)
        self.mobula("verify", self.url)
        self.assertIn("is the same in both", self.mobula("diff", top, self.url))

    def test_another_object_of_the_same_size(self):
        """Somebody who asks no claim replaced an object that was sent; the other one is not sent again."""
        top = self.small_ones_sent()
        other = self.dir / "other"
        other.mkdir()
        (other / "one").write_bytes(b"x" * 5000)
        self.mobula("push", "--plain", other, f"{self.url}/iter_0000002")
        began = len(self.proxy.requests)
        self.mobula("push", top, self.url)
        sent = [r.target.rsplit("/", 1)[-1] for r in self.proxy.requests[began:] if r.method == "PUT"]
        self.assertIn("one", sent)
        self.assertNotIn("two", sent)
        self.mobula("verify", self.url)
        self.assertIn("is the same in both", self.mobula("diff", top, self.url))

    def test_plain_ones_are_looked_at(self):
        """Plain files have no claim: what is noted as sent may be gone, or another one."""
        top = self.dir / "plain"
        top.mkdir()
        for name in "abcd":
            (top / name).write_bytes(name.encode() * 3000)
        self.proxy.rule("PUT", "/d$", stall())
        process = self.start("push", top, self.url)
        servers.wait_for("three are noted", lambda: [
            j for j in self.journals(top) if j.read_bytes().count(b'"done"') == 3])
        process.kill()
        process.communicate()
        self.proxy.clear()
        other = self.dir / "other"
        other.mkdir()
        (other / "a").write_bytes(b"x" * 3000)
        self.mobula("push", other, self.url)
        began = len(self.proxy.requests)
        self.mobula("push", top, self.url)
        sent = [r.target.rsplit("/", 1)[-1] for r in self.proxy.requests[began:] if r.method == "PUT"]
        self.assertEqual(sorted(sent), ["a", "d"])

    def test_abandoned(self):
        top = self.big()
        status, out = self.kill_after(2, top, signal.SIGINT)
        self.assertEqual(status, 130, out)
        self.assertIn("goes on where this one was", out)
        self.assertIn("abandoned", self.mobula("push", "--abandon", top, self.url))
        self.assertEqual(self.open_uploads(), [])
        self.assertEqual(self.journals(top), [])

    def test_interrupted_while_it_compares(self):
        """A leftover has the name of a file of 1 TiB, a hole whose checksum takes minutes."""
        top = self.checkpoint(2, {"big": b"b"})
        self.mobula("push", "--plain", top / "iter_0000002", f"{self.url}/iter_0000002")
        os.truncate(top / "iter_0000002/big", 1 << 40)
        process = self.start("push", top, self.url)
        self.interrupt(process, "it reads the file", lambda: self.cpu_seconds(process) > 1)
        self.assertEqual(len(self.journals(top)), 1)

    def test_interrupted_while_it_sends(self):
        top = self.big()
        self.proxy.rule("PUT", "partNumber", stall())
        process = self.start("push", top, self.url)
        self.interrupt(process, "it sends", lambda: self.proxy.seen("PUT", "partNumber"))
        self.proxy.clear()
        self.mobula("push", "--abandon", top, self.url)
        self.assertEqual(self.open_uploads(), [])

    def test_a_lost_answer_to_create(self):
        """The server began an upload that nobody has the id of."""
        top = self.big()
        self.proxy.rule("POST", "uploads", drop_answer(), times=1)
        self.mobula("push", top, self.url)
        self.mobula("verify", self.url)
        self.assertEqual(self.open_uploads(), [])

    def test_killed_before_the_id_was_known(self):
        top = self.big()
        self.proxy.delay_s = 1
        process = self.start("push", top, self.url)
        servers.wait_for("an upload is begun", lambda: self.proxy.seen("POST", "uploads"))
        process.kill()
        process.communicate()
        servers.wait_for("the server has begun it", lambda: all(
            r.server_status is not None or r.done is not None for r in self.proxy.seen("POST", "uploads")))
        self.proxy.delay_s = 0
        self.mobula("push", top, self.url)
        self.assertEqual(self.open_uploads(), [])
        self.mobula("verify", self.url)

    def test_two_at_once(self):
        top = self.big()
        first = self.start_and_keep_back(1, top)
        self.assertIn("another push of it runs", self.mobula("push", top, self.url, status=71))
        self.proxy.clear()
        self.assertEqual(first.wait(100), 0, first.communicate()[0])
        first.stdout.close()

    def test_a_file_that_grows_before_it_is_sent(self):
        """The smallest of 33 waits for one of the 32 others."""
        top = self.checkpoint(2, {f"f{i}": b"f" * 5000 for i in range(32)} | {"small": b"s"})
        self.proxy.rule("PUT", r"iter_\d+/f", stall())
        process = self.start("push", top, self.url)
        servers.wait_for("the others go", lambda: self.proxy.seen("PUT", r"iter_\d+/f"))
        with open(top / "iter_0000002/small", "ab") as f:
            f.write(b"more")
        self.proxy.clear()
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 71, out)
        self.assertIn("small: changed since the push began", out)
        self.assertIn("no checkpoint", self.mobula("verify", self.url, status=66))
        self.mobula("push", top, self.url)
        self.mobula("verify", self.url)

    def test_files_that_are_replaced_meanwhile(self):
        """By others of the same size: one before it is sent, one afterwards. A mixture of two saves is no checkpoint."""
        for which, stalls in ("small", "f"), ("f0", "f1$"):
            url, keys = f"{self.url}-{which}", rf"-{which}/iter_\d+/"
            top = self.checkpoint(2, {f"f{i}": b"f" * 5000 for i in range(32)} | {"small": b"s"}, name=which)
            self.proxy.rule("PUT", keys + stalls, stall())
            process = self.start("push", top, url)
            servers.wait_for("one stalls", lambda: self.proxy.seen("PUT", keys + stalls))
            if which == "small":
                self.assertFalse(self.proxy.seen("PUT", keys + which))
            else:
                servers.wait_for("it is sent", lambda: any(r.server_status == 200
                                                           for r in self.proxy.seen("PUT", keys + which + "$")))
            at = top / "iter_0000002" / which
            (self.dir / "new").write_bytes(b"n" * at.stat().st_size)
            os.replace(self.dir / "new", at)
            self.proxy.clear()
            out = process.communicate(timeout=100)[0]
            self.assertEqual(process.returncode, 71, out)
            self.assertIn(f"{which}: changed since the push began", out)
            self.assertIn("no checkpoint", self.mobula("verify", url, status=66))
            self.mobula("push", top, url)
            self.mobula("verify", url)

    def test_a_file_that_changes_while_it_is_sent(self):
        top = self.big()
        process = self.start_and_keep_back(2, top)
        with open(top / "iter_0000002/big", "r+b") as f:
            f.write(b"changed")
        self.proxy.clear()
        out = process.communicate(timeout=100)[0]
        self.assertEqual(process.returncode, 71, out)
        self.assertIn("changed while it was sent", out)
        self.assertIn("no checkpoint", self.mobula("verify", self.url, status=66))
        self.mobula("push", top, self.url)
        self.mobula("verify", self.url)
        self.assertEqual(self.open_uploads(), [])


class NoRights(Case):
    def test_no_right_to_list_uploads(self):
        """The upload whose id was never noted stays; everything else goes on, and that is said once."""
        for status, code in ((501, "NotImplemented"), (403, "AccessDenied")):
            top = self.checkpoint(2, {n: os.urandom(70 * MIB) for n in ("x", "y")}, name=code)
            url = f"{self.url}-{code}"
            self.proxy.rule("POST", "uploads", stall())
            process = self.start("push", top, url)
            servers.wait_for("two uploads are begun", lambda: len(self.proxy.seen("POST", f"{code}/.*uploads")) == 2)
            process.kill()
            process.communicate()
            self.proxy.clear()
            self.proxy.rule("GET", "[?&]uploads", error(status, code))
            self.assertIn("cannot be looked for", self.mobula("push", "--abandon", top, url,
                                                              status=78 if status == 501 else 77))
            out = self.mobula("push", top, url)
            self.assertEqual(out.count("cannot be looked for"), 1, out)
            self.mobula("verify", url)
            self.assertEqual(self.journals(top), [])
            self.proxy.clear()


class Shown(Case):
    def json_lines(self, *args, **more):
        return [json.loads(line) for line in self.mobula(*args, **more).splitlines() if line.startswith("{")]

    def test_json_lines(self):
        top = self.checkpoint(2, {"big": os.urandom(80 * MIB)})
        self.proxy.rate = 30 * MIB
        lines = self.json_lines("push", "--json", top, self.url)
        self.assertEqual(lines[-1]["event"], "done")
        self.assertEqual(lines[-1]["bytes"], 80 * MIB)
        progress = [l for l in lines if l["event"] == "progress"]
        self.assertTrue(progress)
        self.assertEqual([l["done_bytes"] for l in progress], sorted(l["done_bytes"] for l in progress))
        lines = self.json_lines("push", "--json", self.dir / "nope", self.url, status=66)
        self.assertEqual([l["code"] for l in lines if "event" in l], ["ENOENT"])
        self.assertEqual([l["error"]["code"] for l in lines if "event" not in l], [66])

    def test_bar_on_a_terminal(self):
        top = self.checkpoint(2, {"big": os.urandom(80 * MIB)})
        self.proxy.rate = 30 * MIB
        out = self.on_a_terminal("push", top, self.url)
        self.assertRegex(out, r"\rpush iteration 2 sending \[=*> *\] +\d+% .* of 80.0 MiB")
        self.assertIn("pushed: iteration 2", out.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
