"""The REST API with plain sockets: statuses, texts, streams, the tail's promise; test_rest.py HEAD

What the spec of Ray's Jobs API says is checked literally, because clients branch on these texts.
"""

import asyncio
import http.client
import json
import pathlib
import sys
import threading
import time
import urllib.parse

from head_process import Checks, HeadProcess

check = Checks()


def call(head, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", head.http_port, timeout=120)
    connection.request(method, path, body=body, headers=headers or {})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, text


def call_json(head, method, path, body=None):
    status, text = call(head, method, path, json.dumps(body) if body is not None else None)
    return status, json.loads(text) if status == 200 else text.decode()


def wait_state(head, job, states, timeout=120):
    deadline = time.monotonic() + timeout
    while True:
        _, details = call_json(head, "GET", f"/api/jobs/{job}")
        if details["status"] in states:
            return details
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job} is {details['status']}")
        time.sleep(0.02)


def submit(head, entrypoint, **more):
    status, reply = call_json(head, "POST", "/api/jobs/", {"entrypoint": entrypoint, **more})
    assert status == 200, reply
    return reply["submission_id"]


def test_small(head):
    status, version = call_json(head, "GET", "/api/version")
    check.equal("version", (status, version["version"], version["ray_version"]),
                (200, "4", "2.60.0"))
    check.equal("gcs_healthz", call(head, "GET", "/api/gcs_healthz"), (200, b"success"))
    check.equal("authentication mode", call_json(head, "GET", "/api/authentication_mode")[1],
                {"authentication_mode": "disabled"})
    check.equal("the slash is required", call(head, "GET", "/api/jobs"), (404, b"404: Not Found"))
    check.equal("wrong method", call(head, "PUT", "/api/jobs/"),
                (405, b"405: Method Not Allowed"))
    check.equal("browsers may not write",
                call(head, "POST", "/api/jobs/", "{}", {"User-Agent": "Mozilla/5.0"}),
                (405, b"'POST' method not allowed for browser traffic."))
    check.equal("activities", call_json(head, "GET", "/api/component_activities")[0], 200)
    status, text = call_json(head, "GET", "/api/cluster_status?format=1")
    check.true("cluster status", "0.0/2.0 mobula_gpu" in text["data"]["clusterStatus"], text)
    nodes = call_json(head, "GET", "/nodes?view=summary")[1]["data"]["summary"]
    check.equal("node summary", [n["raylet"]["nodeId"] for n in nodes], [head.node_id])


def test_bad_requests(head):
    for body in ("", "[]", "{", "no json"):
        check.equal(f"body {body!r}", call(head, "POST", "/api/jobs/", body),
                    (500, b"500 Internal Server Error\n\nServer got itself in trouble"))
    # JSON to Ray, and nothing that can be kept as it is: said, and no job of it.
    for field in ('"submission_id": "odd%s"', '"metadata": {"a%s": "b"}', '"metadata": {"a": "%s"}',
                  '"runtime_env": {"env_vars": {"A": "%s"}}', '"bogus%s": 1'):
        for odd, error in (("\\u0000", "\\u0000 can be in no command, no variable and no name"),
                           ("\\ud800", "half a surrogate pair is no character")):
            body = '{"entrypoint": "true", ' + field % odd + "}"
            status, text = call(head, "POST", "/api/jobs/", body)
            check.equal(body, (status, text.splitlines()[-1].decode().split(":")[:2]),
                        (400, ["ValueError", f" {error}"]))
    for field in ("entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory"):
        for number in ("9223372036854775808", "-1" + 30 * "0"):
            body = f'{{"entrypoint": "true", "{field}": {number}}}'
            status, text = call(head, "POST", "/api/jobs/", body)
            check.equal(body, (status, text.splitlines()[-1].decode().split(":")[:2]),
                        (400, ["ValueError", " a number must be one of 64 bits"]))
    check.equal("no job of them", [j for j in call_json(head, "GET", "/api/jobs/")[1]
                                   if j["entrypoint"] == "true"], [])
    status, text = call_json(head, "POST", "/api/jobs/", {"entrypoint": 7})
    check.equal("type error", (status, text.splitlines()[-1]),
                (400, "TypeError: entrypoint must be a string, got <class 'int'>"))
    # The limits of docs/jobs-api.md.
    for job in ("x" * 201, "\u00e4" * 101, "a/b", ".a", "a\nb"):
        status, text = call_json(head, "POST", "/api/jobs/",
                                 {"entrypoint": "true", "submission_id": job})
        check.equal(f"no id: {len(job)} characters", (status, text.splitlines()[-1]),
                    (400, "TypeError: submission_id must be 1 to 200 bytes without '/' and control "
                          "characters, and not start with '.'"))
    for job in ("x" * 200, "\u00e4" * 100):
        submit(head, "echo limits", submission_id=job)
        ended = wait_state(head, urllib.parse.quote(job), ("SUCCEEDED", "FAILED"))
        check.equal(f"an id: {len(job)} characters", (ended["submission_id"], ended["status"]),
                    (job, "SUCCEEDED"))
    check.equal("more than 16 MiB", call(head, "POST", "/api/jobs/", b" " * (16 * 1024 * 1024 + 1)),
                (413, b"Maximum request body size 16777216 exceeded."))
    status, _ = call(head, "POST", "/api/jobs/", b" " * (16 * 1024 * 1024))
    check.equal("16 MiB are read, and no JSON", status, 500)
    for path, method in (("/api/jobs/nope", "GET"), ("/api/jobs/nope/stop", "POST"),
                         ("/api/jobs/nope", "DELETE"), ("/api/jobs/nope/logs", "GET"),
                         ("/api/jobs/nope/logs/tail", "GET")):
        check.equal(f"{method} {path}", call(head, method, path),
                    (404, b"Job nope does not exist"))


