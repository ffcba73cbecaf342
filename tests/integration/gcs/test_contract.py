"""One table of requests, sent to a real Ray head and to ours; the answers must be alike.

    test_contract.py HEAD

Ray's answer is the expectation: status, content type and text, of which a traceback counts by its
last line and a JobDetails by its keys, types and words. Both heads run in token mode, so that the
table also holds the rows of authentication. Where we differ on purpose, DIFFERS says it and why.
"""

import http.client
import json
import pathlib
import re
import sys
import time
import urllib.parse

from head_process import Checks, HeadProcess

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ports import free_port  # noqa: E402
from ray_head import RayHead  # noqa: E402

TOKEN = "contract-token-0123456789abcdef"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
MOZILLA = {"User-Agent": "Mozilla/5.0 (X11)"}
MISSING = "gcs://_ray_pkg_0000000000000000.zip"

check = Checks()


def request(port, method, path, body=None, headers=AUTH, timeout=150):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    if isinstance(body, (dict, list)):
        body = json.dumps(body)
    connection.request(method, path, body=body, headers=headers)
    reply = connection.getresponse()
    text = reply.read().decode(errors="replace")  # an icon is no text
    connection.close()
    return reply.status, reply.getheader("Content-Type"), text, reply.getheader("Set-Cookie") or reply.getheader("Allow")


# ---- what of an answer counts ----

def shape(value):
    """Types instead of values."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value]
    return type(value).__name__


def words(text):
    """The text itself; of a traceback its last line, of a wrapped one the error inside."""
    if "Traceback (most recent call last)" not in text:
        # Theirs ends with a set, in whatever order that is.
        return re.sub(r" Supported filter columns: \{[^}]*\}", "", text).replace("\\u2013", "\u2013")
    lines = [line for line in text.strip().splitlines() if line.strip() not in ("", ".", '"')]
    return "Traceback: " + re.sub(r"[\".]+$", "", lines[-1].split("RuntimeError: Request failed with status code")[-1])


def waiting(text):
    job = json.loads(text)
    return job["status"], re.split(" It (?:is number|needs) ", job["message"])[0]


def fate(text):
    """All of the details but the words."""
    return details(text)[:2]


DETAILS_EXACT = ("type", "status", "entrypoint", "error_type", "metadata", "runtime_env",
                 "driver_exit_code", "submission_id")


def details(text):
    job = json.loads(text)
    message = job["message"].splitlines()
    return ({k: type(v).__name__ for k, v in sorted(job.items())},
            {k: job[k] for k in DETAILS_EXACT}, [line.removesuffix(". Full traceback:") for line in message[:1]])


def as_json_shape(text):
    return shape(json.loads(text))


def exact_json(text):
    return json.loads(text)


def activity(text):
    """Who is active is another matter: a job without ray.init is none to Ray."""
    return {name: sorted(fields) for name, fields in json.loads(text).items()}


def state_rows(text):
    """Our resources have other names and we have no labels; the rest is compared by type."""
    reply = json.loads(text)
    result = reply["data"]["result"]
    for row in result["result"]:
        row["resources_total"] = sorted({type(v).__name__ for v in row["resources_total"].values()})
        row["labels"] = type(row["labels"]).__name__
    del result["num_after_truncation"]  # theirs depends on where the filter was applied
    return shape(reply), [(r["is_head_node"], r["state"]) for r in result["result"]]


def report(text):
    """What of the autoscaler's report is there without an autoscaler."""
    reply = json.loads(text)
    status = reply["data"].pop("clusterStatus")
    usage = status["loadMetricsReport"]["usage"]  # theirs is empty at first
    assert all(len(pair) == 2 for pair in usage.values()), usage
    return reply["msg"], sorted(reply["data"]), type(status["time"]).__name__


def summary(text):
    reply = json.loads(text)
    raylet = reply["data"]["summary"][0]["raylet"]
    return (reply["msg"], shape(reply["data"]["summary"][0]["ip"]),
            {k: type(raylet[k]).__name__ for k in (
                "nodeId", "nodeManagerAddress", "nodeManagerPort", "state", "isHeadNode",
                "resourcesTotal", "labels")})


