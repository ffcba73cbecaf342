"""working_dir and py_modules from everywhere: uploaded, of a web server, of a store, of the node."""

import functools
import hashlib
import http.client
import http.server
import io
import json
import os
import pathlib
import signal
import socket
import sys
import tarfile
import threading
import time
import unittest
import zipfile

from cluster import Cluster, command_of, wait_until
from ports import free_port

MAIN = "import mod; print('from', mod.NAME)\n"


def zip_of(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, text in files.items():
            z.writestr(name, text)
    return out.getvalue()


def tar_of(files, mode):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as t:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            t.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path[len("/moved"):])
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


class PackagesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        nowhere = f"http://127.0.0.1:{free_port()}"  # nobody listens there: what an unreachable store looks like
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, env={
            "AWS_ENDPOINT_URL": nowhere, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1"}))
        cls.web = pathlib.Path(cls.cluster.dir, "web")
        cls.web.mkdir()
        cls.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(cls.web)))
        cls.addClassCleanup(cls.server.server_close)
        cls.addClassCleanup(cls.server.shutdown)
        threading.Thread(target=cls.server.serve_forever).start()
        cls.url = f"http://127.0.0.1:{cls.server.server_port}"

    def upload(self, name, body):
        status, text = self.cluster.call("PUT", f"/api/packages/gcs/{name}", raw=body)
        self.assertEqual((status, text), (200, ""))
        return f"gcs://{name}"

    def run_main(self, job, **runtime_env):
        self.cluster.submit(f"{sys.executable} main.py", submission_id=job,
                            runtime_env=runtime_env)
        return self.cluster.wait_job(job)

    def assert_ran(self, job, name, **runtime_env):
        details = self.run_main(job, **runtime_env)
        self.assertEqual(details["status"], "SUCCEEDED", details["message"])
        self.assertIn(f"from {name}\n", self.cluster.logs(job))

    def test_formats(self):
        for end, body in (
            ("zip", zip_of({"main.py": MAIN, "mod.py": "NAME = 'zip'\n"})),
            ("tar.gz", tar_of({"main.py": MAIN, "mod.py": "NAME = 'tar.gz'\n"}, "w:gz")),
            ("tgz", tar_of({"main.py": MAIN, "mod.py": "NAME = 'tgz'\n"}, "w:gz")),
            ("tar.xz", tar_of({"main.py": MAIN, "mod.py": "NAME = 'tar.xz'\n"}, "w:xz")),
        ):
            with self.subTest(end):
                uri = self.upload(f"_ray_pkg_{hashlib.sha1(body).hexdigest()}.{end}", body)
                self.assert_ran(f"format-{end}", end, working_dir=uri)

    def test_modules_come_first(self):
        work = self.upload("_ray_pkg_0000000000000001.zip",
                           zip_of({"main.py": MAIN + "import second; print('and', second.NAME)\n"}))
        wheel = self.upload("mod-1.0-py3-none-any.whl", zip_of({"mod/__init__.py": "NAME = 'wheel'\n"}))
        zipped = self.upload("_ray_pkg_0000000000000002.zip",
                             zip_of({"second/__init__.py": "NAME = 'second'\n"}))
        self.assert_ran("modules", "wheel", working_dir=work, py_modules=[wheel, zipped])
        self.assertIn("and second", self.cluster.logs("modules"))

    def job_submit(self, *options, runtime_env):
        return self.cluster.mobula("job", "submit", "--address", self.cluster.address, *options,
                                   "--runtime-env-json", json.dumps(runtime_env), "--",
                                   sys.executable, "main.py")

    def test_our_client_uploads_what_is_here(self):
        """A zip as working directory; modules as directory, file, wheel and zip, also when one of the
        same files was uploaded without its name before."""
        here = pathlib.Path(self.cluster.dir, "here")
        folder = here / "folder"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("NAME = 'folder'\n")
        (folder / "unwanted.txt").write_text("1")
        (here / "single.py").write_text("NAME = 'single'\n")
        wheel = here / "mod-1.0+local-py3-none-any.whl"
        wheel.write_bytes(zip_of({"mod/__init__.py": "NAME = 'a wheel'\n"}))
        (here / "zipped.zip").write_bytes(zip_of({"zipped.py": "NAME = 'zipped'\n"}))
        work = here / "work.zip"
        work.write_bytes(zip_of({"main.py": MAIN + (
            "import folder, single, zipped, os\n"
            "print(folder.NAME, single.NAME, zipped.NAME, os.listdir(folder.__path__[0]))\n")}))
        self.job_submit("--working-dir", folder, "--no-wait", runtime_env={"excludes": ["*.txt"]})
        modules = [str(folder) + "/", str(here / "single.py"), str(wheel), str(here / "zipped.zip")]
        for _ in range(2):  # the second time nothing is sent
            done = self.job_submit("--working-dir", work, runtime_env={
                "py_modules": modules, "excludes": ["*.txt"]})
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn("from a wheel\n", done.stdout)
            self.assertRegex(done.stdout, r"folder single zipped \['__init__.py'(, '__pycache__')?\]")

    def test_our_client_leaves_out_what_is_no_file(self):
        """What Ray's client passes over, too; for a pipe that one waits for ever."""
        here = pathlib.Path(self.cluster.dir, "links")
        here.mkdir()
        (here / "main.py").write_text("import os; print(sorted(os.listdir()))\n")
        (here / "file").symlink_to("main.py")
        for name in ("back\\slash", "ü\\x"):  # whose names libarchive changes on the way
            (here / name).write_text("1")
        (here / "dangling\x1b[2J").symlink_to("nowhere")
        (here / "self").symlink_to("self")
        done = self.job_submit("--working-dir", here, runtime_env={})
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("links/dangling\\x1b[2J and 1 more are left out", done.stdout)
        self.assertIn("\n" + str(sorted(["back\\slash", "file", "main.py", "ü\\x"])) + "\n", done.stdout)
        for name in ("dangling\x1b[2J", "self"):
            (here / name).unlink()
        os.mkfifo(here / "pipe")
        done = self.job_submit("--working-dir", here, runtime_env={})
        self.assertIn("links/pipe is left out: it is neither a file nor a directory\n", done.stdout)
        self.assertIn("\n" + str(sorted(["back\\slash", "file", "main.py", "ü\\x"])) + "\n", done.stdout)

    def test_our_client_says_what_it_cannot_upload(self):
        here = pathlib.Path(self.cluster.dir, "odd")
        here.mkdir()
        (here / "a.txt").write_text("1")
        (here / "huge.zip").touch()
        os.truncate(here / "huge.zip", 101 << 20)
        for options, env, words in (
            (("--working-dir", here / "a.txt"), {},
             "a.txt is not a directory, nor a file that ends in .zip, .tar.gz, .tgz or .tar.xz"),
            ((), {"py_modules": [str(here / "a.txt")]},
             "a.txt is not a directory, nor a file that ends in .py, .whl, .zip"),
            ((), {"py_modules": [str(here / "none")]}, "none: No such file or directory"),
            (("--working-dir", here / "huge.zip"), {}, "at most 100"),
        ):
            done = self.job_submit(*options, runtime_env=env)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(words, done.stdout)

    def test_web_server(self):
        """Of an archive as source hosts make them, the one folder in it is what counts."""
        (self.web / "flat.zip").write_bytes(zip_of({"main.py": MAIN, "mod.py": "NAME = 'flat'\n"}))
        (self.web / "v1.tar.gz").write_bytes(
            tar_of({"project-1/main.py": MAIN, "project-1/mod.py": "NAME = 'folder'\n"}, "w:gz"))
        self.assert_ran("web-flat", "flat", working_dir=f"{self.url}/flat.zip")
        self.assert_ran("web-folder", "folder", working_dir=f"{self.url}/v1.tar.gz")
        self.assert_ran("web-moved", "folder", working_dir=f"{self.url}/moved/v1.tar.gz?ref=1")

    def test_of_the_node(self):
        folder = pathlib.Path(self.cluster.dir, "in place")
        folder.mkdir()
        (folder / "main.py").write_text(MAIN)
        (folder / "mod.py").write_text("NAME = 'local'\n")
        archive = pathlib.Path(self.cluster.dir, "file.zip")
        archive.write_bytes(zip_of({"main.py": MAIN, "mod.py": "NAME = 'file'\n"}))
        self.assert_ran("local", "local", working_dir=f"local://{folder}")
        self.assert_ran("path", "local", working_dir=str(folder))
        self.assert_ran("file", "file", working_dir=f"file://{archive}")
        self.assertTrue(archive.exists())

    def test_what_cannot_be_had_fails_soon(self):
        began = time.monotonic()
        uris = {
            "s3": "s3://nowhere/a.zip", "http-404": f"{self.url}/none.zip",
            "refused": "http://127.0.0.1:9/a.zip", "gone": "gcs://_ray_pkg_00000000000000ff.zip",
            "azure": "azure://a/b.zip", "no-file": "file:///none.zip", "no-dir": "local:///none",
        }
        for job, uri in uris.items():
            self.cluster.submit("true", submission_id=job, runtime_env={"working_dir": uri})
        for job in uris:
            details = self.cluster.wait_job(job)
            self.assertEqual(details["error_type"], "RUNTIME_ENV_SETUP_FAILURE", details)
            self.assertTrue(details["message"].startswith(
                "runtime_env setup failed: Failed to set up runtime environment.\n"), details)
        self.assertLess(time.monotonic() - began, 10)
        details = self.run_main("fails-type", working_dir=3)
        self.assertEqual(details["error_type"], "JOB_SUPERVISOR_ACTOR_START_FAILURE", details)
        self.assertIn("`working_dir` must be a string, got <class 'int'>.", details["message"])

    def test_stop_ends_a_fetch(self):
        """A server that takes the request and says nothing."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}/a.zip"
            self.cluster.submit("true", submission_id="stopped-fetch",
                                runtime_env={"working_dir": uri})
            connection, _ = silent.accept()
            with connection:
                self.assertEqual(connection.recv(4), b"GET ")
                self.assertEqual(self.cluster.job("stopped-fetch")["status"], "PENDING")
                status, text = self.cluster.call("POST", "/api/jobs/stopped-fetch/stop")
                self.assertEqual((status, text), (200, '{"stopped": true}'))
                self.assertEqual(self.cluster.job("stopped-fetch")["status"], "STOPPED")
                connection.settimeout(10)
                while connection.recv(65536):
                    pass  # the rest of the request, then the end: nobody waits any more

    def test_hostile_archives(self):
        up = self.upload("_ray_pkg_0000000000000003.zip", zip_of({"../../../up": "x"}))
        details = self.run_main("hostile", working_dir=up)
        self.assertEqual(details["error_type"], "RUNTIME_ENV_SETUP_FAILURE", details)
        self.assertIn("../../../up", details["message"])
        self.assertEqual([p for p in pathlib.Path(self.cluster.dir).rglob("up")], [])


class LimitsTest(unittest.TestCase):
    """--max-package-size and --package-keep of a head."""

    LIMIT = 200 << 20

    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, start_args=[
            "--max-package-size", "200M", "--package-keep", "3s"]))  # in which a job names what was uploaded for it
        cls.packages = cls.cluster.nodes()[0]["dir"] / "packages"

    def put(self, name, n_bytes, chunked=False):
        """A body that is made while it is sent, so that only the server's memory can grow."""
        connection = http.client.HTTPConnection(self.cluster.address.split("//")[1], timeout=120)
        connection.putrequest("PUT", f"/api/packages/gcs/{name}")
        if chunked:
            connection.putheader("Transfer-Encoding", "chunked")
        else:
            connection.putheader("Content-Length", str(n_bytes))
        connection.endheaders()
        piece = bytes(1 << 20)
        while n_bytes > 0:
            now = min(n_bytes, len(piece))
            connection.send(b"%x\r\n" % now + piece[:now] + b"\r\n" if chunked else piece[:now])
            n_bytes -= now
        if chunked:
            connection.send(b"0\r\n\r\n")
        reply = connection.getresponse()
        got = reply.status, reply.read().decode()
        connection.close()
        return got

    def agent_peak_bytes(self):
        pid = next(p for p in self.cluster.own_pids()
                   if command_of(p).split(" ")[0].endswith("mobula-agent"))
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def test_memory_does_not_grow_with_a_package(self):
        """ray#38566, ray#45602, ray#55877: larger than 100 MiB, and on disk, not in memory."""
        before = self.agent_peak_bytes()
        self.assertEqual(self.put("large.zip", 190 << 20), (200, ""))
        grown = self.agent_peak_bytes() - before
        print(f"190 MiB uploaded, the agent's peak grew by {grown / 1024:.0f} KiB", flush=True)
        self.assertLess(grown, 8 << 20)
        self.assertEqual(self.put("larger.zip", self.LIMIT + (1 << 20)),
                         (413, f"Maximum request body size {self.LIMIT} exceeded."))
        self.assertFalse((self.packages / "larger.zip").exists())

    def test_the_limit_is_the_largest_size(self):
        for chunked in (False, True):
            self.assertEqual(self.put("just.zip", self.LIMIT, chunked), (200, ""))
            self.assertEqual(self.put("over.zip", self.LIMIT + 1, chunked),
                             (413, f"Maximum request body size {self.LIMIT} exceeded."))
            self.assertFalse((self.packages / "over.zip").exists())

    def test_the_command_names_the_largest_files(self):
        """ray#55877, kuberay#2717: not a bare 413, and .git is not sent."""
        folder = pathlib.Path(self.cluster.dir, "too large")
        (folder / ".git").mkdir(parents=True)
        (folder / "data").mkdir()
        for name, n_bytes in ((".git/pack", 1 << 30), ("data/huge.bin", self.LIMIT), ("a.py", 9)):
            with open(folder / name, "wb") as f:
                f.truncate(n_bytes)
        done = self.cluster.mobula("job", "submit", "--address", self.cluster.address,
                                   "--working-dir", str(folder), "--", "true")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("data/huge.bin (200.0 MiB)", done.stdout)
        self.assertIn("at most 200.0 MiB can be uploaded", done.stdout)
        self.assertNotIn(".git", done.stdout)

    def test_a_package_is_pinned_by_its_job_and_goes_after_it(self):
        """ray#46625: no timer takes away what a job still needs."""
        name = "_ray_pkg_00000000000000aa.zip"
        status, _ = self.cluster.call("PUT", f"/api/packages/gcs/{name}",
                                      raw=zip_of({"a.py": "A = 1\n"}))
        self.assertEqual(status, 200)
        self.cluster.submit("sleep 1000", submission_id="pins",
                            runtime_env={"working_dir": f"gcs://{name}"})
        self.cluster.wait_job("pins", ("RUNNING",))
        unused = "_ray_pkg_00000000000000bb.zip"
        for _ in range(2):  # two rounds of the sweep that took another package
            status, _ = self.cluster.call("PUT", f"/api/packages/gcs/{unused}", raw=b"x")
            self.assertEqual(status, 200)
            wait_until(lambda: not (self.packages / unused).exists(), "the unused one goes", 60)
        self.assertTrue((self.packages / name).exists())
        self.cluster.call("POST", "/api/jobs/pins/stop")
        self.cluster.wait_job("pins")
        wait_until(lambda: not (self.packages / name).exists(), "it goes after its job", 60)
        status, text = self.cluster.call("GET", f"/api/packages/gcs/{name}")
        self.assertEqual((status, text), (404, f"Package gcs://{name} does not exist"))
        wait_until(lambda: not list(self.packages.glob(".*")), "its bytes are gone too", 60)


