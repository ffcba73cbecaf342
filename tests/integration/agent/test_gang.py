"""Gangs on agents below an embedded head, driven with plain grpcio: test_gang.py BIN_DIR"""

import os
import pathlib
import re
import signal
import socket
import sys
import time

import cluster

HERE = pathlib.Path(__file__).resolve().parent


def case_environment_and_logs(s, gcs, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg)
    reply = d.expect("hello_reply")
    assert reply.node_ip == "127.0.0.1" and reply.rendezvous_port > 0 and not reply.running
    d.launch(["/bin/sh", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK '
              '$MASTER_PORT [$CUDA_VISIBLE_DEVICES] $OWN"; seq 1 20000; printf "no line end"'],
             ranks=(0, 1), env=["MASTER_PORT=77", "OWN=x y"])
    assert len(d.expect("launched").pids) == 2
    exits = sorted((d.expect("rank_exit") for _ in range(2)), key=lambda e: e.rank)
    assert [(e.rank, e.exit_code, e.signal) for e in exits] == [(0, 0, 0), (1, 0, 0)]
    d.send(end={})
    d.expect("ended")
    for rank in (0, 1):
        text = d.logs[rank].decode()
        assert text.startswith(f"{rank} {rank} 2 2 0 77 [] x y\n1\n2\n"), text[:80]
        assert text.endswith("\n20000\nno line end"), text[-80:]
    d.close()


def case_a_failed_rank_ends_its_peers(s, gcs, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=2)
    d.expect("hello_reply")
    deaf = os.path.join(s.dir, "deaf")  # there when rank 0 ignores SIGTERM
    d.launch(["/bin/sh", "-c", f"trap '' TERM; [ $RANK = 0 ] && : > {deaf}; "
              f"while [ ! -e {deaf} ]; do sleep 0.02; done; [ $RANK = 1 ] && exit 7; "
              "sleep 1000 & wait; wait"], ranks=(0, 1))
    d.expect("launched")
    first = d.expect("rank_exit")
    began = time.monotonic()
    assert (first.rank, first.exit_code, first.cause) == (1, 7, ""), first
    second = d.expect("rank_exit")
    took_s = time.monotonic() - began
    assert second.rank == 0 and second.signal == signal.SIGKILL, second
    assert second.cause == "ended because rank 1 failed", second
    assert took_s < 1.5, f"the peer lived for {took_s:.2f} s"
    print(f"     the peer was gone after {took_s:.2f} s", flush=True)
    d.send(stop={"reason": "test"})
    d.expect("ended")
    d.close()


def case_a_killed_rank_is_named(s, gcs, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=3)
    d.expect("hello_reply")
    d.launch(["sleep", "1000"], ranks=(0, 1))
    pids = d.expect("launched").pids
    os.kill(pids[0], signal.SIGKILL)
    e = d.expect("rank_exit")
    assert (e.rank, e.pid, e.exit_code, e.signal) == (0, pids[0], 137, 9), e
    d.expect("rank_exit")
    d.send(end={})
    d.expect("ended")
    d.close()


def case_refusals(s, gcs, node, pg):
    import grpc

    d = cluster.Driver(s, node.grpc_address(), os.urandom(18))
    assert d.expect("error").code() == grpc.StatusCode.FAILED_PRECONDITION
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=1)
    e = d.expect("error")
    assert e.code() == grpc.StatusCode.FAILED_PRECONDITION and "older than attempt 3" in e.details(), e
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=4)
    d.expect("hello_reply")
    d.launch(["true"], bundle=9)
    assert "bundle 9 is not committed" in d.expect("failure").text
    d.send(end={})
    d.expect("ended")
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=5)
    d.expect("hello_reply")
    d.launch(["/no/such/program"])
    d.expect("launched")
    e = d.expect("rank_exit")
    assert e.exit_code == 127 and "/no/such/program" in e.cause, e
    d.send(end={})
    d.expect("ended")


def case_redial_and_lease(s, gcs, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=6)
    port = d.expect("hello_reply").rendezvous_port
    d.launch(["/bin/sh", "-c", "trap 'echo bye; exit 3' TERM; echo one; sleep 1000 & wait"])
    pids = list(d.expect("launched").pids)
    d.hears(b"one\n")
    d.close()
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=6, lease_ms=1000)
    reply = d.expect("hello_reply")
    assert reply.running and reply.rendezvous_port == port, (reply, port)
    assert list(d.expect("launched").pids) == pids
    assert "lease" in d.expect("failure").text  # nobody renews: SIGTERM
    e = d.expect("rank_exit")
    assert e.exit_code == 3, e
    d.expect("ended")
    assert d.logs[0] == b"one\nbye\n", d.logs