def test_lifecycle(head):
    job = submit(head, "echo out; echo err >&2; exit 3", submission_id="life",
                 metadata={"a": "b"}, runtime_env={"env_vars": {"X": "secret"}})
    details = wait_state(head, job, ("FAILED",))
    check.equal("exit code", details["driver_exit_code"], 3)
    check.equal("error type", details["error_type"], "JOB_ENTRYPOINT_COMMAND_ERROR")
    check.true("message", details["message"].startswith(
        "Job entrypoint command failed with exit code 3, last available logs (truncated to "
        "20,000 chars):\n"), details["message"])
    check.equal("metadata, runtime_env", (details["metadata"], details["runtime_env"]),
                ({"a": "b"}, {"env_vars": {"X": "secret"}}))
    check.equal("node", details["driver_node_id"], head.node_id)
    _, text = call(head, "GET", "/api/jobs/life", headers={"User-Agent": "Mozilla/5.0"})
    check.equal("redacted for browsers", json.loads(text)["runtime_env"],
                {"env_vars": {"X": "<redacted>"}})
    status, text = call_json(head, "POST", "/api/jobs/",
                             {"entrypoint": "true", "submission_id": "life"})
    check.true("duplicate", status == 500 and
               "status code 400" in text and text.endswith(
        "ValueError: Job with submission_id life already exists. Please use a different "
        "submission_id.\n."), text)
    check.equal("stop of an ended job", call_json(head, "POST", "/api/jobs/life/stop"),
                (200, {"stopped": False}))
    check.equal("logs", call_json(head, "GET", "/api/jobs/life/logs")[1]["logs"].splitlines()[-2:],
                ["out", "err"])
    check.equal("delete", call_json(head, "DELETE", "/api/jobs/life"), (200, {"deleted": True}))
    check.equal("deleted", call(head, "GET", "/api/jobs/life")[0], 404)
    generated = submit(head, "true")
    check.true("generated id", generated.startswith("raysubmit_") and len(generated) == 26
               and not set(generated[10:]) & set("IloO0"), generated)


def test_stop(head):
    job = submit(head, "trap '' TERM; sleep 60 & wait; sleep 60", submission_id="stubborn")
    wait_state(head, job, ("RUNNING",))
    status, text = call_json(head, "DELETE", "/api/jobs/stubborn")
    check.true("no delete while running", status == 500 and text.endswith(
        "RuntimeError: Attempted to delete job 'stubborn', but it is in a non-terminal state "
        "RUNNING."), text)
    check.equal("stop", call_json(head, "POST", "/api/jobs/stubborn/stop"),
                (200, {"stopped": True}))
    details = wait_state(head, job, ("STOPPED",))
    check.equal("stopped", (details["message"], details["driver_exit_code"]),
                ("Job was intentionally stopped.", None))


