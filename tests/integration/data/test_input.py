"""The inputs of preprocess against real peers: gzip, xz and zstd programs, web servers, an S3 server.

Usage: test_input.py DUMP_INPUT
"""

import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import unittest

import s3
import web

DUMP = sys.argv.pop(1)


def lines(seed, n_bytes):
    rng = random.Random(seed)
    letters = "".join(rng.choices("abc déf\n", k=200_000))
    out, size = [], 0
    while size < n_bytes:
        at = rng.randrange(190_000)
        out.append(json.dumps({"id": len(out), "text": letters[at:at + rng.randrange(9000)]}))
        size += len(out[-1])
    return ("\n".join(out) + "\n").encode()


A, B = lines(1, 5_000_000), lines(2, 2_000_000)


def dump(*words, env=None, stdin=None):
    kept = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith(("AWS_", "BUCKET_"))}
    return subprocess.run([DUMP, *words], input=stdin, capture_output=True, timeout=100,
                          env={**kept, "AWS_EC2_METADATA_DISABLED": "true", **(env or {})})


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-input-"))

    def write(self, name, data):
        path = os.path.join(self.dir, name)
        with open(path, "wb") as f:
            f.write(data)
        return path

    def expect(self, want, *words, env=None, stdin=None):
        done = dump(*words, env=env, stdin=stdin)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        self.assertTrue(done.stdout == want, f"{words}: {len(done.stdout)} bytes, {len(want)} wanted")
        return done

    def refused(self, status, text, *words, env=None, want=None):
        """One line of error, behind warnings; what came before it is right."""
        done = dump(*words, env=env)
        error = done.stderr.decode().splitlines()
        self.assertEqual(done.returncode, status, error)
        self.assertIn(text, error[-1])
        self.assertTrue(all(" WARN " in line for line in error[:-1]), error)
        if want is not None:
            self.assertTrue(want.startswith(done.stdout))
        return error[-1]


class Files(Case):
    def test_programs(self):
        path = self.write("a", A)
        for command in (["gzip", "-1"], ["gzip", "-9"], ["xz", "-0"], ["xz", "-9", "-T2", "--block-size=1MiB"],
                        ["zstd", "-1"], ["zstd", "-19", "--long=27", "--check"], ["zstd", "-3", "-T2"]):
            with self.subTest(command=command):
                packed = subprocess.run([*command, "-c", path], capture_output=True, check=True).stdout
                self.expect(A, self.write("packed", packed))
                self.expect(A + A, self.write("packed", packed + packed))  # members one after the other
                self.expect(A, "-", stdin=packed)
                status = self.refused(65, "it ends too early", self.write("packed", packed[:-1]), want=A)
                self.assertIn("/packed: damaged", status)

    def test_words(self):
        self.write("x-2.jsonl.gz", gzip.compress(B))
        self.write("x-10.jsonl.xz", lzma.compress(A, preset=0))
        other = self.write("other", B)
        self.expect(B + A + B + A, other, f"{self.dir}/x-*", "-", stdin=A)
        self.refused(64, "only once", "-", "-")
        self.refused(66, "no such file", f"{self.dir}/y-*")
        self.refused(64, "is a directory", self.dir)
        self.refused(78, "http://", "ftp://host/a")

    def test_from_a_place(self):
        gz, plain = self.write("a.gz", gzip.compress(A)), self.write("b", B)
        at = A.index(b"\n", 2_500_000) + 1
        self.expect(A[at:] + B, "--from", "0", str(at), gz, plain)
        at = B.index(b"\n", 1_500_000) + 1
        self.expect(B[at:], "--from", "1", str(at), gz, plain)
        self.refused(71, "shorter than when it was left", "--from", "1", str(len(B) + 1), gz, plain)


