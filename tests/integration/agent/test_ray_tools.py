"""What Ray's own tools do with our node on a real Ray head: test_ray_tools.py BIN_DIR"""

import http.client as http_client
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
import grpc  # noqa: E402
import listening  # noqa: E402
from commands import RAY, call, clean_env  # noqa: E402
from ports import free_port  # noqa: E402
from ray_head import RayHead, ray_version  # noqa: E402

BIN = sys.argv[1]
DRAIN_S = 8
IS_MODERN = ray_version() >= (2, 60)

# A task and an actor that ask for what only our node has.
ASKS_FOR_OURS = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0, resources={"mobula_gpu": 1})
def task():
    return 1

@ray.remote(num_cpus=0, resources={"mobula_gpu": 1})
class Actor:
    def ping(self):
        return 1

kept = []

def ping():
    kept.append(Actor.remote())
    return kept[-1].ping.remote()

since = time.monotonic()
for what, ask in (("task", task.remote), ("actor", ping)):
    try:
        print(what, "ran:", ray.get(ask(), timeout=30))
    except Exception as e:
        print(what, type(e).__name__, str(e).replace("\\n", " "))
print("seconds", time.monotonic() - since)
"""

# Some that ask for nothing, so that Ray may take any node for them; then for our node by its id.
ASKS_FOR_NOTHING = """
import json, sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
def place():
    return ray.get_runtime_context().get_node_id()

@ray.remote(num_cpus=0)
class Actor:
    def place(self):
        return ray.get_runtime_context().get_node_id()

def task(**options):
    return ray.get(place.options(**options).remote(), timeout=200)

def actor(**options):
    a = Actor.options(**options).remote()
    try:
        return ray.get(a.place.remote(), timeout=200)
    finally:
        ray.kill(a)

places = []
for what in task, actor:
    for strategy in None, "SPREAD":
        since = time.monotonic()
        places += [what(scheduling_strategy=strategy) for _ in range(4)]
        print(what.__name__, strategy, round(time.monotonic() - since, 2), "s")
for what in task, actor:
    try:
        places.append(what(scheduling_strategy=NodeAffinitySchedulingStrategy(sys.argv[2], soft=False)))
    except Exception as e:
        print(what.__name__, type(e).__name__, str(e).replace("\\n", " "))
print("places", json.dumps(places))
"""

# In a placement group whose bundle is here, which no driver of ours speaks for.
IN_A_GROUP = """
import sys, time, ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)
group = placement_group([{"mobula_gpu": 1}, {"mobula_gpu": 1}])
assert group.wait(200)

@ray.remote(num_cpus=0)
def task():
    return 1

@ray.remote(num_cpus=0)
class Actor:
    def ping(self):
        return 1

kept = []

def ping(options):
    kept.append(Actor.options(**options).remote())
    return kept[-1].ping.remote()

