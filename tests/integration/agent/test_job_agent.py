"""A node that takes the jobs of Ray's own head: test_job_agent.py BIN_DIR

Run by the Python of the Ray whose head, dashboard and command line are used.
"""

import http.client
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from commands import RAY, TOKEN, call, clean_env, with_token  # noqa: E402
from ports import free_port  # noqa: E402
from ray_head import RayHead, ray_version  # noqa: E402

BIN = sys.argv[1]
IS_MODERN = ray_version() >= (2, 60)
PUBLISHED_S = 0.5


class Head(RayHead):
    """With a dashboard, whose address is `http`."""

    def __init__(self, port=None, env=None):
        self.dashboard_port = free_port()
        super().__init__(env=env, block=False, args=[
            "--include-dashboard=true", f"--dashboard-port={self.dashboard_port}",
            *([f"--port={port}"] if port else [])])

    @property
    def http(self):
        return f"http://127.0.0.1:{self.dashboard_port}"

    def get(self, path):
        with urllib.request.urlopen(f"{self.http}{path}", timeout=60) as reply:
            return json.loads(reply.read())

    def jobs(self):
        return {j["submission_id"]: j for j in self.get("/api/jobs/") if j["submission_id"]}

    def state(self, job):
        return self.jobs().get(job, {}).get("status")

    def wait_state(self, job, *states):
        def reached():
            try:
                state = self.state(job)
            except (OSError, http.client.HTTPException):  # it is starting, or was just killed
                return None
            return state if state in states else None

        return cluster.wait_for(f"{job} {states}", reached)

    def ray(self, *words, **more):
        return call(clean_env(**more, RAY_ADDRESS=self.http), RAY, "job", *words)


class Kv:
    def __init__(self, s, address, metadata=()):
        self.gcs = cluster.Gcs(s, address, metadata=metadata)

    def get(self, ns, key):
        reply = self.gcs.call("InternalKVGcsService/InternalKVGet", "InternalKVGetRequest",
                              key=key.encode(), namespace=ns.encode())
        return reply.value.decode() if reply.status.code == 0 else None

    def put(self, ns, key, value):
        self.gcs.call("InternalKVGcsService/InternalKVPut", "InternalKVPutRequest",
                      key=key.encode(), value=value.encode(), overwrite=True, namespace=ns.encode())

    def agent_key(self):
        prefix = "DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX" if IS_MODERN else \
            "DASHBOARD_AGENT_PORT_PREFIX"
        return f"{prefix}:{self.get('job', 'head_node_id')}"

    def agent_port(self):
        return self.agent_ports()[0]

    def agent_ports(self):
        """HTTP and gRPC, None where nothing stands."""
        value = json.loads(self.get("dashboard", self.agent_key()) or "[]")
        return (value[1:] if IS_MODERN else value) or [None, None]

    def wait_ours(self, node):
        """The key is the node's after Ray's own agent, too, has written it. That one starts late on
        a busy machine, and the dashboard keeps for good whom it has asked for a job. Its gRPC port
        stays in the value."""
        cluster.wait_for("the dashboard's key", lambda: self.agent_ports()[0] ==
                         node.info["http_port"] and self.agent_ports()[1] > 0)


def job_agent(s, head, *flags, env=None, metadata=(), port=None):
    node = s.node(BIN, "--address", head.address, "--job-agent", "--num-gpus", "2",
                  "--node-ip-address", head.address.split(":")[0],
                  "--dashboard-agent-listen-port", str(port or free_port()), *flags, env=env)
    node.wait_alive()
    kv = Kv(s, head.address, metadata)
    kv.wait_ours(node)
    return node, kv


def is_taken_for_rays(gcs, node):
    """By ray.init before 2.60, which goes through the table in its order (docs/ray-compat.md)."""
    rows = gcs.nodes()
    address = rows[node.info["node_id"]].node_manager_address
    first = next(i for i, n in rows.items() if n.state == 0 and n.node_manager_address == address)
    return first == node.info["node_id"]


def plain_job_agent(s, head, port=None):
    return job_agent(s, head, "--no-token", port=port)


