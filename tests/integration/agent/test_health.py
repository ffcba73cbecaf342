"""When the head takes a node for dead: test_health.py BIN_DIR

A hung agent (SIGSTOP: its connections stay, nothing answers), of long standing and of just now, is
dead within 10 s. Nodes whose gRPC port answers nobody are made here: one whose HTTP port says that
it serves is not dead for as long as that answers, one whose HTTP port is another's is.
"""

import http.server
import os
import signal
import socket
import sys
import threading
import time

import cluster

DEAD_S = 10
LIVED_S = 4  # silent for 7 s; it was heard up to 2.5 s before it hung, on a busy machine a little earlier
LIVES_S = 14  # longer than any node without a second channel


class Made:
    """A node that is there by its registration only: gRPC is a socket on which nobody answers."""

    def __init__(self, s, gcs, names_itself):
        self.id = os.urandom(28)
        self.grpc = socket.create_server(("127.0.0.1", 0))
        hex_id = self.id.hex() if names_itself else os.urandom(28).hex()

        class Health(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(503)
                self.send_header("X-Mobula-Node-Id", hex_id)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self.thread.start()
        info = s.message("ray.rpc.GcsNodeInfo")(
            node_id=self.id, node_manager_address="127.0.0.1", node_name="made",
            node_manager_port=self.grpc.getsockname()[1],
            dashboard_agent_listen_port=self.http.server_port)
        info.resources_total["mobula_slot"] = 1
        gcs.call("NodeInfoGcsService/RegisterNode", "RegisterNodeRequest", node_info=info)

    def end_http(self):
        if self.thread.is_alive():
            self.http.shutdown()
            self.thread.join()
        self.http.server_close()

    def close(self):
        self.end_http()
        self.grpc.close()


def dead_after(gcs, node_id, since, deadline_s=60):
    cluster.wait_for(f"death of {node_id[:8]}", lambda: gcs.nodes()[node_id].state == 1, deadline_s)
    return time.monotonic() - since


def case_hung(gcs, steady, s, bin_dir, address):
    fresh = s.node(bin_dir, "--address", address)
    hung = {}
    try:
        for name, node in ("just joined", fresh), ("of long standing", steady):
            info = node.wait_alive()
            hung[name] = info["node_id"], info["pid_agent"], time.monotonic()
            os.kill(info["pid_agent"], signal.SIGSTOP)
        for name, (node_id, _, since) in hung.items():
            took_s = dead_after(gcs, node_id, since)
            print(f"     hung, {name}: dead after {took_s:.1f} s", flush=True)
            assert LIVED_S < took_s < DEAD_S, (name, took_s)
            info = gcs.nodes()[node_id].death_info
            assert "missing too many heartbeats" in info.reason_message, info
    finally:
        for _, pid, _ in hung.values():
            os.kill(pid, signal.SIGCONT)
    for node in fresh, steady:
        cluster.wait_for("a new id", lambda n=node: n.wait_alive()["node_id"] in gcs.alive())


def case_second_channel(s, gcs, head):
    began = time.monotonic()
    busy, taken = Made(s, gcs, True), Made(s, gcs, False)
    try:
        took_s = dead_after(gcs, taken.id.hex(), began)
        print(f"     another answers at its port: dead after {took_s:.1f} s", flush=True)
        assert 5 < took_s < DEAD_S, took_s
        cluster.wait_for("the doubt in the log", lambda: "does not answer gRPC, but" in head.log())
        while time.monotonic() - began < LIVES_S:
            assert busy.id.hex() in gcs.alive()
            time.sleep(0.05)
        print(f"     its HTTP port answers: alive after {LIVES_S} s", flush=True)
        since = time.monotonic()
        busy.end_http()
        took_s = dead_after(gcs, busy.id.hex(), since)
        print(f"     it answers no more: dead after {took_s:.1f} s", flush=True)
        assert took_s < DEAD_S, took_s
    finally:
        busy.close()
        taken.close()


def main():
    with cluster.Sandbox() as s:
        head = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0")
        address = head.wait_alive()["gcs_address"]
        steady = s.node(sys.argv[1], "--address", address)
        steady.wait_alive()
        gcs = cluster.Gcs(s, address)
        case_second_channel(s, gcs, head)
        print("ok   second_channel", flush=True)
        case_hung(gcs, steady, s, sys.argv[1], address)
        print("ok   hung", flush=True)
        assert [n.stop() for n in reversed(s.nodes)] == [0] * len(s.nodes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