for index in -1, 0, 1:
    for resources in {}, {"mobula_gpu": 1}:
        options = {"resources": resources, "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index)}
        for what, ask in (("task", task.options(**options).remote),
                          ("actor", lambda: ping(options))):
            since = time.monotonic()
            try:
                print(what, "ran:", ray.get(ask(), timeout=30))
            except Exception as e:
                print(what, round(time.monotonic() - since, 1), type(e).__name__, str(e).replace("\\n", " "))
print("asked", flush=True)
sys.stdin.read()
remove_placement_group(group)
"""

# What a driver of Ray's sees of the cluster.
SEES = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("seen", json.dumps([ray.nodes(), ray.cluster_resources(), ray.available_resources()]))
"""


def ray(*words, **env):
    return call(clean_env(**env), RAY, *words)


def http_json(url):
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.loads(reply.read())


def case_lists(s, head, http, gcs, node):
    node_id = node.info["node_id"]

    def shown():  # the dashboard begins after its head, and hears of a node after it
        try:
            rows = http_json(f"{http}/nodes?view=summary")["data"]["summary"]
        except (OSError, http_client.HTTPException):
            return None
        rows = [r for r in rows if r["raylet"]["nodeId"] == node_id]
        return rows if rows and rows[0]["raylet"].get("resourcesTotal") else None

    ours = cluster.wait_for("the node in the dashboard", shown)
    code, text = ray("list", "nodes", "--address", head.address)
    assert code == 0 and node_id in text and text.count("ALIVE") >= 2, text
    assert len(ours) == 1 and ours[0]["raylet"]["state"] == "ALIVE" and \
        ours[0]["raylet"]["resourcesTotal"].get("mobulaGpu" if IS_MODERN else "mobula_gpu") == 2.0, ours


def seen_by_a_driver(head):
    code, text = call(clean_env(), sys.executable, "-c", SEES, head.address)
    assert code == 0, text
    return said(text, "seen ")


def said(text, word):
    """What stands in JSON behind the word; Ray may say more afterwards."""
    return json.JSONDecoder().raw_decode(text.rsplit(word, 1)[1])[0]


def status_says(head, words):
    """The head's autoscaler reports every 5 s."""
    cluster.wait_for(f"{words} in `ray status`",
                     lambda: words in ray("status", "--address", head.address)[1], 120)


def dashboard_says(http, node, words):
    """Its column of what is used on each node."""
    def used():
        data = http_json(f"{http}/nodes?view=summary")["data"]
        return data.get("nodeLogicalResources", {}).get(node.info["node_id"], "")

    cluster.wait_for(f"{words} in the dashboard", lambda: words in used(), 120)


def case_usage(s, head, http, gcs, node):
    """A reservation is seen everywhere, and so is its end."""
    total = {"mobula_gpu": 2.0, "mobula_slot": 2.0, "mobula_driver": 64.0}
    pg = gcs.create_group([{"mobula_gpu": 1, "mobula_slot": 1}])
    gcs.wait_created(pg)
    status_says(head, "1.0/2.0 mobula_gpu")
    rows, everything, free = seen_by_a_driver(head)
    (ours,) = (r for r in rows if r["NodeID"] == node.info["node_id"])
    assert ours["Alive"] and ours["Resources"] == total and \
        ours["Labels"]["ray.io/node-id"] == node.info["node_id"], ours
    assert everything["mobula_gpu"] == 2.0 and (free["mobula_gpu"], free["mobula_slot"]) == \
        (1.0, 1.0), (everything, free)
    dashboard_says(http, node, "1.0/2.0 mobula_gpu")
    gcs.remove_group(pg)
    status_says(head, "0.0/2.0 mobula_gpu")
    dashboard_says(http, node, "0.0/2.0 mobula_gpu")
    assert seen_by_a_driver(head)[2]["mobula_gpu"] == 2.0


def follows(head, node_id, name, path):
    """What is written while `ray logs --follow` runs comes too."""
    process = subprocess.Popen(
        [RAY, "logs", "cluster", name, "--address", head.address, "--node-id", node_id, "--tail", "1",
         "--follow"], env=clean_env(PYTHONUNBUFFERED="1"), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    killer = threading.Timer(cluster.DEADLINE_S, process.kill)
    killer.start()
    seen = b""
    try:
        for written in "", "line 2000\n", "line 2001\n":
            with path.open("a") as log:
                log.write(written)
            last = (written or "line 1999\n").encode()
            while last not in seen and (part := os.read(process.stdout.fileno(), 65536)):
                seen += part
            assert last in seen, seen
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    assert seen.count(b"line 2000\n") == 1, seen


def case_logs(s, head, http, gcs, node):
    """ray logs cluster: the names, one file, its last lines, what is written to it."""
    name = "logs/job-driver-test-1.log"
    path = pathlib.Path(node.dir, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"line {i}\n" for i in range(2000)))
    node_id = node.info["node_id"]
    code, text = ray("logs", "cluster", "--address", head.address, "--node-id", node_id)
    assert code == 0 and name in text, text
    code, text = ray("logs", "cluster", name, "--address", head.address, "--node-id", node_id,
                     "--tail", "3")
    assert code == 0 and text.endswith("line 1997\nline 1998\nline 1999\n"), text
    follows(head, node_id, name, path)
    code, text = ray("logs", "cluster", "nothing.log", "--address", head.address, "--node-id",
                     node_id)
    assert "line " not in text, text


def case_service_discovery(s, head, http, gcs, node):
    """Prometheus is told of our /metrics by Ray's file."""
    target = f"{node.info['node_ip']}:{node.info['http_port']}"

    def is_listed():
        for directory, _, names in os.walk(head.temp_dir):  # in which Ray makes and removes directories meanwhile
            name = "prom_metrics_service_discovery.json"
            if name in names and target in pathlib.Path(directory, name).read_text():
                return True

    cluster.wait_for("the target of Prometheus", is_listed)
    assert "mobula_node_up 1" in node.http("/metrics")


def case_tasks_and_actors_are_refused(s, head, http, gcs, node):
    """At once, with a text that says why."""
    _, text = call(clean_env(), sys.executable, "-c", ASKS_FOR_OURS, head.address)
    assert "task TaskUnschedulableError" in text and "actor ActorUnschedulableError" in text, text
    assert text.count("mobula") >= 2, text
    seconds = said(text, "seconds ")
    assert seconds < 10, text


def case_in_a_group_they_are_refused(s, head, http, gcs, node):
    """Ray finds no node for them, and says nothing, where it is not told of the bundle's own rows; what is
    held stands as used in its tools all the same, and nothing of it is left."""
    def rows():
        reply = gcs.call("NodeResourceInfoGcsService/GetAllTotalResources", "GetAllTotalResourcesRequest")
        return [name for entry in reply.resources_list for name in entry.resources_total if "_group_" in name]

    process = subprocess.Popen([sys.executable, "-c", IN_A_GROUP, head.address], env=clean_env(), text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    killer = threading.Timer(2 * cluster.DEADLINE_S, process.kill)
    killer.start()
    said = []
    try:
        while said[-1:] != ["asked\n"] and (line := process.stdout.readline()):
            said.append(line)
        said = [line for line in said if line.startswith(("task ", "actor "))]
        assert len(said) == 12 and all("this is a mobula node" in line and "UnschedulableError" in line
                                       for line in said), said
        took = [float(line.split()[1]) for line in said]
        print(f"     the slowest was refused after {max(took)} s", flush=True)
        assert max(took) < 10, said
        assert rows()
        status_says(head, "2.0/2.0 mobula_gpu")
        process.communicate("")
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    cluster.wait_for("no rows", lambda: not rows())
    status_says(head, "0.0/2.0 mobula_gpu")


def case_what_asks_for_nothing_runs_elsewhere(s, head, http, gcs, node):
    """Ray sends half of it here: it is none of ours, and runs on Ray's node. Who wants this node is
    refused all the same."""
    code, text = call(clean_env(), sys.executable, "-c", ASKS_FOR_NOTHING, head.address,
                      node.info["node_id"])
    assert code == 0, text
    (rays,) = set(gcs.alive()) - {node.info["node_id"]}
    places = said(text, "places ")
    assert places == [rays] * 16, text
    assert "task TaskUnschedulableError" in text and "actor ActorUnschedulableError" in text, text
    assert text.count("this is a mobula node") >= 2, text
    for line in text.splitlines():
        if line.endswith(" s"):
            print(f"     {line}", flush=True)


def case_drain(s, head, http, gcs, node):
    """Not for idleness while a gang is here; for preemption the gang ends first."""
    pg = gcs.create_group([{"mobula_gpu": 2, "mobula_slot": 2}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; sleep 1000 & wait"],
             ranks=(0, 1))
    d.expect("launched")
    d.hears(b"up\n", 0, 1)
    words = ["drain-node", "--address", head.address, "--node-id", node.info["node_id"],
             "--reason-message", "a test", "--deadline-remaining-seconds", "60"]
    with d.renewing():
        code, text = ray(*words, "--reason", "DRAIN_NODE_REASON_IDLE_TERMINATION")
        assert code != 0 and "bundles are held" in text, text
        code, text = ray(*words, "--reason", "DRAIN_NODE_REASON_PREEMPTION")
    since = time.monotonic()  # Ray's command itself takes long on a busy machine
    assert code == 0, text
    assert "drained" in d.expect("failure").text
    for _ in range(2):
        d.expect("rank_exit")
    d.send(end={})  # or the node would wait for its driver as long as its lease is
    d.expect("ended")
    assert d.logs[0] == b"up\nsaved\n", d.logs
    d.close()
    assert node.process.wait(cluster.DEADLINE_S) == 0
    n = gcs.nodes()[node.info["node_id"]]
    assert n.state == 1 and n.death_info.reason == 3, n  # AUTOSCALER_DRAIN_PREEMPTED
    assert time.monotonic() - since < 30
    gcs.remove_group(pg)  # a GCS of 2.40 looks for another node for it without a pause, and for none else's


def case_drain_by_the_deadline(s, head, http, gcs, _node):
    """A rank that does not end when it is told to is killed before the deadline of the drain."""
    node = s.node(BIN, "--address", head.address, "--num-gpus", "1", "--no-token")
    node.wait_alive()
    pg = gcs.create_group([{"mobula_gpu": 1, "mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"], grace_ms=600000)
    d.expect("launched")
    d.hears(b"up\n")
    request = s.message("ray.rpc.DrainRayletRequest")(
        reason=2, reason_message="a test", deadline_timestamp_ms=int(time.time() + DRAIN_S) * 1000)
    with d.renewing(), grpc.insecure_channel(node.grpc_address()) as channel:
        since = time.monotonic()
        reply = s.unary(channel, "/ray.rpc.NodeManagerService/DrainRaylet", request)
        assert reply.is_accepted, reply
        assert "drained" in d.expect("failure").text
        ended = d.expect("rank_exit")  # at the deadline the node waits for no driver any more
    took = time.monotonic() - since
    assert ended.signal == signal.SIGKILL, ended
    assert took < 6 * DRAIN_S, took
    print(f"     a deadline of {DRAIN_S} s: the rank is gone after {took:.1f} s", flush=True)
    d.close()
    assert node.process.wait(cluster.DEADLINE_S) == 0
    n = gcs.nodes()[node.info["node_id"]]
    assert n.state == 1 and n.death_info.reason == 3, n  # AUTOSCALER_DRAIN_PREEMPTED


BROWSERS = ({"User-Agent": "Mozilla/5.0 (X11)"}, {"Referer": "http://a"}, {"Origin": "http://a"},
            {"Sec-Fetch-Mode": "cors"}, {"Sec-Fetch-Dest": "empty"}, {"Sec-Fetch-Site": "none"},
            {"Sec-Fetch-User": "?1"}, {"Access-Control-Request-Method": "POST"},
            {"Access-Control-Request-Headers": "a"})


def answer(ip, port, method, path, headers):
    connection = http_client.HTTPConnection(ip, port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def case_http_as_rays_own_agent(s, head, _http, gcs, node):
    """Without a token: where it listens, and what it says to browsers and to others."""
    if not IS_MODERN:
        return  # ours does as 2.60's
    ip, port = node.info["node_ip"], node.info["http_port"]

    def listens():  # Ray's own agent begins late on a busy machine
        addresses = listening.listens_on(head.pids()).get(head.agent_port, set())
        return addresses if len(addresses) == 2 else None

    theirs = cluster.wait_for("Ray's own agent", listens)
    ours = listening.listens_on(listening.family(node.process.pid))[port]
    assert ours == theirs == {ip, "127.0.0.1"}, (ours, theirs)
    for path in "/api/healthz", "/api/local_raylet_healthz", "/api/job_agent/jobs/x/logs", "/nothing":
        for method in "GET", "POST", "DELETE", "OPTIONS":
            for headers in BROWSERS:
                said = [answer(ip, p, method, path, headers) for p in (head.agent_port, port)]
                assert said[0] == said[1] == (403, "Browser requests not allowed."), (method, path, headers, said)
    for path in "/api/healthz", "/api/local_raylet_healthz", "/nothing":
        said = [answer(ip, p, "GET", path, {})[0] for p in (head.agent_port, port)]
        assert said[0] == said[1], (path, said)


def main():
    port = free_port()
    with cluster.Sandbox() as s, RayHead(args=["--include-dashboard=true",
                                               f"--dashboard-port={port}"]) as head:
        # ray.init of an older Ray takes a node at the machine's address for its own (docs/ray-compat.md).
        own = [] if IS_MODERN else ["--node-ip-address", "127.0.0.2"]
        node = s.node(BIN, "--address", head.address, "--num-gpus", "2", "--no-token", *own)
        node.wait_alive()
        gcs = cluster.Gcs(s, head.address)
        for case in (case_lists, case_usage, case_logs, case_service_discovery,
                     case_http_as_rays_own_agent, case_tasks_and_actors_are_refused,
                     case_in_a_group_they_are_refused, case_what_asks_for_nothing_runs_elsewhere, case_drain,
                     case_drain_by_the_deadline):
            case(s, head, f"http://127.0.0.1:{port}", gcs, node)
            print(f"ok   {case.__name__[5:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