def job_agent_beside_rays(s, head):
    """Ray's own agent calls ray.init at its first request; in an older Ray that would end it, and its head with it, where it takes ours
    for its node. Where a node stands in the table is chance; each has the same port, since that dashboard keeps the first it reads."""
    port = free_port()
    for _ in range(30):
        node, kv = plain_job_agent(s, head, port)
        if IS_MODERN or not is_taken_for_rays(kv.gcs, node):
            return node, kv
        print("     ray.init would take this node for Ray's: another one", flush=True)
        assert node.stop() == 0
    raise AssertionError("30 nodes, and ray.init would have taken each of them for Ray's")


def waits_for(path):
    """What a job runs that ends when the test makes that file, and not by the clock."""
    return ["sh", "-c", f"until [ -e {path} ]; do sleep 0.1; done"]


def publication(node, kv, job, change):
    """How long after the node the record says it."""
    cluster.wait_for(change, lambda: f"job={job} {change}" in node.log())
    since = time.monotonic()
    state = change.rsplit(" ", 1)[1]
    cluster.wait_for(f"{job} {state} in its record", lambda: json.loads(
        kv.get("job", f"_ray_internal_job_info_{job}"))["status"] == state)
    took = time.monotonic() - since
    print(f"     {job} {state}: published {took:.2f} s after it", flush=True)
    return took


def case_published_at_once(s, head, node, kv):
    """A record says it as soon as the node does, and not by the next look (2 s) or publication of all (30 s): of twelve
    changes more than half are there within a quarter of a look, whatever else the machine does."""
    took = []
    for i in range(6):
        over = pathlib.Path(s.dir, f"published-{i}")
        body = {"entrypoint": f"until [ -e {over} ]; do sleep 0.1; done", "submission_id": f"p-{i}"}
        request = urllib.request.Request(f"{head.http}/api/jobs/", method="POST", data=json.dumps(body).encode(),
                                         headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=cluster.DEADLINE_S) as reply:
            assert reply.status == 200, reply.read()
        took.append(publication(node, kv, f"p-{i}", "PENDING -> RUNNING"))
        over.touch()
        took.append(publication(node, kv, f"p-{i}", "RUNNING -> SUCCEEDED"))
    assert statistics.median(took) < PUBLISHED_S, took


def case_commands(s, head, node, kv):
    """What people type: submit and follow, fail, look, list, logs, stop, delete."""
    code, text = head.ray("submit", "--submission-id", "a-1", "--metadata-json", '{"who": "me"}',
                          "--runtime-env-json", '{"env_vars": {"GREETING": "hello"}}', "--", "sh",
                          "-c", "echo $GREETING $RAY_ADDRESS; sleep 1; echo bye")
    assert code == 0 and f"hello {head.address}\nbye\n" in text and \
        "Job 'a-1' succeeded" in text, text
    job = head.jobs()["a-1"]
    assert job["status"] == "SUCCEEDED" and job["metadata"]["who"] == "me" and \
        job["driver_exit_code"] == 0 and job["driver_node_id"] == node.info["node_id"] and \
        job["runtime_env"]["env_vars"] == {"GREETING": "hello"}, job
    code, text = head.ray("submit", "--submission-id", "a-2", "--", "sh", "-c", "echo no; exit 4")
    assert code == 1 and "failed with exit code 4" in text, text
    code, text = head.ray("submit", "--submission-id", "a-1", "--", "true")
    assert code == 1 and "Please use a different submission_id" in text, text
    code, text = head.ray("status", "a-2")
    assert code == 0 and "Job 'a-2' failed" in text, text
    code, text = head.ray("logs", "a-1")
    assert code == 0 and "bye" in text, text
    code, text = head.ray("list")
    assert code == 0 and "'a-1'" in text and "'a-2'" in text, text
    code, text = head.ray("submit", "--no-wait", "--submission-id", "a-3", "--", "sleep", "1000")
    assert code == 0, text
    publication(node, kv, "a-3", "PENDING -> RUNNING")
    code, text = head.ray("delete", "a-3")
    assert code != 0 and "non-terminal" in text, text
    code, text = head.ray("stop", "a-3")
    assert code == 0 and "Job 'a-3' was stopped" in text, text
    code, text = head.ray("delete", "a-3")
    assert code == 0 and "deleted successfully" in text, text
    assert set(head.jobs()) == {"a-1", "a-2"}, head.jobs()
    assert kv.get("job", "_ray_internal_job_info_a-3") is None
    assert kv.get("mobula", "job-agent:a-3") is None
    assert kv.get("mobula", "job-agent:a-1") is not None