# ---- the table: name, method, path, body, headers, what counts ----

def bad_bodies():
    for body in ("", "[]", "{", "no json", "3", '"x"', "null"):
        yield f"body {body!r}", body
    job = {"entrypoint": "true"}
    for name, value in (
        ("entrypoint", 7), ("entrypoint", ["true"]), ("submission_id", 3), ("job_id", 3),
        ("runtime_env", 3), ("runtime_env", []), ("metadata", "x"), ("metadata", {"a": 1}),
        ("entrypoint_num_cpus", "1"), ("entrypoint_num_gpus", [1]), ("entrypoint_memory", 1.5),
        ("entrypoint_memory", "1"), ("entrypoint_resources", 1),
        ("entrypoint_resources", {"a": "b"}), ("entrypoint_label_selector", 1),
        ("entrypoint_label_selector", {"a": 1}), ("bogus", 1),
        ("entrypoint_label_selector", {"-a": "b"}), ("entrypoint_label_selector", {"a/": "b"}),
        ("entrypoint_label_selector", {"x_/a": "b"}), ("entrypoint_label_selector", {"/a": "b-"}),
        ("entrypoint_label_selector", {"x..y/a": "in()"}),
        ("entrypoint_label_selector", {"a": "!!b"}), ("entrypoint_label_selector", {"a": "in(b,  c)"}),
        ("entrypoint_label_selector", {"a": "in(b, c"}), ("entrypoint_label_selector", {"a": "b c"}),
        ("entrypoint_label_selector", {"a": "b" * 64}),
    ):
        yield f"{name} = {json.dumps(value)}", {**job, name: value}
    # What both take for JSON, of which we cannot keep all.
    yield "a NUL in an id", '{"entrypoint": "true", "submission_id": "a\\u0000b"}'
    yield "half a pair in an id", '{"entrypoint": "true", "submission_id": "a\\ud800b"}'
    yield "a NUL in metadata", '{"entrypoint": "true", "metadata": {"a": "\\u0000"}}'
    yield "2^63 bytes", '{"entrypoint": "true", "entrypoint_memory": 9223372036854775808}'
    yield "no JSON: bytes", b'{"entrypoint": "\xff"}'
    yield "no JSON: an escape", '{"entrypoint": "\\u12x4"}'
    yield "no entrypoint", {"submission_id": "x"}
    yield "no entrypoint and an unknown field", {"bogus": 1}