def case_agent_killed(s, gcs, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=7)
    port = d.expect("hello_reply").rendezvous_port
    go = pathlib.Path(s.dir, "go")
    d.launch(["/bin/sh", "-c", f"echo before; while [ ! -e {go} ]; do sleep 0.05; done; "
              "echo after; exit 5"])
    pids = list(d.expect("launched").pids)
    node_id = node.info["node_id"]
    killed = node.kill_agent()
    node.wait_alive(other_than_pid=killed)
    assert node.info["node_id"] == node_id, "it did not resume its id"
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=6)
    assert "older than attempt 7" in d.expect("error").details(), "the fence was not on disk"
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=7)
    reply = d.expect("hello_reply")
    assert reply.running and reply.rendezvous_port == port, (reply, port)
    assert list(d.expect("launched").pids) == pids
    go.touch()
    e = d.expect("rank_exit")
    assert (e.exit_code, e.pid) == (5, pids[0]), e
    d.send(end={})
    d.expect("ended")
    assert d.logs[0] == b"before\nafter\n", d.logs


def case_agent_killed_while_starting(s, gcs, node, pg):
    """It noted RUNNING and died before it told the rank: the driver's next Start gets there."""
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    launch = {"world_size": 1, "num_nodes": 1, "is_worker": True, "stop_grace_ms": 5000,
              "ranks": [{}], "argv": [sys.executable, str(HERE / "worker.py"), s.dir, "1", "0"]}
    d.send(launch=launch)
    d.expect("launched")
    d.expect("endpoint")
    noted = pathlib.Path(node.dir, "gangs", f"{pg.hex()[:8]}-1", "gang.json")
    cluster.wait_for("what it notes", lambda: '"state": "RENDEZVOUS"' in noted.read_text())
    with cluster.agent_is_down(node) as killed:
        noted.write_text(noted.read_text().replace('"RENDEZVOUS"', '"RUNNING"'))
    node.wait_alive(other_than_pid=killed)
    d = cluster.Driver(s, node.grpc_address(), pg)
    assert d.expect("hello_reply").running
    d.expect("launched")
    d.send(start={"endpoints": ["rank-0:4711"]})
    d.hears(b"endpoints")
    d.send(stop={"reason": "enough"})
    d.expect("rank_exit")
    d.send(end={})
    d.expect("ended")
    gcs.remove_group(pg)


def case_killed_while_it_stops(s, gcs, node, pg):
    """Its peer's end may be heard of first: that a rank was killed is still no stop of ours."""
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    ready = pathlib.Path(s.dir, "ready")
    d.launch(["/bin/sh", "-c", f"trap '' TERM; : > {ready}; while :; do sleep 1; done"],
             grace_ms=50000)
    pids = d.expect("launched").pids
    cluster.wait_for("the trap", ready.exists)
    d.send(stop={"reason": "test"})
    cluster.wait_for("STOPPING", lambda: "STOPPING" in [g["state"] for g in node.state()["gangs"]])
    os.kill(pids[0], signal.SIGKILL)
    e = d.expect("rank_exit", deadline_s=20)
    assert (e.exit_code, e.signal, e.cause) == (137, 9, ""), e
    d.expect("ended")
    gcs.remove_group(pg)
    d.close()


def case_group_removed(s, gcs, node, pg):
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=8)
    d.expect("hello_reply")
    d.launch(cluster.FOR_EVER)
    d.expect("launched")
    assert node.state()["resources_available"]["mobula_slot"] == 2
    gcs.remove_group(pg)
    assert "group was removed" in d.expect("failure").text
    d.expect("rank_exit")
    d.expect("ended")
    cluster.wait_for("units given back",
                     lambda: node.state()["resources_available"]["mobula_slot"] == 4)
    d = cluster.Driver(s, node.grpc_address(), pg, attempt=9)
    d.expect("error")


def case_a_report_larger_than_its_socket(s, gcs, node, pg):
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.send(launch={"world_size": 1, "num_nodes": 1, "is_worker": True, "stop_grace_ms": 5000,
                   "ranks": [{}], "argv": [sys.executable, str(HERE / "worker.py"), s.dir, "1",
                                           "5000"]})
    d.expect("launched")
    d.send(start={"endpoints": [d.expect("endpoint").endpoint]})
    assert d.expect("saved").bytes == 5000 * 400 * len("rank 0 ")
    d.send(stop={"reason": "enough"})
    d.expect("rank_exit")
    d.expect("ended")
    gcs.remove_group(pg)