def case_working_dir(s, head, node, kv):
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "main.py").write_text("print('packed', flush=True)\n")
        code, text = head.ray("submit", "--working-dir", directory, "--submission-id", "w-1", "--",
                              sys.executable, "main.py")
    assert code == 0 and "packed\n" in text and "Job 'w-1' succeeded" in text, text


def case_gang(s, head, node, kv):
    """The driver's cluster is Ray's; what it reserved goes with it, however it ends."""
    gcs = cluster.Gcs(s, head.address)
    words = [f"{BIN}/mobula", "run", "--num-nodes", "1", "--gpus-per-node", "2", "--"]
    code, text = head.ray("submit", "--submission-id", "g-1", "--", *words,
                          "printenv", "RANK", "WORLD_SIZE")
    assert code == 0 and "[rank 0] 2" in text and "[rank 1] 1" in text, text
    code, text = head.ray("submit", "--no-wait", "--submission-id", "g-2", "--", *words,
                          "sleep", "1000")
    assert code == 0, text
    cluster.wait_for("the gang", lambda: len(node.state()["gangs"]) > 0 and
                     node.state()["resources_available"]["mobula_gpu"] == 0)
    pid = int(re.search(r"job=g-2 driver runs pid=(\d+)", node.log()).group(1))
    os.kill(pid, 9)
    assert head.wait_state("g-2", "FAILED") == "FAILED"
    cluster.wait_for("free devices", lambda: node.state()["resources_available"]["mobula_gpu"] == 2)

    def table():
        rows = gcs.call("JobInfoGcsService/GetAllJobInfo", "GetAllJobInfoRequest").job_info_list
        return [d for d in rows if d.config.metadata["job_submission_id"] in ("g-1", "g-2")]

    ours = table()
    assert len(ours) == 2, ours
    cluster.wait_for("both are dead in Ray's table", lambda: all(d.is_dead for d in table()))


def case_guard(s, head, node, kv):
    """Another agent at the key is put out within seconds, and its words about our job with it."""
    code, text = head.ray("submit", "--no-wait", "--submission-id", "k-1", "--", "sleep", "1000")
    assert code == 0, text
    head.wait_state("k-1", "RUNNING")
    record = json.loads(kv.get("job", "_ray_internal_job_info_k-1"))
    record["status"] = "FAILED"
    kv.put("job", "_ray_internal_job_info_k-1", json.dumps(record))
    kv.put("dashboard", kv.agent_key(), '["127.0.0.1", 1, 1]' if IS_MODERN else "[1, 1]")
    since = time.monotonic()
    cluster.wait_for("our key", lambda: kv.agent_port() == node.info["http_port"])
    assert time.monotonic() - since < 20  # it looks every 2 s; all jobs it goes through every 30 s
    head.wait_state("k-1", "RUNNING")
    assert "another agent registered itself" in node.log()
    code, text = head.ray("stop", "k-1")
    assert code == 0 and "was stopped" in text, text


