"""The static client: one file, alone in an empty root, against a real head.

kuberay#2537, kuberay#3907: an image of more than 1 GB is pulled only to run `ray job submit`.
"""

import contextlib
import os
import pathlib
import re
import shutil
import socket
import socketserver
import ssl
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import unittest

import follow_restarts
import test_verbs
from cluster import MOBULA, Cluster, wait_until

CLIENT = MOBULA.parent / "mobula-client"
VERBS = {"status", "job", "version"}
MAX_BYTES = 9_000_000  # seen: 5.7 MB with the libraries of Debian 12, 8.3 MB with those of 13


# Who is not root is root in a user namespace of its own.
CHROOT = ["chroot"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot"]


def why_not():
    """Why this cannot be tested here; "" if it can."""
    headers = subprocess.run(["readelf", "-lW", CLIENT], stdout=subprocess.PIPE, check=True).stdout
    if b"INTERP" in headers:
        return "a build with sanitizers is linked with shared libraries, an empty root has none"
    with tempfile.TemporaryDirectory(prefix="mb-client-") as root:
        shutil.copy(CLIENT, root)
        done = subprocess.run([*CHROOT, root, f"/{CLIENT.name}", "version"], check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if done.returncode == 0 else f"no chroot here: {done.stdout}"


class Root(Cluster):
    """A cluster whose `mobula job|status|version` is the client in a root of its own, which holds
    nothing else; `files` are added for a test: {path in the root: bytes}."""

    def __init__(self, files=None, name="mobula", **more):
        super().__init__(**more)
        self.root = pathlib.Path(self.dir, "root")
        self.root.mkdir()
        self.name = name
        for variable in list(self.env):
            if variable in ("SSL_CERT_FILE", "SSL_CERT_DIR") or variable.lower().endswith("_proxy"):
                del self.env[variable]
        shutil.copy(CLIENT, self.root / name)
        for path, content in (files or {}).items():
            self.add(path, content)

    def add(self, path, content):
        path = self.root / path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def command(self, argv):
        if argv[0] not in VERBS:
            return super().command(argv)
        # Without TMPDIR, which is not there; MARK keeps the process one of this cluster's.
        return ["env", "-u", "TMPDIR", "-u", "RAY_ADDRESS", f"MARK={self.dir}", *CHROOT,
                str(self.root), f"/{self.name}", *map(str, argv)]


class TheFile(unittest.TestCase):
    def test_is_small_and_needs_nothing(self):
        with tempfile.TemporaryDirectory(prefix="mb-client-") as scratch:
            stripped = pathlib.Path(scratch, "mobula")
            subprocess.run(["strip", "-o", stripped, CLIENT], check=True)
            self.assertLessEqual(stripped.stat().st_size, MAX_BYTES)
            self.assertTrue(stripped.stat().st_mode & stat.S_IXUSR)
        headers = subprocess.run(["readelf", "-ldW", CLIENT], stdout=subprocess.PIPE, text=True,
                                 check=True).stdout
        self.assertNotIn("INTERP", headers)
        self.assertNotIn("NEEDED", headers)
        ldd = subprocess.run(["ldd", CLIENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, check=False).stdout
        self.assertIn("statically linked", ldd)

    @staticmethod
    def said(program, *argv):
        done = subprocess.run([program, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        return done.returncode, done.stdout

    def test_has_the_same_words(self):
        for argv in (("version",), ("version", "--json"), ("--version",), ("status", "--help"),
                     ("job", "--help"), ("job", "submit", "--help"), ("help", "job"),
                     ("__complete", "job", ""), ("__complete", "job", "submit", "--"),
                     ("job", "sumbit"), ("job", "logs", "--folow", "x"), ("staus",)):
            self.assertEqual(self.said(CLIENT, *argv), self.said(MOBULA, *argv), argv)

    def test_names_the_verbs_that_it_lacks(self):
        def verbs(program):
            return set(re.findall(r"(?m)^  (\S+)", self.said(program, "--help")[1]))

        self.assertEqual(verbs(CLIENT), VERBS)
        absent = verbs(MOBULA) - VERBS
        self.assertIn("train", absent)
        for verb in absent:
            for argv in ((verb, "--any"), ("help", verb)):
                code, text = self.said(CLIENT, *argv)
                self.assertEqual((code, text), (78, "mobula: this is the client; "
                                                f"`mobula {verb}` needs the full package\n"))

    def test_is_no_client_of_a_gcs(self):
        code, text = self.said(CLIENT, "job", "list", "--address", "10.1.2.3:6379")
        self.assertEqual(code, 78, text)
        self.assertIn("--address http://HOST:8265", text)

    def test_goes_around_no_proxy(self):
        for name in ("http_proxy", "ALL_PROXY"):
            env = {**os.environ, name: "http://user:secret@proxy:1", "NO_PROXY": "x.org"}
            command = [CLIENT, "job", "list", "--address", "http://127.0.0.1:1"]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, check=False)
            self.assertEqual(done.returncode, 78, done.stdout)
            self.assertIn("NO_PROXY", done.stdout)
            self.assertNotIn("secret", done.stdout)
            env["NO_PROXY"] = "x.org,127.0.0.1"
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, check=False)
            self.assertEqual(done.returncode, 69, done.stdout)


class VerbsTest(test_verbs.VerbsTest):
    """What holds for the full program's job verbs, word for word."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Root(nodes=1))

    def test_status(self):
        said = self.cluster.mobula("status", "--address", self.cluster.address)
        self.assertEqual(said.returncode, 0, said.stdout)
        self.assertRegex(said.stdout, r"nodes: 1\n +ALIVE ")
        with self.cluster.running("status", "--watch", "--json", "--address",
                                  self.cluster.address) as watch:
            wait_until(lambda: watch.output().count("\n") >= 1, watch.output)
            self.verb("submit", "--submission-id", "watched", "--no-wait", "--", "true")
            wait_until(lambda: "watched" in watch.output(), watch.output)

    def test_working_dir(self):
        big = os.urandom(3 << 20)
        self.cluster.add("work/a/big", big)
        self.cluster.add("work/main.sh", b"sha256sum < a/big\n")
        said = self.submit("packed", "sh", "main.sh", options=("--working-dir", "/work"))
        expected = subprocess.run(["sha256sum"], input=big, stdout=subprocess.PIPE, check=True).stdout
        self.assertIn(expected.decode(), said)
        self.assertLessEqual(set(os.listdir(self.cluster.root)), {"mobula", "work", "etc"})

    def test_a_runtime_env_in_yaml(self):
        self.cluster.add("etc/mod/__init__.py", b"")
        self.cluster.add("etc/env.yaml", b"py_modules: [/etc/mod]  # uploaded\n"
                                         b"env_vars:\n  GREETING: hello\n  N: '1'\n")
        said = self.submit("yaml", "sh", "-c", "echo $GREETING $N in $PYTHONPATH; ls ${PYTHONPATH%%:*}",
                           options=("--runtime-env", "/etc/env.yaml"))
        self.assertRegex(said, r"hello 1 in .*\n(.*\n)*mod\n")
        self.cluster.add("etc/env.yaml", b"env_vars: &a {A: '1'}\nconfig: *a\n")
        done = self.cluster.mobula("job", "submit", "--address", self.cluster.address,
                                   "--runtime-env", "/etc/env.yaml", "--", "true")
        self.assertEqual(done.returncode, 64, done.stdout)
        self.assertIn("--runtime-env /etc/env.yaml: line 2: aliases (*name) are not taken", done.stdout)

    def test_the_same_command_again_is_the_same_job(self):
        """A submitter pod that is started again: it follows the job that it has submitted."""
        options = ("--metadata-json", '{"mobula_submission_key": "pod-of-rayjob-y"}')
        command = ("sh", "-c", "echo once; exit 3")
        for _ in range(2):
            said = self.submit("again", *command, options=options, status=1)
            self.assertEqual(said.count("\nonce\n"), 2, said)  # the log, and the message's end of it
        self.submit("again", *command, status=72)  # without the key it is somebody else's
        self.submit("again", "true", options=options, status=72)  # the key of another command
        self.assertEqual(self.verb("list").count(" again "), 1)

    def test_a_list_is_one_row_a_job(self):
        """Whatever an entrypoint holds: it neither makes rows nor moves the cursor."""
        self.submit("row", "sh", "-c", "true #\x1b[2J\ntrue FAKE row")
        row, = [line for line in self.verb("list").splitlines() if " row " in line]
        self.assertIn("\\x1b[2J\\x0atrue FAKE row", row)
        self.submit("wide", "sh", "-c", "true; #" + "x" * 5000)
        row, = [line for line in self.verb("list").splitlines() if " wide " in line]
        self.assertLess(len(row), 2200)
        self.assertTrue(row.endswith("xxx..."), row)

    def test_what_the_head_refuses_is_a_usage_error(self):
        for options in (("--metadata-json", '{"a": 1}'), ("--entrypoint-resources", '{"a": "x"}')):
            self.submit("refused", "true", options=options, status=64)

    def test_a_head_that_is_away_is_told_of(self):
        command = self.cluster.command(["job", "logs", "-f", "--address", "http://127.0.0.1:1", "x"])
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as follower:
            said = follower.stderr.readline().decode()
            follower.kill()
        self.assertRegex(said, r"^mobula: http://127\.0\.0\.1:1.*; trying again for 300 s\n$")

    def test_a_long_log(self):
        n = 200000
        self.submit("long-log", "sh", "-c", f"seq {n}; printf 'no end'", options=("--no-wait",))
        said = self.verb("logs", "-f", "long-log")
        self.assertEqual(re.findall(r"(?m)^(\d+)$", said), [str(i) for i in range(1, n + 1)])
        self.assertIn("\nno end\nJob 'long-log' succeeded", said)

    def test_ranks_logs_as_one(self):
        self.submit("gang", "mobula", "run", "--num-nodes", "1", "--", "sh", "-c", "echo I am $RANK")
        said = self.verb("logs", "--merge", "--grep", "I am", "gang")
        self.assertEqual(said.splitlines(), ["[rank 0] I am 0"])

    def test_a_name_from_the_hosts_file(self):
        self.cluster.add("etc/hosts", b"127.0.0.1 ray-head\n")
        port = self.cluster.address.rsplit(":", 1)[1]
        for name in ("ray-head", "localhost", "127.0.0.1"):
            done = self.cluster.mobula("job", "list", "--address", f"http://{name}:{port}")
            self.assertEqual(done.returncode, 0, done.stdout)


class Token(unittest.TestCase):
    def test_a_token(self):
        token = "0123456789abcdef0123456789abcdef"
        with tempfile.NamedTemporaryFile("w", prefix="mb-token-") as file:
            file.write(token)
            file.flush()
            with Root(nodes=1, start_args=("--token-file", file.name)) as cluster:
                submit = ("job", "submit", "--address", cluster.address, "--", "echo", "let in")
                done = cluster.mobula(*submit)
                self.assertEqual(done.returncode, 77, done.stdout)
                cluster.add("token", token.encode())
                os.chmod(cluster.root / "token", 0o600)
                for env in ({"RAY_AUTH_TOKEN": token}, {"RAY_AUTH_TOKEN_PATH": "/token"}):
                    done = cluster.mobula(*submit, env={"RAY_AUTH_MODE": "token", **env})
                    self.assertEqual(done.returncode, 0, done.stdout)
                    self.assertIn("\nlet in\n", done.stdout)


class AsRay(unittest.TestCase):
    def test_what_kuberays_submitter_runs(self):
        with Root(nodes=1, name="ray") as cluster:
            def ray(verb, *argv):
                return cluster.mobula("job", verb, "--address", cluster.address, *argv)

            self.assertNotEqual(ray("status", "rayjob-x").returncode, 0)
            sent = ray("submit", "--no-wait", "--runtime-env-json", '{"env_vars": {"A": "sea"}}',
                       "--metadata-json", '{"k": "v"}', "--submission-id", "rayjob-x",
                       "--entrypoint-num-cpus", "0.5", "--log-style", "record", "--", "sh", "-c",
                       "echo $A; exit 4")
            self.assertEqual(sent.returncode, 0, sent.stdout)
            self.assertIn("Job 'rayjob-x' submitted successfully", sent.stdout)
            self.assertIn("ray job logs rayjob-x", sent.stdout)
            followed = ray("logs", "--follow", "rayjob-x")
            self.assertEqual(followed.returncode, 0, followed.stdout)
            self.assertIn("\nsea\n", followed.stdout)
            self.assertEqual(ray("status", "rayjob-x").returncode, 0)
            self.assertEqual(cluster.job("rayjob-x")["driver_exit_code"], 4)


class RestartTest(unittest.TestCase):
    def test_follow_survives_the_death_of_the_head(self):
        with Root(nodes=1) as cluster:
            follow_restarts.check(self, cluster)


# ---- https ----


def make_certificate(folder, names):
    """A certificate that is its own authority; (certificate, key)."""
    certificate, key = pathlib.Path(folder, "cert.pem"), pathlib.Path(folder, "key.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=head",
                    "-addext", f"subjectAltName={names}", "-keyout", key, "-out", certificate],
                   check=True, stderr=subprocess.DEVNULL)
    return certificate, key


class TlsProxy(socketserver.ThreadingTCPServer):
    """What an ingress does: TLS outside, the head inside."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, certificate, key, port):
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate, key)
        self.head_port = port
        super().__init__(("127.0.0.1", 0), None)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request, client_address):
        with contextlib.suppress(OSError), self.tls.wrap_socket(request, server_side=True) as outside:
            with socket.create_connection(("127.0.0.1", self.head_port)) as inside:
                back = threading.Thread(target=self.pump, args=(inside, outside), daemon=True)
                back.start()
                self.pump(outside, inside)
                back.join(10)

    @staticmethod
    def pump(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def handle_error(self, request, client_address):
        pass

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Https(unittest.TestCase):
    def test_over_tls(self):
        with tempfile.TemporaryDirectory(prefix="mb-tls-") as scratch, Root(nodes=1) as cluster:
            certificate, key = make_certificate(scratch, "IP:127.0.0.1,DNS:head.example")
            port = int(cluster.address.rsplit(":", 1)[1])
            cluster.add("work/big", os.urandom(5 << 20))
            cluster.add("etc/hosts", b"127.0.0.1 head.example other.example\n")
            with TlsProxy(certificate, key, port) as proxy:
                at = proxy.server_address[1]
                submit = ("job", "submit", "--working-dir", "/work", "--address")
                command = ("--", "sh", "-c", "wc -c < big; seq 20000; exit 3")

                done = cluster.mobula(*submit, f"https://127.0.0.1:{at}", *command)
                self.assertEqual(done.returncode, 77, done.stdout)
                self.assertIn("SSL_CERT_FILE", done.stdout)

                cluster.add("ca.pem", certificate.read_bytes())
                trust = {"SSL_CERT_FILE": "/ca.pem"}
                for host in ("127.0.0.1", "head.example"):
                    done = cluster.mobula(*submit, f"https://{host}:{at}", *command, env=trust)
                    self.assertEqual(done.returncode, 1, done.stdout[-2000:])
                    self.assertIn(f"\n{5 << 20}\n1\n2\n", done.stdout)
                    self.assertIn("\n20000\n", done.stdout)
                    self.assertIn("failed: ", done.stdout)

                done = cluster.mobula(*submit, f"https://other.example:{at}", *command, env=trust)
                self.assertEqual(done.returncode, 77, done.stdout)
                self.assertIn("certificate is refused: hostname mismatch", done.stdout.lower())

                other, _ = make_certificate(scratch, "IP:127.0.0.1")
                cluster.add("etc/ssl/certs/ca-certificates.crt", other.read_bytes())
                done = cluster.mobula(*submit, f"https://127.0.0.1:{at}", *command)
                self.assertEqual(done.returncode, 77, done.stdout)
                self.assertIn("certificate is refused: self", done.stdout)


# ---- names ----


class NameServer(socketserver.ThreadingUDPServer):
    """Answers A questions about one name; remembers what it was asked."""

    daemon_threads = True

    def __init__(self, name):
        self.name = name
        self.asked = []
        super().__init__(("127.0.0.1", 0), None)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request, client_address):
        data, sock = request
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1:at + 1 + data[at]].decode().lower())
            at += 1 + data[at]
        kind = struct.unpack("!H", data[at + 1:at + 3])[0]
        question = data[12:at + 5]
        name = ".".join(labels)
        self.asked.append(name)
        answer, code = b"", 0x8180
        if name != self.name:
            code = 0x8183  # there is no such name
        elif kind == 1:
            answer = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + bytes([127, 0, 0, 1])
        sock.sendto(data[:2] + struct.pack("!HHHHH", code, 1, bool(answer), 0, 0) + question + answer,
                    client_address)

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Names(unittest.TestCase):
    def test_a_service_name_as_a_pod_has_it(self):
        with NameServer("ray-head-svc.train.svc.cluster.local") as dns, Root(nodes=1) as cluster:
            cluster.add("etc/resolv.conf", (
                f"nameserver 127.0.0.1:{dns.server_address[1]}\n"
                "search train.svc.cluster.local svc.cluster.local cluster.local\n"
                "options ndots:5\n").encode())
            port = cluster.address.rsplit(":", 1)[1]
            for name in ("ray-head-svc", "ray-head-svc.train",
                         "ray-head-svc.train.svc.cluster.local"):
                dns.asked.clear()
                done = cluster.mobula("job", "list", "--address", f"http://{name}:{port}")
                self.assertEqual(done.returncode, 0, (name, done.stdout, dns.asked))
            done = cluster.mobula("job", "list", "--address", f"http://nobody:{port}")
            self.assertEqual(done.returncode, 69, done.stdout)
            self.assertIn("cannot resolve nobody", done.stdout)
            self.assertIn("nobody.train.svc.cluster.local", dns.asked)

    def test_a_name_server_that_is_silent(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
            silent.bind(("127.0.0.1", 0))
            with Root(nodes=1) as cluster:
                cluster.add("etc/resolv.conf",
                            f"nameserver 127.0.0.1:{silent.getsockname()[1]}\n".encode())
                done = cluster.mobula("job", "list", "--address", "http://somebody:1", timeout=120)
                self.assertEqual(done.returncode, 75, done.stdout)
                self.assertIn("no answer about the name somebody", done.stdout)


if __name__ == "__main__":
    if reason := why_not():
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main()
