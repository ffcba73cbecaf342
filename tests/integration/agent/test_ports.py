"""Agents whose ports somebody else has taken while they were down, and the port of --metrics-export-port:
test_ports.py BIN_DIR"""

import contextlib
import pathlib
import socket
import sys
import time
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ports import free_port  # noqa: E402

TOKEN = "0123456789abcdef0123456789abcdef"

WAIT_S = 3.0  # how long an agent waits for its ports
BACK_S = 5.0  # by then it is back: a head bears 7 s, up to 2 s of which were over when it died


WAITS = "waiting for the ports of the former agent"
GOES_ON = "the port of the former agent is taken"


def ephemeral():
    low, high = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(low), int(high) + 1)


def case_automatic_ports(s, head, node):
    """None of them is one that an outgoing connection may get."""
    ports = [head.info["grpc_port"], head.info["http_port"], head.info["dashboard_port"],
             int(head.info["gcs_address"].split(":")[1]), node.info["grpc_port"],
             node.info["http_port"]]
    assert len(set(ports)) == 6, ports
    assert not [p for p in ports if p in ephemeral()], (ports, ephemeral())


def running_gang(s, gcs, node):
    pg = gcs.create_group([{"mobula_gpu": 3}])
    group = gcs.wait_created(pg)
    assert group.bundles[0].node_id.hex() == node.info["node_id"], "only it has three"
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"])
    pids = list(d.expect("launched").pids)
    d.close()
    return pg, pids


def still_runs(s, gcs, node, pg, pids):
    """The gang goes on, and what the head says to the node reaches it."""
    d = cluster.Driver(s, node.grpc_address(), pg)
    assert d.expect("hello_reply").running
    assert list(d.expect("launched").pids) == pids
    gcs.remove_group(pg)
    assert "group was removed" in d.expect("failure").text
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")
    d.close()


def case_lent_for_a_moment(s, gcs, node):
    pg, pids = running_gang(s, gcs, node)
    before = node.info
    waits = node.log().count(WAITS)
    with cluster.agent_is_down(node) as killed:
        other = cluster.taken(before["grpc_port"])
    cluster.wait_for("the wait", lambda: node.log().count(WAITS) > waits)
    other.close()
    node.wait_alive(other_than_pid=killed)
    assert node.info["node_id"] == before["node_id"]
    assert node.info["grpc_port"] == before["grpc_port"]
    still_runs(s, gcs, node, pg, pids)


def case_lost_for_good(s, gcs, node):
    """The node moves to another port and is the same node, with its gang."""
    pg, pids = running_gang(s, gcs, node)
    before = node.info
    with cluster.agent_is_down(node) as killed:
        others = [cluster.taken(before["grpc_port"]), cluster.taken(before["http_port"])]
        began = time.monotonic()
    node.wait_alive(other_than_pid=killed)
    took_s = time.monotonic() - began
    assert took_s < BACK_S, f"another port after {took_s:.2f} s"
    print(f"     back at another port after {took_s:.2f} s", flush=True)
    assert node.info["node_id"] == before["node_id"], node.log()
    assert node.info["grpc_port"] != before["grpc_port"]
    seen = gcs.nodes()[node.info["node_id"]]
    assert seen.node_manager_port == node.info["grpc_port"], seen
    assert seen.metrics_export_port == node.info["http_port"], seen
    assert seen.dashboard_agent_listen_port == node.info["http_port"], seen
    assert gcs.group(pg).bundles[0].node_id.hex() == before["node_id"]
    still_runs(s, gcs, node, pg, pids)
    for other in others:
        other.close()
    # Where it is now is what a further restart, and one of the head, know.
    moved = node.info
    killed = node.kill_agent()
    node.wait_alive(other_than_pid=killed)
    assert (node.info["node_id"], node.info["grpc_port"]) == (moved["node_id"], moved["grpc_port"])


def case_head_remembers_the_move(s, gcs, head, node):
    killed = head.kill_agent()
    head.wait_alive(other_than_pid=killed)
    cluster.wait_for("both nodes", lambda: set(gcs.alive()) == {head.info["node_id"],
                                                               node.info["node_id"]})
    assert gcs.nodes()[node.info["node_id"]].node_manager_port == node.info["grpc_port"]
    pg, pids = running_gang(s, gcs, node)
    still_runs(s, gcs, node, pg, pids)