def case_rivals_word(s, head, node, kv):
    """Ray's own agent is asked for a job by somebody, beside the dashboard: it says of every job of
    ours that it has failed. That stands for some seconds, and no job, no line of it is lost."""
    over = pathlib.Path(s.dir, "rival-is-over")
    for job in "v-1", "v-2":
        code, text = head.ray("submit", "--no-wait", "--submission-id", job, "--", "sh", "-c",
                              f"echo one; until [ -e {over} ]; do sleep 0.1; done; echo two")
        assert code == 0, text
        head.wait_state(job, "RUNNING")
    port = f"{head.address.split(':')[0]}:{head.agent_port}"
    request = urllib.request.Request(
        f"http://{port}/api/job_agent/jobs/", method="POST", headers={
            "Content-Type": "application/json"},
        data=b'{"entrypoint": "true", "submission_id": "theirs"}')
    with urllib.request.urlopen(request, timeout=cluster.DEADLINE_S) as reply:
        assert reply.status == 200, reply.read()
    cluster.wait_for("its word", lambda: "another agent says" in node.log())
    since = time.monotonic()
    for job in "v-1", "v-2":
        head.wait_state(job, "RUNNING")
    took = time.monotonic() - since
    print(f"     right again {took:.1f} s after it was seen", flush=True)
    assert took < 10  # each record is looked at every 2 s; all are published every 30 s
    assert head.wait_state("theirs", "SUCCEEDED", "FAILED") == "SUCCEEDED", head.jobs()["theirs"]
    over.touch()
    for job in "v-1", "v-2":
        publication(node, kv, job, "RUNNING -> SUCCEEDED")
    for job in "v-1", "v-2":
        assert head.wait_state(job, "SUCCEEDED", "FAILED") == "SUCCEEDED", head.jobs()[job]
        code, text = head.ray("logs", job)
        assert code == 0 and "one\ntwo\n" in text, text


def case_agent_restart(s, head, node, kv):
    """The driver goes on, a follower of the dashboard is told of its end."""
    over = pathlib.Path(s.dir, "restart-is-over")
    code, text = head.ray("submit", "--no-wait", "--submission-id", "r-1", "--", "sh", "-c",
                          f"echo one; until [ -e {over} ]; do sleep 0.1; done; echo two; exit 3")
    assert code == 0, text
    head.wait_state("r-1", "RUNNING")
    with cluster.agent_is_down(node) as killed:
        pass
    node.wait_alive(other_than_pid=killed)
    followed = pathlib.Path(s.dir, "followed")
    with followed.open("wb") as out, subprocess.Popen(
            [RAY, "job", "logs", "--follow", "r-1"], env=clean_env(RAY_ADDRESS=head.http, PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT) as follower:
        try:
            cluster.wait_for("what was written before", lambda: "one\n" in followed.read_text())
            assert follower.poll() is None, followed.read_text()
            over.touch()
            follower.wait(cluster.DEADLINE_S)
        finally:
            follower.kill()
    assert "one\ntwo\n" in followed.read_text(), followed.read_text()
    assert head.wait_state("r-1", "FAILED") == "FAILED"
    assert head.jobs()["r-1"]["driver_exit_code"] == 3


def case_dashboard_restart(s, head, node, kv):
    """The new dashboard finds this node at once, and the state of a job that ran on."""
    code, text = head.ray("submit", "--no-wait", "--submission-id", "d-1", "--", "sleep", "1000")
    assert code == 0, text
    head.wait_state("d-1", "RUNNING")
    start_again = head.kill("dashboard.py")
    start_again()
    head.wait_state("d-1", "RUNNING")
    code, text = head.ray("stop", "d-1")
    assert code == 0 and "was stopped" in text, text
    code, text = head.ray("submit", "--submission-id", "d-2", "--", "echo", "after")
    assert code == 0 and "after\n" in text, text


class Redis:
    """A redis-server of the test, which keeps what Ray's GCS has."""

    def __enter__(self):
        self.port = free_port()
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--save", "", "--bind", "127.0.0.1"],
            stdout=subprocess.DEVNULL)

        def answers():
            with socket.socket() as c:
                return c.connect_ex(("127.0.0.1", self.port)) == 0

        cluster.wait_for("Redis", answers)
        return f"127.0.0.1:{self.port}"

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def case_gcs_restart(s):
    """A GCS that keeps its tables: jobs that end while it is away are right afterwards, and a gang
    goes on."""
    away, back = (pathlib.Path(s.dir, name) for name in ("gcs-is-away", "gcs-is-back"))
    with Redis() as redis, Head(env={"RAY_REDIS_ADDRESS": redis}) as head:
        node, kv = plain_job_agent(s, head)
        code, text = head.ray("submit", "--no-wait", "--submission-id", "f-1", "--",
                              *waits_for(away))
        assert code == 0, text
        code, text = head.ray("submit", "--no-wait", "--submission-id", "f-2", "--", "sleep", "900")
        assert code == 0, text
        head.wait_state("f-2", "RUNNING")
        code, text = head.ray("submit", "--no-wait", "--submission-id", "f-4", "--",
                              f"{BIN}/mobula", "run", "--gpus-per-node", "2", "--",
                              *waits_for(back))
        assert code == 0, text
        cluster.wait_for("the gang", lambda: any(
            g["ranks_running"] == 2 for g in node.state()["gangs"]))
        head.wait_state("f-1", "RUNNING")
        start_again = head.kill("gcs_server")
        away.touch()
        cluster.wait_for("the end", lambda: "job=f-1 RUNNING -> SUCCEEDED" in node.log())
        start_again()
        assert head.wait_state("f-1", "SUCCEEDED") and head.state("f-2") == "RUNNING"
        code, text = head.ray("submit", "--submission-id", "f-3", "--", "echo", "after")
        assert code == 0 and "after\n" in text, text
        code, text = head.ray("stop", "f-2")
        assert code == 0 and "was stopped" in text, text
        back.touch()
        assert head.wait_state("f-4", "SUCCEEDED", "FAILED") == "SUCCEEDED", head.jobs()["f-4"]
        assert node.info["node_id"] == node.file()["node_id"]
        assert node.stop() == 0