def table():
    yield "version", "GET", "/api/version", None, AUTH, as_json_shape
    yield "authentication mode", "GET", "/api/authentication_mode", None, {}, exact_json
    yield "the slash is required", "GET", "/api/jobs", None, AUTH, words
    yield "POST without the slash", "POST", "/api/jobs", {"entrypoint": "true"}, AUTH, words
    yield "no such path", "GET", "/api/nothing", None, AUTH, words
    yield "no such path below a job", "GET", "/api/jobs/a/b", None, AUTH, words
    yield "health", "GET", "/api/gcs_healthz", None, {}, words
    yield "the node's health is the agent's", "GET", "/api/local_raylet_healthz", None, {}, words
    yield "the node's other health too", "GET", "/api/healthz", None, {}, words
    for method, path in (("PUT", "/api/jobs/"), ("DELETE", "/api/jobs/"), ("POST", "/api/version"),
                         ("POST", "/api/jobs/nope"), ("GET", "/api/jobs/nope/stop"),
                         ("DELETE", "/api/jobs/nope/logs"), ("POST", "/api/packages/gcs/a.zip"),
                         ("DELETE", "/api/packages/gcs/a.zip"), ("PATCH", "/api/jobs/nope")):
        yield f"method {method} {path}", method, path, None, AUTH, words
    for job in ("nope", "03000000", "ffffffff", "a%20b"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/stop"), ("GET", "/logs"),
                             ("GET", "/logs/tail")):
            yield (f"unknown job: {method} {job}{path}", method, f"/api/jobs/{job}{path}", None,
                   AUTH, words)
    for name, body in bad_bodies():
        yield name, "POST", "/api/jobs/", body, AUTH, words
    yield ("nulls are dropped", "POST", "/api/jobs/",
           {"entrypoint": "true", "submission_id": "nulls", "bogus": None, "metadata": None,
            "runtime_env": None, "entrypoint_num_cpus": None}, AUTH, exact_json)
    yield ("an empty id is none", "POST", "/api/jobs/", {"entrypoint": "true", "submission_id": ""},
           AUTH, as_json_shape)
    yield ("true is a number", "POST", "/api/jobs/",
           {"entrypoint": "true", "submission_id": "bool", "entrypoint_num_cpus": False,
            "entrypoint_memory": False}, AUTH, exact_json)
    yield ("of two fields the last counts", "POST", "/api/jobs/",
           '{"entrypoint": "false", "entrypoint": "true", "submission_id": "twice"}', AUTH,
           exact_json)
    yield ("both ids", "POST", "/api/jobs/",
           {"entrypoint": "true", "submission_id": "new", "job_id": "old"}, AUTH, exact_json)
    yield ("the deprecated id", "POST", "/api/jobs/", {"entrypoint": "true", "job_id": "old-id"},
           AUTH, exact_json)
    yield ("text/plain is taken", "POST", "/api/jobs/",
           {"entrypoint": "true", "submission_id": "plain"},
           {**AUTH, "Content-Type": "text/plain"}, exact_json)
    yield ("no package", "GET", "/api/packages/gcs/_ray_pkg_0123456789abcdef.zip", None, AUTH,
           words)
    yield "GET of s3", "GET", "/api/packages/s3/x.zip", None, AUTH, words
    yield "no such protocol", "GET", "/api/packages/ftp/x.zip", None, AUTH, words
    yield "PUT to s3", "PUT", "/api/packages/s3/x.zip", "x", AUTH, words
    yield "PUT to no such protocol", "PUT", "/api/packages/ftp/x.zip", "x", AUTH, words
    yield "a package", "PUT", "/api/packages/gcs/_ray_pkg_00112233445566aa.zip", "PK", AUTH, words
    yield "is there", "GET", "/api/packages/gcs/_ray_pkg_00112233445566aa.zip", None, AUTH, words
    yield "activities", "GET", "/api/component_activities", None, AUTH, activity
    yield "activities, time-out", "GET", "/api/component_activities?timeout=5", None, AUTH, activity
    yield "state API: nodes", "GET", "/api/v0/nodes?detail=1", None, AUTH, state_rows
    yield ("state API: no such node", "GET",
           "/api/v0/nodes?filter_keys=state&filter_predicates==&filter_values=dead", None, AUTH,
           state_rows)
    yield ("state API: not", "GET",
           "/api/v0/nodes?filter_keys=state&filter_predicates=!=&filter_values=dead", None, AUTH,
           state_rows)
    for state, head in (("alive", "true"), ("alive", "false"), ("dead", "true")):
        yield (f"state API: {state} and {head}", "GET", "/api/v0/nodes?"
               f"filter_keys=state&filter_predicates==&filter_values={state}&"
               f"filter_keys=is_head_node&filter_predicates==&filter_values={head}", None, AUTH, state_rows)
    yield ("state API: not one of two", "GET", "/api/v0/nodes?filter_keys=state&filter_predicates==&"
           "filter_values=alive&filter_keys=is_head_node&filter_predicates=!=&filter_values=true", None, AUTH, state_rows)
    yield ("state API: no such column", "GET", "/api/v0/nodes?filter_keys=bogus&filter_predicates==&filter_values=x",
           None, AUTH, words)
    for query in ("limit=x", "limit=99999", "filter_keys=state", "filter_values=x"):
        yield f"state API: {query}", "GET", f"/api/v0/nodes?{query}", None, AUTH, words
    for query in ("limit=x", "limit=99999", "filter_keys=status", "filter_values=x",
                  "filter_keys=bogus&filter_predicates==&filter_values=x",
                  "filter_keys=status&filter_predicates=>&filter_values=x"):
        yield f"state API: jobs, {query}", "GET", f"/api/v0/jobs?{query}", None, AUTH, words
    yield "cluster status", "GET", "/api/cluster_status?format=1", None, AUTH, as_json_shape
    yield "cluster report", "GET", "/api/cluster_status", None, AUTH, report
    yield "host names", "GET", "/nodes?view=hostNameList", None, AUTH, as_json_shape
    yield "no view", "GET", "/nodes", None, AUTH, words
    yield "no such view", "GET", "/nodes?view=x", None, AUTH, words
    yield "summary", "GET", "/nodes?view=summary", None, AUTH, summary
    # The browser guard.
    for header in ("Referer", "Origin", "Sec-Fetch-Mode", "Sec-Fetch-Dest", "Sec-Fetch-Site",
                   "Sec-Fetch-User", "Access-Control-Request-Method",
                   "Access-Control-Request-Headers"):
        yield (f"browser by {header}", "POST", "/api/jobs/", {"entrypoint": "true"},
               {**AUTH, header: "x"}, words)
    for method, path in (("POST", "/api/jobs/"), ("DELETE", "/api/jobs/nope"),
                         ("PUT", "/api/packages/gcs/x.zip"), ("POST", "/api/jobs/nope/stop"),
                         ("PATCH", "/api/jobs/nope"), ("POST", "/api/nothing"),
                         ("GET", "/api/jobs/nope"), ("HEAD", "/api/version")):
        yield f"browser: {method} {path}", method, path, None, {**AUTH, **MOZILLA}, words
    # Authentication.
    ways = {
        "none": {}, "wrong": {"Authorization": "Bearer wrong"}, "no Bearer": {"Authorization": TOKEN},
        "bearer in small letters": {"Authorization": f"bearer {TOKEN}"},
        "Basic": {"Authorization": "Basic eDp5"}, "empty": {"Authorization": ""},
        "KubeRay's header": {"X-Ray-Authorization": f"Bearer {TOKEN}"},
        "KubeRay's header, wrong": {"X-Ray-Authorization": "Bearer wrong"},
        "a wrong one hides a right one": {"Authorization": "Bearer wrong",
                                          "X-Ray-Authorization": f"Bearer {TOKEN}"},
        "an empty one does not": {"Authorization": "", "X-Ray-Authorization": f"Bearer {TOKEN}"},
        "cookie": {"Cookie": f"a=b; ray-authentication-token={TOKEN}"},
        "cookie, wrong": {"Cookie": "ray-authentication-token=wrong"},
        "cookie, empty": {"Cookie": "ray-authentication-token="},
        "cookie of another name": {"Cookie": f"token={TOKEN}"},
    }
    for name, headers in ways.items():
        yield f"token: {name}", "GET", "/api/jobs/nope", None, headers, words
    for method, path in (("GET", "/api/version"), ("POST", "/api/jobs/"), ("GET", "/api/nothing"),
                         ("PUT", "/api/packages/gcs/x.zip"), ("GET", "/nodes?view=summary"),
                         ("GET", "/api/v0/nodes"), ("GET", "/api/cluster_status")):
        yield f"no token: {method} {path}", method, path, None, {}, words
    # What is open without one: the health paths for probes, and a page's own.
    for path in ("/", "/favicon.ico", "/static/x", "/-/healthz", "/api/healthz", "/api/gcs_healthz",
                 "/api/local_raylet_healthz", "/api/authentication_mode"):
        for method in ("GET", "POST", "OPTIONS"):
            yield f"open: {method} {path}", method, path, None, {}, words
        yield f"open: browser's POST {path}", "POST", path, None, MOZILLA, words
    for path in ("/static", "/-/healthz/", "/api/gcs_healthz/", "/index.html", "/metrics"):
        yield f"not open: {path}", "GET", path, None, {}, words
    yield "authenticate", "POST", "/api/authenticate", None, AUTH, exact_json
    yield "authenticate, browser", "POST", "/api/authenticate", None, {**AUTH, **MOZILLA}, exact_json
    for name in ("none", "wrong", "KubeRay's header", "cookie"):
        yield f"authenticate: {name}", "POST", "/api/authenticate", None, ways[name], words