def case_head(s, gcs, head, node):
    """A head is known by its ports: it waits for them, and its process does if that was not
    enough."""
    for port, n_waits in (("gcs", 1), ("dashboard", 1), ("gcs", 2)):
        before, waits = head.info, head.log().count(WAITS)
        number = int(before["gcs_address"].split(":")[1]) if port == "gcs" \
            else before["dashboard_port"]
        with cluster.agent_is_down(head) as killed:
            other = cluster.taken(number)
        cluster.wait_for("the wait", lambda: head.log().count(WAITS) >= waits + n_waits)
        other.close()
        head.wait_alive(other_than_pid=killed)
        for key in ("gcs_address", "dashboard_port", "node_id", "grpc_port"):
            assert head.info[key] == before[key], (key, before[key], head.info[key])
        cluster.wait_for("both nodes", lambda: set(gcs.alive()) == {head.info["node_id"],
                                                                   node.info["node_id"]})


def fetch(port, path, token=None):
    """Status and text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}",
                                     headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def families(text):
    return sorted(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))


def case_metrics_port(s, address):
    """What Ray's nodes have, too: /metrics and nothing else, also after a crash; the node's own port has it anyway."""
    port = free_port()
    flags = ["--address", address, "--dashboard-agent-listen-port", "0", "--num-gpus", "0", "--metrics-export-port", str(port)]
    with cluster.taken(port):
        node = s.node(sys.argv[1], *flags)
        node.wait_alive()
        assert f"--metrics-export-port is taken: /metrics is served at port={node.info['http_port']} only" in node.log()
        assert fetch(node.info["http_port"], "/metrics")[0] == 200
    for _ in range(2):
        killed = node.kill_agent()
        node.wait_alive(other_than_pid=killed)
        (status, there), (_, own) = fetch(port, "/metrics"), fetch(node.info["http_port"], "/metrics")
        assert status == 200 and "mobula_node_up" in families(there) and families(there) == families(own), there
        assert fetch(port, "/api/mobula/node")[0] == fetch(port, "/")[0] == 404
    assert node.stop() == 0


def case_metrics_port_with_a_token(s):
    port = free_port()
    node = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0", "--dashboard-agent-listen-port", "0",
                  "--num-gpus", "0", "--metrics-export-port", str(port),
                  env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})
    node.wait_alive()
    assert [fetch(port, "/metrics", token)[0] for token in (None, "f" * 32, TOKEN)] == [401, 403, 200]
    assert node.stop() == 0


FEW = 256  # descriptors


def case_out_of_descriptors(s, address):
    """Callers who say nothing take all that a node has. It takes connections again when they have gone, and is
    the node that it was, with its gang."""
    node = s.node(sys.argv[1], "--address", address, "--dashboard-agent-listen-port", "0", "--num-gpus", "4",
                  inside=["prlimit", f"--nofile={FEW}:{FEW}"])
    node.wait_alive()
    before, gcs = node.info, cluster.Gcs(s, address)
    pg = gcs.create_group([{"mobula_gpu": 4}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg, lease_ms=600000)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"])
    pids = list(d.expect("launched").pids)
    with contextlib.ExitStack() as silent:
        for _ in range(2 * FEW):
            silent.enter_context(socket.create_connection((before["node_ip"], before["grpc_port"])))
        cluster.wait_for("nothing is left", lambda: "takes none any more" in node.log())
    d.close()
    cluster.wait_for("another agent", lambda: "starting anew, to take connections" in node.log())
    node.wait_alive(other_than_pid=before["pid_agent"])
    assert (node.info["node_id"], node.info["grpc_port"]) == (before["node_id"], before["grpc_port"]), node.log()
    still_runs(s, gcs, node, pg, pids)
    assert node.stop() == 0


def case_stop_while_waiting(s, node):
    """Who ends a node whose agent waits for its port does not wait with it."""
    waits, went_on = node.log().count(WAITS), node.log().count(GOES_ON)
    with cluster.agent_is_down(node):
        other = cluster.taken(node.info["grpc_port"])
    cluster.wait_for("the wait", lambda: node.log().count(WAITS) > waits)
    began = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - began < WAIT_S - 1 or node.log().count(GOES_ON) == went_on, "it waited for the port first"
    other.close()


def main():
    with cluster.Sandbox() as s:
        head = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0",
                      "--dashboard-agent-listen-port", "0", "--num-gpus", "1")
        address = head.wait_alive()["gcs_address"]
        node = s.node(sys.argv[1], "--address", address, "--dashboard-agent-listen-port", "0",
                      "--num-gpus", "3")
        node.wait_alive()
        gcs = cluster.Gcs(s, address)
        for case, arguments in ((case_automatic_ports, (s, head, node)),
                                (case_lent_for_a_moment, (s, gcs, node)),
                                (case_lost_for_good, (s, gcs, node)),
                                (case_head_remembers_the_move, (s, gcs, head, node)),
                                (case_head, (s, gcs, head, node)),
                                (case_metrics_port, (s, address)),
                                (case_out_of_descriptors, (s, address)),
                                (case_metrics_port_with_a_token, (s,)),
                                (case_stop_while_waiting, (s, node))):
            case(*arguments)
            print(f"ok   {case.__name__}", flush=True)
        assert head.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