class UnpackedTest(unittest.TestCase):
    """ray#64528, ray#65006: what was unpacked goes with its job, not with the disk. Log and record stay."""

    def setUp(self):
        self.cluster = self.enterContext(Cluster(nodes=2))
        self.jobs = self.cluster.node("node-0")["dir"] / "jobs"

    def upload(self, name, **files):
        status, _ = self.cluster.call("PUT", f"/api/packages/gcs/{name}.zip",
                                      raw=zip_of({"main.py": MAIN, "mod.py": "NAME = 1\n", **files}))
        self.assertEqual(status, 200)
        return f"gcs://{name}.zip"

    def left(self, job):
        return sorted(str(p.relative_to(self.jobs / job)) for p in (self.jobs / job).iterdir()
                      if p.name in ("working_dir", "py_modules") or p.name.startswith("package-"))

    def wait_gone(self, job, timeout_s=60):
        wait_until(lambda: not self.left(job), lambda: self.left(job), timeout_s)
        forgotten = self.jobs.parent / "forgotten"
        wait_until(lambda: not list(forgotten.glob("*")), "its bytes are gone too", timeout_s)

    def test_goes_when_its_job_has_ended(self):
        body = io.BytesIO()
        with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("zeros", bytes(100 << 20))  # a small package, a large directory
        self.assertEqual(self.cluster.call("PUT", "/api/packages/gcs/zeros.zip", raw=body.getvalue())[0],
                         200)
        env = {"working_dir": "gcs://zeros.zip", "py_modules": [self.upload("module")]}
        for job, command, state in (("good", "stat -c %s zeros", "SUCCEEDED"), ("bad", "exit 3", "FAILED"),
                                    ("stopped", "sleep 1000", "STOPPED")):
            self.cluster.submit(command, submission_id=job, runtime_env=env)
            if job == "stopped":
                self.cluster.wait_job(job, ("RUNNING",))
                self.assertEqual(self.left(job), ["py_modules", "working_dir"])
                self.cluster.call("POST", f"/api/jobs/{job}/stop")
            self.assertEqual(self.cluster.wait_job(job)["status"], state)
            self.wait_gone(job)
            self.assertIn("Running entrypoint", self.cluster.logs(job))
            self.assertTrue((self.jobs / job / "state").exists())
        self.assertIn(f"\n{100 << 20}\n", self.cluster.logs("good"))

    def gang(self, job):
        """Ranks on both nodes, which say what they read in their directory after they were told to go."""
        told = pathlib.Path(self.cluster.dir, job)
        told.mkdir()
        rank = (f"trap : TERM; : > {told}/up-$RANK; while ! [ -e {told}/go ]; do sleep 0.05; done; sleep 1; "
                f"cat mod.py > {told}/.$RANK; mv {told}/.$RANK {told}/$RANK")
        self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sh", "-c", rank],
                            submission_id=job, runtime_env={"working_dir": self.upload(job)})
        wait_until(lambda: all((told / f"up-{r}").exists() for r in "01"), self.cluster.rank_pids)  # they have their traps
        return told

    def check_ranks(self, told):
        for rank in "01":
            wait_until((told / rank).exists, lambda: list(told.iterdir()))
            self.assertEqual((told / rank).read_text(), "NAME = 1\n")

    def test_ranks_of_all_nodes_have_it_to_their_end(self):
        told = self.gang("gang")
        (told / "go").touch()
        self.assertEqual(self.cluster.wait_job("gang")["status"], "SUCCEEDED", self.cluster.logs("gang"))
        self.check_ranks(told)
        self.wait_gone("gang")

    def test_ranks_have_it_longer_than_a_driver_that_was_killed(self):
        told = self.gang("killed")
        for pid in self.cluster.own_pids():
            if command_of(pid).startswith("mobula run "):
                os.kill(pid, signal.SIGKILL)
        self.assertEqual(self.cluster.wait_job("killed")["status"], "FAILED")
        self.cluster.submit("true", submission_id="after", runtime_env={"working_dir": self.upload("after")})
        self.cluster.wait_job("after")
        wait_until(lambda: not self.left("after"), "a later one is gone")
        (told / "go").touch()
        self.check_ranks(told)

    def test_a_checkpoint_stays(self):
        """`--save` below the working_dir: also when all that the job's status says is that of `cat`, and with a
        store that is below it, too."""
        rank = "-- sh -c 'mkdir -p $MOBULA_CHECKPOINT_DIR; echo 1 > $MOBULA_CHECKPOINT_DIR/model'"
        for job, options in (("saves", "--save out"),
                             ("pipe", f"--save out --checkpoint-url file://{self.cluster.dir}/store"),
                             ("inside", f"--save {self.cluster.dir}/out --checkpoint-url file://$PWD/store")):
            with self.subTest(job):
                self.check_stays(job, f"mobula run --num-nodes 1 {options} {rank} | cat",
                                 [] if job == "inside" else ["model"])

    def check_stays(self, job, command, models):
        self.cluster.submit(command, submission_id=job, runtime_env={"working_dir": self.upload(job)})
        self.assertEqual(self.cluster.wait_job(job)["status"], "SUCCEEDED", self.cluster.logs(job))
        log = self.jobs.parent / "agent.log"
        wait_until(lambda: f"job={job} what was unpacked for it stays: a checkpoint lies in it"
                   in log.read_text(), log.read_text)
        self.assertEqual(self.left(job), ["working_dir"])
        self.assertEqual([p.name for p in (self.jobs / job).rglob("model")], models)
        self.assertTrue((self.jobs / job / "kept").exists())
        self.assertEqual(self.cluster.call("DELETE", f"/api/jobs/{job}")[0], 200)
        wait_until(lambda: not (self.jobs / job).exists(), "it goes with its job")

    def test_a_stop_while_it_is_unpacked(self):
        """However long that would take: the unpacker stands still."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z, z.open("zeros", "w") as f:
            for _ in range(384):
                f.write(bytes(1 << 20))
        uri = "gcs://_ray_pkg_00000000000000ce.zip"
        self.assertEqual(self.cluster.call("PUT", f"/api/packages/{uri.replace('://', '/')}",
                                           raw=packed.getvalue())[0], 200)
        self.cluster.submit("true", submission_id="packed", runtime_env={"working_dir": uri})
        (pid,) = wait_until(lambda: [p for p in self.cluster.own_pids() if "mobula-unpack" in command_of(p)],
                            "it is being unpacked")
        os.kill(pid, signal.SIGSTOP)
        self.assertEqual(self.cluster.job("packed")["status"], "PENDING")
        began = time.monotonic()
        self.assertEqual(self.cluster.call("POST", "/api/jobs/packed/stop"), (200, '{"stopped": true}'))
        self.assertEqual(self.cluster.wait_job("packed")["status"], "STOPPED")
        self.assertLess(time.monotonic() - began, 5)
        self.wait_gone("packed")

    def test_goes_when_its_job_ended_while_the_agent_was_down(self):
        go = pathlib.Path(self.cluster.dir, "go")
        env = {"working_dir": self.upload("late")}
        self.cluster.submit(f"while ! [ -e {go} ]; do sleep 0.05; done", submission_id="late",
                            runtime_env=env)
        self.cluster.wait_job("late", ("RUNNING",))
        head = self.cluster.node("node-0")
        os.kill(head["pid_init"], signal.SIGSTOP)  # it starts no other agent yet
        os.kill(head["pid_agent"], signal.SIGKILL)
        go.touch()
        state = self.jobs / "late" / "state"
        wait_until(lambda: "all-exited" in state.read_text(), state.read_text)
        self.assertEqual(self.left("late"), ["working_dir"])
        # As an agent leaves it that is killed between the end of a job and the removal.
        (self.jobs / "former/working_dir").mkdir(parents=True)
        (self.jobs.parent / "forgotten/3/0/deep").mkdir(parents=True)
        os.kill(head["pid_init"], signal.SIGCONT)
        self.wait_gone("late")
        self.wait_gone("former")
        wait_until(lambda: self.cluster.node("node-0")["pid_agent"] != head["pid_agent"], "a new agent")
        self.assertEqual(self.cluster.wait_job("late")["status"], "SUCCEEDED")


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    unittest.main()