def case_a_driver_that_does_not_read(s, gcs, node, pg):
    """The agent's memory stays bounded, and nothing of the log is lost."""
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.gate.clear()
    d.launch(["/bin/sh", "-c", "seq 1 4000000"])
    log = next(pathlib.Path(node.dir, "gangs").glob(f"{pg.hex()[:8]}-1")) / "rank-0.log"
    size = 30888896
    with d.renewing():
        cluster.wait_for("the whole log", lambda: log.exists() and log.stat().st_size == size)
        rss = float(re.search(r"^process_resident_memory_bytes (\d+)", node.http("/metrics"),
                              re.M).group(1))
        assert rss < 200e6, rss
        d.gate.set()
        d.expect("launched")
        d.expect("rank_exit")
    d.send(end={})
    d.expect("ended")
    assert len(d.logs[0]) == size and d.logs[0].endswith(b"\n4000000\n"), len(d.logs[0])
    gcs.remove_group(pg)


def case_end_with_a_gang(s, gcs, node, pg):
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(["/bin/sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; sleep 1000 & wait"])
    pid = d.expect("launched").pids[0]
    d.hears(b"up\n")
    node.process.terminate()
    assert "node is stopping" in d.expect("failure").text, "its ranks end with 0 as if all were done"
    d.expect("rank_exit")
    d.send(end={})  # other nodes may have sealed what this one has to send
    d.expect("ended")
    assert d.logs[0] == b"up\nsaved\n"
    assert node.process.wait(cluster.DEADLINE_S) == 0
    assert not pathlib.Path(f"/proc/{pid}").exists()
    assert node.file()["state"] == "ENDED"


def case_port_in_use(s, bin_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node = s.node(bin_dir, "--head", "--port", str(port), "--dashboard-port", "0")
        assert node.process.wait(cluster.DEADLINE_S) == 72, node.log()
    assert str(port) in node.file()["error"], node.file()
    assert node.file()["state"] == "FAILED"


def case_metrics(s, gcs, node, pg):
    text = node.http("/metrics")
    assert re.search(r'^mobula_node_up 1$', text, re.M)
    assert re.search(r'^mobula_resource_total\{resource="mobula_slot"\} 4$', text, re.M), text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{.*\})? [-+0-9.e]+', line), line
    assert node.http("/api/healthz") == "success"

    def requests():
        return int(re.search(r"^mobula_grpc_requests_total (\d+)$", node.http("/metrics"), re.M)[1])

    before = requests()
    for _ in range(100):
        gcs.nodes()
    assert 100 <= requests() - before < 150


def case_front_process_lost_while_launching(s, bin_dir):
    """No rank has begun, so there is nothing to wait for: the driver hears the end at once."""
    node = s.node(bin_dir, "--head", "--port", "0", "--dashboard-port", "0")
    info = node.wait_alive()
    gcs = cluster.Gcs(s, info["gcs_address"])
    pg = gcs.create_group([{"mobula_slot": 1}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    node.process.send_signal(signal.SIGSTOP)
    d.launch(["sleep", "1000"])
    cluster.wait_for("the launch", lambda: list(pathlib.Path(node.dir, "gangs").glob("*/spec")))
    node.process.kill()
    assert "mobula-init is gone" in d.expect("failure").text
    d.expect("ended")
    cluster.wait_for("the agent's end", lambda: not node.is_there(info["pid_agent"]))


def main():
    with cluster.Sandbox() as s:
        # Four devices that do not exist: their numbers are only handed out.
        node = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0",
                      "--num-gpus", "4")
        info = node.wait_alive()
        gcs = cluster.Gcs(s, info["gcs_address"])
        pg = gcs.create_group([{"mobula_slot": 2}])
        gcs.wait_created(pg)
        for case in (case_environment_and_logs, case_a_failed_rank_ends_its_peers,
                     case_a_killed_rank_is_named, case_refusals, case_redial_and_lease,
                     case_agent_killed, case_agent_killed_while_starting,
                     case_killed_while_it_stops, case_group_removed, case_metrics,
                     case_a_report_larger_than_its_socket, case_a_driver_that_does_not_read,
                     case_end_with_a_gang):
            case(s, gcs, node, pg)
            print(f"ok   {case.__name__[5:]}", flush=True)
        case_port_in_use(s, sys.argv[1])
        print("ok   port_in_use", flush=True)
        case_front_process_lost_while_launching(s, sys.argv[1])
        print("ok   front_process_lost_while_launching", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
