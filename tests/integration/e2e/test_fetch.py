"""working_dir from a real S3 server, and over https from a server whose certificate an own CA signed."""

import functools
import http.server
import pathlib
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import unittest

import s3
from cluster import Cluster
from test_packages import MAIN, Handler, tar_of, zip_of


def openssl(*argv):
    done = subprocess.run(["openssl", *map(str, argv)], stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout


def authority(directory, name):
    """A CA; its certificate."""
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", "2", "-subj", f"/CN={name}", "-keyout", directory / f"{name}.key",
            "-out", directory / f"{name}.pem")
    return directory / f"{name}.pem"


def certificate(directory, ca, host):
    """Of a server, signed by the CA; its chain file with the key."""
    (directory / "ext").write_text(f"subjectAltName={host}\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
            "/CN=server", "-keyout", directory / "server.key", "-out", directory / "server.csr")
    openssl("x509", "-req", "-in", directory / "server.csr", "-CA", ca, "-CAkey",
            ca.with_suffix(".key"), "-CAcreateserial", "-days", "2", "-extfile", directory / "ext",
            "-out", directory / "server.pem")
    return directory / "server.pem", directory / "server.key"


class FetchTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-fetch-")))
        ca = authority(cls.dir, "ours")
        port = cls.enterClassContext(s3.server(cls.dir))
        cls.bucket = cls.dir / "s3" / s3.BUCKET
        cls.web = cls.dir / "web"
        cls.web.mkdir()
        cls.url = cls.serve(*certificate(cls.dir, ca, "IP:127.0.0.1"))
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, env={
            **s3.environment(port), "SSL_CERT_FILE": str(ca)}))

    @classmethod
    def serve(cls, chain, key):
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(cls.web)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        cls.addClassCleanup(server.server_close)
        cls.addClassCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"https://127.0.0.1:{server.server_port}"

    def run_main(self, job, **runtime_env):
        self.cluster.submit(f"{sys.executable} main.py", submission_id=job, runtime_env=runtime_env)
        return self.cluster.wait_job(job)

    def assert_ran(self, job, name, **runtime_env):
        details = self.run_main(job, **runtime_env)
        self.assertEqual(details["status"], "SUCCEEDED", details["message"])
        self.assertIn(f"from {name}\n", self.cluster.logs(job))

    def put(self, key, body):
        """versitygw serves what lies in its directory."""
        path = self.bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        return f"s3://{s3.BUCKET}/{key}"

    def test_s3(self):
        uri = self.put("code/run.zip", zip_of({"main.py": MAIN, "mod.py": "NAME = 's3'\n"}))
        self.assert_ran("s3", "s3", working_dir=uri)
        work = self.put("code/main.tar.gz", tar_of({"main.py": MAIN}, "w:gz"))
        module = self.put("code/mod.zip", zip_of({"top/mod/__init__.py": "NAME = 'module'\n"}))  # Ray drops the top
        self.assert_ran("s3-module", "module", working_dir=work, py_modules=[module])

    def test_s3_without_the_object(self):
        job = self.run_main("s3-none", working_dir=f"s3://{s3.BUCKET}/code/none.zip")
        self.assertEqual((job["status"], job["error_type"]), ("FAILED", "RUNTIME_ENV_SETUP_FAILURE"))
        self.assertTrue(job["message"].startswith(
            "runtime_env setup failed: Failed to set up runtime environment."), job["message"])
        self.assertIn("code/none.zip", job["message"])

    def test_https(self):
        (self.web / "run.zip").write_bytes(zip_of({"main.py": MAIN, "mod.py": "NAME = 'https'\n"}))
        self.assert_ran("https", "https", working_dir=f"{self.url}/run.zip")
        self.assert_ran("https-moved", "https", working_dir=f"{self.url}/moved/run.zip")

    def test_https_of_an_unknown_authority(self):
        other = self.dir / "other"
        other.mkdir()
        url = self.serve(*certificate(other, authority(other, "theirs"), "IP:127.0.0.1"))
        job = self.run_main("https-unknown", working_dir=f"{url}/run.zip")
        self.assertEqual((job["status"], job["error_type"]), ("FAILED", "RUNTIME_ENV_SETUP_FAILURE"))
        self.assertIn("certificate", job["message"])

    def test_https_of_another_host(self):
        other = self.dir / "host"
        other.mkdir()
        shutil.copy(self.dir / "ours.key", other)
        ca = pathlib.Path(shutil.copy(self.dir / "ours.pem", other))
        url = self.serve(*certificate(other, ca, "DNS:elsewhere.example"))
        job = self.run_main("https-host", working_dir=f"{url}/run.zip")
        self.assertEqual((job["status"], job["error_type"]), ("FAILED", "RUNTIME_ENV_SETUP_FAILURE"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