def case_head_without_memory(s):
    """Another cluster at the same address is told of every job, also of one that ended meanwhile,
    by an agent that was killed meanwhile, too."""
    port = free_port()
    away = pathlib.Path(s.dir, "head-is-away")
    with Head(port=port) as head:
        node, kv = plain_job_agent(s, head)
        for job, words in (("n-1", waits_for(away)), ("n-2", ["sleep", "1000"])):
            code, text = head.ray("submit", "--no-wait", "--submission-id", job, "--", *words)
            assert code == 0, text
            head.wait_state(job, "RUNNING")
        former = node.info["node_id"]
    away.touch()
    cluster.wait_for("the end", lambda: "job=n-1 RUNNING -> SUCCEEDED" in node.log())
    killed = node.kill_agent()
    with Head(port=port) as head:
        node.wait_alive(other_than_pid=killed)
        assert head.wait_state("n-1", "SUCCEEDED")
        assert head.wait_state("n-2", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED") == "RUNNING"  # one is told after the other
        kv = Kv(s, head.address)
        kv.wait_ours(node)
        code, text = head.ray("submit", "--submission-id", "n-3", "--", "echo", "after")
        assert code == 0 and "after\n" in text, text
        code, text = head.ray("stop", "n-2")
        assert code == 0 and "was stopped" in text, text
        assert head.jobs()["n-2"]["driver_node_id"] == node.file()["node_id"] != former
        assert former not in kv.gcs.nodes(), kv.gcs.nodes()
        assert node.stop() == 0


def refused(s, head, ip, status, text):
    node = s.node(BIN, "--address", head.address, "--job-agent", "--no-token",
                  "--node-ip-address", ip)
    assert node.process.wait(cluster.DEADLINE_S) == status, node.log()
    assert text in node.file()["error"] and text in node.log(), (node.file(), node.log())
    assert Kv(s, head.address).agent_port() != node.file()["http_port"]


def case_refused(s):
    """Ray's own agent has taken a job: the dashboard would go on asking that one. And an older
    dashboard asks no other address than its own."""
    with Head() as head:
        if not IS_MODERN:
            refused(s, head, "127.0.0.1", 78, "asks for jobs at its head's own address")

        def is_taken():  # a dashboard refuses jobs until Ray's agent has started
            text = head.ray("submit", "--no-wait", "--submission-id", "x-1", "--", "true")[1]
            try:
                return "x-1" in head.jobs() or print(text, flush=True)
            except (OSError, http.client.HTTPException) as e:
                print(text, e, flush=True)

        cluster.wait_for("Ray's own agent takes a job", is_taken)
        refused(s, head, head.address.split(":")[0], 71,
                "another agent of this cluster has taken jobs (x-1)")


def case_second(s):
    """A second job agent touches nothing of the first while that lives, then takes its place."""
    with Head() as head:
        ip = head.address.split(":")[0]
        first, kv = plain_job_agent(s, head)
        early = s.node(BIN, "--address", head.address, "--job-agent", "--no-token",
                       "--node-ip-address", ip)  # before any job
        assert early.process.wait(cluster.DEADLINE_S) == 71, early.log()
        assert f"node {first.info['node_id']}, which is ALIVE, is the job agent" in \
            early.file()["error"], early.file()
        assert kv.agent_port() == first.info["http_port"]
        code, text = head.ray("submit", "--submission-id", "t-1", "--", "true")
        assert code == 0, text
        code, text = head.ray("submit", "--no-wait", "--submission-id", "t-2", "--", "sleep",
                              "1000")
        assert code == 0, text
        head.wait_state("t-2", "RUNNING")
        mark = kv.get("mobula", "job-agent:t-2")
        second = s.node(BIN, "--address", head.address, "--job-agent", "--no-token",
                        "--node-ip-address", ip)
        assert second.process.wait(cluster.DEADLINE_S) == 71, second.log()
        error = second.file()["error"]
        assert first.info["node_id"] in error and "which is ALIVE" in error, error
        assert kv.agent_port() == first.info["http_port"]
        assert kv.get("mobula", "job-agent:t-2") == mark and head.state("t-2") == "RUNNING" and \
            head.state("t-1") == "SUCCEEDED"
        drivers = cluster.Gcs(s, head.address).call(
            "JobInfoGcsService/GetAllJobInfo", "GetAllJobInfoRequest").job_info_list
        assert not any(d.is_dead for d in drivers
                       if d.config.metadata["job_submission_id"] == "t-2"), drivers
        first.kill()
        cluster.wait_for("the first is DEAD", lambda: first.info["node_id"] not in
                         cluster.Gcs(s, head.address).alive())
        third, kv = plain_job_agent(s, head)
        assert head.wait_state("t-2", "FAILED") and head.state("t-1") == "SUCCEEDED"
        cluster.wait_for("its mark", lambda: kv.get("mobula", "job-agent:t-2") != mark)
        assert third.stop() == 0


def case_token(s):
    """Head, dashboard, node and clients have one token (Ray 2.60 began with them)."""
    token = with_token()
    with Head(env=token) as head:
        ip = head.address.split(":")[0]
        node, _ = job_agent(s, head, env=token,
                            metadata=[("authorization", f"Bearer {TOKEN}")])
        code, text = head.ray("submit", "--submission-id", "s-1", "--", "sh", "-c",
                              f"{BIN}/mobula run -- sh -c 'echo in a gang'", **token)
        assert code == 0 and "in a gang" in text and "Job 's-1' succeeded" in text, text
        code, text = head.ray("logs", "s-1", **token)
        assert code == 0 and "in a gang" in text, text
        code, text = head.ray("submit", "--", "true",
                              **with_token("another"))
        assert code != 0 and "s-1" not in text, text
        for header in {}, {"Authorization": "Bearer another"}:  # straight to the node
            request = urllib.request.Request(
                f"http://{ip}:{node.info['http_port']}/api/job_agent/jobs/", method="POST",
                data=b'{"entrypoint": "true"}', headers=header)
            try:
                urllib.request.urlopen(request, timeout=60)
                raise AssertionError("the node takes jobs from anybody")
            except urllib.error.HTTPError as e:
                assert e.code in (401, 403), e
        assert TOKEN not in node.log()
        assert node.stop() == 0


def main():
    with cluster.Sandbox() as s:
        with Head() as head:
            node, kv = job_agent_beside_rays(s, head)
            for case in (case_commands, case_published_at_once, case_working_dir, case_gang, case_guard,
                         case_agent_restart, case_dashboard_restart, case_rivals_word):
                case(s, head, node, kv)
                print(f"ok   {case.__name__[5:]}", flush=True)
            assert node.stop() == 0
        cases = [case_gcs_restart, case_head_without_memory, case_refused, case_second]
        for case in [*cases, case_token] if IS_MODERN else cases:
            case(s)
            print(f"ok   {case.__name__[5:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