def test_packages(head):
    name = "_ray_pkg_0123456789abcdef.zip"
    path = f"/api/packages/gcs/{name}"
    check.equal("no package", call(head, "GET", path),
                (404, f"Package gcs://{name} does not exist".encode()))
    body = bytes(range(256)) * 4096 * 8  # 8 MiB
    check.equal("upload", call(head, "PUT", path, body), (200, b""))
    stored = pathlib.Path(head.dir) / "packages" / name
    check.true("stored", stored.read_bytes() == body)
    check.equal("there", call(head, "GET", path), (200, b""))
    check.equal("other protocol", call(head, "PUT", "/api/packages/s3/x.zip", b"")[0], 500)
    for bad in ("..%2f..%2fetc%2fpasswd", ".hidden", "a%20b"):
        check.equal(f"name {bad}", call(head, "PUT", f"/api/packages/gcs/{bad}", b"x")[0], 400)
    for method, target in (("POST", "/api/jobs/"), ("PUT", "/api/packages/gcs/big.zip")):
        connection = http.client.HTTPConnection("127.0.0.1", head.http_port, timeout=120)
        connection.putrequest(method, target)
        connection.putheader("Content-Length", "99999999999")
        connection.endheaders()
        reply = connection.getresponse()
        check.equal(f"too much is announced: {target}", (reply.status, reply.getheader("Connection")),
                    (413, "close"))
        connection.close()
    # Sent only as far as it takes: the server must refuse at 100 MiB whatever the client says.
    connection = http.client.HTTPConnection("127.0.0.1", head.http_port, timeout=120)
    connection.putrequest("PUT", "/api/packages/gcs/big.zip")
    connection.putheader("Content-Length", str(101 << 20))
    connection.endheaders()
    piece = bytes(1 << 20)
    try:
        for _ in range(101):
            connection.send(piece)
        reply = connection.getresponse()
        got = reply.status, reply.read()
    except (BrokenPipeError, ConnectionResetError) as error:
        got = error
    connection.close()
    check.equal("too big", got, (413, b"Maximum request body size 104857600 exceeded."))
    left = sorted(p.name for p in (pathlib.Path(head.dir) / "packages").iterdir())
    check.equal("nothing half is left", left, [name])
    job = submit(head, "true", runtime_env={"working_dir": "gcs://_ray_pkg_missing.zip"})
    details = wait_state(head, job, ("FAILED",))
    check.true("missing package", details["error_type"] == "RUNTIME_ENV_SETUP_FAILURE"
               and "Failed to set up runtime environment" in details["message"], details)


async def follow(head, job, session, slow=False):
    """Everything the tail says, its close code, and the state read right after the close."""
    text = []
    biggest = 0
    async with session.ws_connect(f"{head.http}/api/jobs/{job}/logs/tail", max_msg_size=0) as ws:
        async for message in ws:
            text.append(message.data)
            biggest = max(biggest, len(message.data.encode()))
            if slow:
                await asyncio.sleep(0.001)
        code = ws.close_code
    async with session.get(f"{head.http}/api/jobs/{job}") as reply:
        state = (await reply.json())["status"]
    return "".join(text), code, state, biggest


async def test_tail(head):
    import aiohttp

    async with aiohttp.ClientSession() as session:
        job = submit(head, "for i in 1 2 3; do echo line $i; sleep 0.2; done; printf 'gr\\303\\274n'")
        results = await asyncio.gather(*(follow(head, job, session) for _ in range(5)))
        # How the text is cut into frames may differ; the text, the close and the state may not.
        check.true("five followers agree", all(r[:3] == results[0][:3] for r in results), results)
        text, code, state, _ = results[0]
        check.equal("tail", (text.splitlines()[-4:], code, state),
                    (["line 1", "line 2", "line 3", "grün"], 1000, "SUCCEEDED"))
        check.equal("tail of an ended job", (await follow(head, job, session))[:3], results[0][:3])

        job = submit(head, "i=0; while [ $i -lt 200000 ]; do echo \"line number $i of many\"; "
                           "i=$((i+1)); done; printf '\\377bad'; head -c 3000000 /dev/zero | tr '\\0' x")
        (text, code, state, biggest), (slow, _, _, _) = await asyncio.gather(
            follow(head, job, session), follow(head, job, session, slow=True))
        lines = text.split("\n")
        numbers = [line for line in lines if line.startswith("line number")]
        check.equal("no line is lost", numbers[:: 199999],
                    ["line number 0 of many", "line number 199999 of many"])
        check.equal("200000 lines", len(numbers), 200000)
        check.equal("the end", (lines[-1][:4], len(lines[-1]), code, state),
                    ("\ufffdbad", 3000004, 1000, "SUCCEEDED"))
        check.true("frames of 16 KiB at most", biggest <= 16384, biggest)
        check.true("a slow follower gets the same", slow == text)
        _, whole = call_json(head, "GET", f"/api/jobs/{job}/logs")
        check.true("logs are the same text", whole["logs"] == text)

        job = submit(head, "sleep 0.3")
        check.equal("a silent job", (await follow(head, job, session))[1:3], (1000, "SUCCEEDED"))


def test_many(head):
    ids = []
    threads = [threading.Thread(target=lambda i=i: ids.append(
        submit(head, "true", submission_id=f"many-{i}"))) for i in range(50)]
    started = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for job in ids:
        wait_state(head, job, ("SUCCEEDED",))
    check.true("50 jobs at once", len(ids) == 50, time.monotonic() - started)