class Http(Case):
    def setUp(self):
        super().setUp()
        self.web = self.enterContext(web.Web())
        self.web.files = {"/a": A, "/a.gz": gzip.compress(A), "/b.xz": lzma.compress(B, preset=0), "/empty": b""}

    def url(self, path, **habits):
        self.web.habits[path] = habits
        return self.web.url + path

    def test_streams(self):
        self.expect(A + B + A, self.url("/a.gz"), self.url("/b.xz"), self.url("/a"))
        self.expect(b"", self.url("/empty"))
        self.expect(A, self.url("/a", length=False))
        self.expect(B, self.url("/moved", to=self.url("/b.xz")) + "?token=abc")

    def test_dropped_connections(self):
        self.expect(A, self.url("/a", drop=900_000))
        ranges = [r for path, r in self.web.requests if path == "/a"]
        self.assertEqual(ranges[0], None)
        self.assertEqual(len(ranges), -(-len(A) // 900_000))
        self.assertEqual([r for r in ranges[1:]], [f"bytes={900_000 * i}-" for i in range(1, len(ranges))])
        self.expect(A, self.url("/a.gz", drop=1_000_000, statuses=[200, 503, 502, 200]))
        # A server without ranges that drops in the middle once: all comes again, once.
        size = len(self.web.files["/b.xz"])
        self.web.habits["/b.xz"] = habit = {"drop": size // 2, "ranges": False}
        habit["etag"] = lambda: (habit.update(drop=None) if len(self.web.requests) > n else None) or '"same"'
        n = len(self.web.requests) + 1
        self.expect(B, self.web.url + "/b.xz")

    def test_another_file_is_never_mixed_in(self):
        for name, habit in (("ETag", {"etag": lambda: f'"{len(self.web.requests)}"'}),
                            ("date", {"etag": None, "modified": lambda: f"Mon {len(self.web.requests)}"})):
            status = self.refused(71, "changed while it was read", self.url("/a", drop=3_000_000, **habit), want=A)
            self.assertIn(f"another {name}", status)
            self.assertTrue(status.startswith(self.web.url + "/a: "), status)

    def test_refusals(self):
        for status, code, text in ((404, 66, "check the address"), (403, 77, "signed"), (401, 77, "signed"),
                                   (400, 76, "HTTP 400")):
            word = self.url("/a", statuses=[status]) + "?signature=secret"
            error = self.refused(code, text, word)
            self.assertTrue(error.startswith(f"--input {self.web.url}/a: HTTP {status}"), error)
            self.assertNotIn("secret", error)
        self.refused(69, "HTTP 500", self.url("/a", statuses=[500] * 9))
        self.refused(76, "Maximum (5) redirects", self.url("/loop", to="/loop"))
        self.web.server.shutdown()
        self.web.server.server_close()
        self.refused(69, "check the address and the network", self.web.url + "/a")

    def test_server_that_stays_away(self):
        self.url("/a", drop=2_000_000, statuses=[200] + [503] * 100)
        error = self.refused(69, "HTTP 503 after 2000000 bytes", "--outage-ms", "1500", self.web.url + "/a", want=A)
        self.assertTrue(error.startswith(self.web.url + "/a: "), error)  # the caller adds the line

    def test_user_and_proxy(self):
        word = self.url("/a").replace("//", "//me:secret@")
        self.expect(A, "http://nobody.invalid/a", env={"http_proxy": self.web.url})
        self.refused(69, "check the address", self.url("/a"), env={"http_proxy": "http://127.0.0.1:1"})
        self.expect(A, self.url("/a"), env={"http_proxy": "http://127.0.0.1:1", "no_proxy": "127.0.0.1"})
        self.web.habits["/a"] = {"statuses": [404]}
        self.assertNotIn("secret", self.refused(66, "404", word))

    def test_from_a_place(self):
        at = A.index(b"\n", 3_000_000) + 1
        self.expect(A[at:], "--from", "0", str(at), self.url("/a"))
        self.assertEqual(self.web.requests[-1], ("/a", f"bytes={at}-"))
        self.expect(A[at:], "--from", "0", str(at), self.url("/a.gz"))

    def test_identity(self):
        first = self.expect_identity(self.url("/a"))
        self.assertEqual(first, self.expect_identity(self.url("/a")))
        self.assertNotEqual(first, self.expect_identity(self.url("/a", etag='"two"')))
        self.refused(78, "neither ETag nor date", "--identity", self.url("/a", etag=None))

    def expect_identity(self, word):
        done = dump("--identity", word)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_tls(self):
        chain, ca = web.certificate(self.dir)
        with web.Web(chain) as safe:
            safe.files = self.web.files
            self.expect(A, safe.url + "/a.gz", env={"SSL_CERT_FILE": ca})
            self.refused(77, "SSL_CERT_FILE", safe.url + "/a.gz")
            safe.habits["/down"] = {"to": self.web.url + "/a"}
            error = self.refused(64, "http", safe.url + "/down", env={"SSL_CERT_FILE": ca})
            self.assertNotIn(("/a", None), self.web.requests, error)


class S3(Case):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-input-s3-"))
        port = cls.enterClassContext(s3.server(folder))
        cls.bucket = os.path.join(folder, "s3", s3.BUCKET)
        cls.env = {"BUCKET_STORAGE_HOST": f"http://127.0.0.1:{port}", "BUCKET_STORAGE_ACCESS_KEY": s3.ACCESS_KEY,
                   "BUCKET_STORAGE_SECRET_KEY": s3.SECRET_KEY, "AWS_ACCESS_KEY_ID": "wrong",
                   "AWS_SECRET_ACCESS_KEY": "wrong", "AWS_REGION": "us-east-1"}

    def put(self, key, data):
        path = os.path.join(self.bucket, key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
        return f"s3://{s3.BUCKET}/{key}"

    def test_streams(self):
        big = A * 4  # several parts in flight
        self.expect(big + B, self.put("in/a", big), self.put("in/b.gz", gzip.compress(B)), env=self.env)
        self.expect(b"", self.put("in/empty", b""), env=self.env)
        at = big.index(b"\n", 12_000_000) + 1
        self.expect(big[at:], "--from", "0", str(at), f"s3://{s3.BUCKET}/in/a", env=self.env)

    def test_globs(self):
        self.put("glob/x-2.gz", gzip.compress(B))
        self.put("glob/x-10", A)
        self.put("glob/deeper/x-1", A)
        self.expect(A + B, f"s3://{s3.BUCKET}/glob/x-*", env=self.env)
        self.refused(66, "no key of the bucket matches", f"s3://{s3.BUCKET}/glob/y*", env=self.env)

    def test_refusals(self):
        word = self.put("in/c", B)
        self.refused(66, "in/none", f"s3://{s3.BUCKET}/in/none", env=self.env)
        self.refused(66, "nobucket", "s3://nobucket/in/none", env=self.env)
        self.refused(64, "a key is missing", f"s3://{s3.BUCKET}", env=self.env)
        self.refused(77, "BUCKET_STORAGE_ACCESS_KEY", word)
        error = self.refused(77, "S3 answered 403", word, env={**self.env, "BUCKET_STORAGE_SECRET_KEY": "not-it"})
        self.assertNotIn("not-it", error)

    def upload(self, key, data):
        """Through the server, which then knows an ETag; files put in its directory have none."""
        subprocess.run(["curl", "-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3",
                        "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "-T", self.write("up", data),
                        "--user", f"{s3.ACCESS_KEY}:{s3.SECRET_KEY}",
                        f"{self.env['BUCKET_STORAGE_HOST']}/{s3.BUCKET}/{key}"], check=True, capture_output=True)
        return f"s3://{s3.BUCKET}/{key}"

    def test_identity(self):
        word = self.upload("in/d", B)
        self.expect(B, word, env=self.env)
        first = dump("--identity", word, env=self.env)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(dump("--identity", word, env=self.env).stdout, first.stdout)
        self.upload("in/d", B + b"{}\n")
        self.assertNotEqual(dump("--identity", word, env=self.env).stdout, first.stdout)


if __name__ == "__main__":
    unittest.main()