# Row: why, on purpose.
DIFFERS = {
    "a NUL in an id": "400 and why; theirs is a 500 of the log's file name",
    "half a pair in an id": "400 and why; theirs is a 500 of the log's file name",
    "a NUL in metadata": "no text of ours holds it: refused rather than kept as something else",
    "2^63 bytes": "beyond 64 bits: refused rather than kept as something else; theirs runs at once",
    "token: bearer in small letters": "the scheme of a credential has no case (RFC 9110, 11.1)",
    "tail without an upgrade": "a request that is no upgrade is told so, at once",
    "env-number: why": "theirs has the value, which may be a secret; ours the variable's name",
    "env-text: why": "theirs is Python's: 'str' object does not support item assignment",
    "open: GET /": "there are no web pages here: 404",
    "open: GET /favicon.ico": "there are no web pages here: 404",
    "open: GET /static/x": "there are no web pages here: 404, with a text",
}

JOBS = {
    "ok": {"entrypoint": "echo out", "metadata": {"a": "b"},
           "runtime_env": {"env_vars": {"X": "secret"}}},
    "exit-3": {"entrypoint": "echo out; exit 3"},
    "killed": {"entrypoint": "kill -9 $$"},
    "no-package": {"entrypoint": "true", "runtime_env": {"working_dir": MISSING}},
    "stopped": {"entrypoint": "sleep 100"},
    "env-number": {"entrypoint": "true", "runtime_env": {"env_vars": {"A": "b", "C": 5150}}},
    "env-text": {"entrypoint": "true", "runtime_env": {"env_vars": "A=B"}},
    "excludes-number": {"entrypoint": "true", "runtime_env": {"excludes": 5}},
    "excludes-numbers": {"entrypoint": "true", "runtime_env": {"excludes": [5]}},
    "config-number": {"entrypoint": "true", "runtime_env": {"config": 5}},
    "config-no-time": {"entrypoint": "true", "runtime_env": {"config": {"setup_timeout_seconds": 0}}},
    "config-time": {"entrypoint": "true", "runtime_env": {"config": {"setup_timeout_seconds": "x"}}},
    "config-eager": {"entrypoint": "true", "runtime_env": {"config": {"eager_install": 5}}},
    "config-files": {"entrypoint": "true", "runtime_env": {"config": {"log_files": [5]}}},
    "config-files-dict": {"entrypoint": "true", "runtime_env": {"config": {"log_files": {"it's": [
        None, True, 5, 0.1, 1e16, 100000.0, "\"'\\\n\x01"], "b": {}}}}},
    "config-bogus": {"entrypoint": "true", "runtime_env": {"config": {"bogus": 1, "setup_timeout_seconds": -1}}},
    "names-CPU": {"entrypoint": "true", "entrypoint_resources": {"CPU": 1}},
    "names-GPU": {"entrypoint": "true", "entrypoint_resources": {"GPU": 1}},
    "names-memory": {"entrypoint": "true", "entrypoint_resources": {"memory": 1}},
    "too-fine": {"entrypoint": "true", "entrypoint_resources": {"a": 0.00001}},
    "too-fine-cpus": {"entrypoint": "true", "entrypoint_num_cpus": 0.00001},
    "part-of-GPUs": {"entrypoint": "true", "entrypoint_num_gpus": 1.5},
}
# What no node has: Ray says so much while it waits; ours adds its place, or what is missing.
WAITING = {
    "cpus": {"entrypoint_num_cpus": 1000}, "gpus": {"entrypoint_num_gpus": 1000},
    "memory": {"entrypoint_memory": 1 << 50}, "resources": {"entrypoint_resources": {"none": 1}},
    "a label": {"entrypoint_label_selector": {"no": "where"}},
    "cpus, env": {"entrypoint_num_cpus": 1000, "runtime_env": {"env_vars": {"A": "b"}}},
    "cpus, empty env": {"entrypoint_num_cpus": 1000, "runtime_env": {}},
}
OWN_WORDS = ("env-number", "env-text")
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")