def page_order(job):
    return job["start_time"], job["submission_id"]


def test_pages(head):
    """Filters and pages of ours: every job once, in order, whatever comes or goes between."""
    for i in range(7):
        submit(head, "exit 5" if i % 2 else "true", submission_id=f"page:ü {i}")
    for i in range(7):
        wait_state(head, urllib.parse.quote(f"page:ü {i}"), ("SUCCEEDED", "FAILED"))
    everything = call_json(head, "GET", "/api/jobs/")[1]
    path, seen, pages = "/api/jobs/?limit=3", [], 0
    while path:
        connection = http.client.HTTPConnection("127.0.0.1", head.http_port, timeout=120)
        connection.request("GET", path)
        reply = connection.getresponse()
        rows = json.loads(reply.read())
        token = reply.getheader("X-Mobula-Next-Page")
        connection.close()
        seen += rows
        pages += 1
        if pages == 2:  # the job that the next token names goes, another one comes
            check.equal("delete", call(head, "DELETE", "/api/jobs/" + urllib.parse.quote(rows[-1]["submission_id"]))[0], 200)
            submit(head, "true", submission_id="page:late")
        path = token and f"/api/jobs/?limit=3&page_token={token}"
    ids = [j["submission_id"] for j in seen]
    check.equal("pages hold each job once", ids,
                [j["submission_id"] for j in sorted(everything, key=page_order)] + ["page:late"])
    check.equal("a page is as the whole list", seen[:3], sorted(everything, key=page_order)[:3])
    wait_state(head, "page:late", ("SUCCEEDED",))
    failed = call_json(head, "GET", "/api/jobs/?status=FAILED,STOPPED")[1]
    check.true("by status", {"page:ü 1", "page:ü 3", "page:ü 5"} <= {j["submission_id"] for j in failed}
               and {j["status"] for j in failed} <= {"FAILED", "STOPPED"}, failed)
    for query, text in (("limit=0", b"limit"), ("limit=x", b"limit"), ("status=DONE", b"DONE is none"),
                        ("page_token=x", b"page_token"), ("page_token=1-", b"page_token")):
        status, said = call(head, "GET", f"/api/jobs/?{query}")
        check.true(f"refused: {query}", status == 400 and text in said, (status, said))


def test_restart(head):
    done = submit(head, "echo kept", submission_id="kept")
    wait_state(head, done, ("SUCCEEDED",))
    # It lives as long as its head does, however long the head's end takes to come.
    lost = submit(head, f"while test -d {head.dir} && ! test -e {head.dir}/go; do sleep 0.1; done", submission_id="lost")
    wait_state(head, lost, ("RUNNING",))
    # Answers show a state a moment before its commit. Commits are in order: when this submission is
    # acknowledged, that state is on disk, and the restarted head does not start the job anew.
    submit(head, "true", submission_id="behind")
    former = head.node_id
    head.kill()
    (pathlib.Path(head.dir) / "go").touch()
    head.start()
    nodes = call_json(head, "GET", "/api/mobula/status")[1]["nodes"]
    check.equal("of a node that has not spoken since the restart nothing is free",
                [n["resources_available"] for n in nodes if n["node_id"] == former], [{}])
    check.equal("an ended job is known after a kill",
                call_json(head, "GET", "/api/jobs/kept")[1]["status"], "SUCCEEDED")
    details = wait_state(head, "lost", ("FAILED",))
    check.equal("a lost driver", details["error_type"], "JOB_SUPERVISOR_ACTOR_DIED")
    check.true("its log is still there",
               "kept\n" in call_json(head, "GET", "/api/jobs/kept/logs")[1]["logs"])


def test_token(program):
    with HeadProcess(program, token="s3cret") as head:
        check.equal("no token", call(head, "GET", "/api/version")[0], 401)
        check.equal("wrong token", call(head, "GET", "/api/version", headers={
            "Authorization": "Bearer no"})[0], 403)
        check.equal("token", call(head, "GET", "/api/version", headers={
            "Authorization": "Bearer s3cret"})[0], 200)
        check.equal("health is public", call(head, "GET", "/api/gcs_healthz")[0], 200)


def main():
    program = sys.argv[1]
    with HeadProcess(program) as head:
        try:
            test_small(head)
            test_bad_requests(head)
            test_lifecycle(head)
            test_stop(head)
            test_packages(head)
            asyncio.run(test_tail(head))
            test_many(head)
            test_pages(head)
            test_restart(head)
        except BaseException:
            print(head.log_text()[-4000:])
            raise
    test_token(program)
    return check.status()


if __name__ == "__main__":
    sys.exit(main())