def state(port, job, until, timeout=150):
    deadline = time.monotonic() + timeout
    while True:
        text = request(port, "GET", f"/api/jobs/{job}")[2]
        if json.loads(text)["status"] in until:
            return text
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job}: {text}")
        time.sleep(0.05)


def gone(port, job):
    """Ray's supervisor of a job outlives its terminal state by a moment, in which a stop still finds it."""
    deadline = time.monotonic() + 60
    while json.loads(request(port, "POST", f"/api/jobs/{job}/stop")[2])["stopped"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job}: its supervisor does not go")
        time.sleep(0.05)


def life(port, is_over=lambda port, job: None):
    """What jobs look like in their states, and what can be done with them then; is_over waits for what
    may still come of a job whose state is terminal."""
    out = {}

    def note(name, method, path, count=words, body=None, headers=AUTH):
        status, kind, text, _ = request(port, method, path, body, headers)
        out[name] = (status, kind, count(text) if status == 200 else words(text))

    for job, body in JOBS.items():
        note(f"submit {job}", "POST", "/api/jobs/", exact_json, {**body, "submission_id": job})
    state(port, "stopped", ("RUNNING",))
    note("running", "GET", "/api/jobs/stopped", details)
    note("delete running", "DELETE", "/api/jobs/stopped")
    note("stop", "POST", "/api/jobs/stopped/stop", exact_json)
    for job in JOBS:
        state(port, job, TERMINAL)
        note(f"{job} at its end", "GET", f"/api/jobs/{job}", fate if job in OWN_WORDS else details)
        is_over(port, job)
        note(f"{job}: stop again", "POST", f"/api/jobs/{job}/stop", exact_json)
    for job in OWN_WORDS:
        note(f"{job}: why", "GET", f"/api/jobs/{job}", lambda t: json.loads(t)["message"])
    note("duplicate", "POST", "/api/jobs/", body={"entrypoint": "true", "submission_id": "ok"})
    note("logs", "GET", "/api/jobs/ok/logs", 
         # Their supervisor's line may come after the first of the driver.
         lambda t: sorted(json.loads(t)["logs"].splitlines()[-2:]))
    note("redacted", "GET", "/api/jobs/ok", details, headers={**AUTH, **MOZILLA})
    note("tail without an upgrade", "GET", "/api/jobs/ok/logs/tail")
    note("the list", "GET", "/api/jobs/", lambda t: sorted(
        j["submission_id"] for j in json.loads(t) if j["submission_id"] in JOBS))
    note("the list for a browser", "GET", "/api/jobs/", lambda t: [
        j["runtime_env"] for j in json.loads(t) if j["submission_id"] == "ok"],
        headers={**AUTH, **MOZILLA})
    note("delete", "DELETE", "/api/jobs/ok", exact_json)
    note("delete again", "DELETE", "/api/jobs/ok")
    for name, asks in WAITING.items():
        job = f"waits: {name}"
        note(job, "POST", "/api/jobs/", exact_json,
             {"entrypoint": "true", "submission_id": job, **asks})
        note(f"{job}, in words", "GET", "/api/jobs/" + urllib.parse.quote(job), waiting)
    return out


def answers(port, **more):
    out = {}
    for name, method, path, body, headers, count in table():
        status, kind, text, cookie = request(port, method, path, body, headers)
        out[name] = (status, kind, count(text) if status == 200 else words(text),
                     cookie and re.sub(r"expires=[^;]*; ", "", cookie))
    out.update(life(port, **more))
    return out


def main():
    port = free_port()
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    args = ["--include-dashboard=true", f"--dashboard-port={port}", "--dashboard-host=127.0.0.1"]
    with HeadProcess(sys.argv[1], token=TOKEN) as head:
        with RayHead(env=env, args=args):
            theirs = answers(port, is_over=gone)
        try:
            ours = answers(head.http_port)
        except BaseException:
            print(head.log_text()[-4000:])
            raise
    for name, expected in theirs.items():
        if name in DIFFERS:
            check.true(f"{name} (differs: {DIFFERS[name]})", ours[name] != expected,
                       f"it no longer does: {expected}")
        else:
            check.equal(name, ours[name], expected)
    check.equal("the same rows", list(ours), list(theirs))
    return check.status()


if __name__ == "__main__":
    sys.exit(main())
