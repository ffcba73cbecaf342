"""A node whose head is killed, or replaced by another cluster: test_membership.py BIN_DIR"""

import socket
import sys
import threading

import cluster


class Proxy:
    """To the head; what the head says is held back from the first request that names a word."""

    def __init__(self, address):
        self.to = (address.split(":")[0], int(address.split(":")[1]))
        self.word = None  # of connections that are made from now on
        self.open = threading.Event()
        self.open.set()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.sockets = []
        threading.Thread(target=self.accept, daemon=True).start()

    def hold_at(self, word):
        self.word = word

    def release(self):
        self.word = None
        self.open.set()

    def accept(self):
        while True:
            try:
                client = self.server.accept()[0]
            except OSError:
                return
            head = socket.create_connection(self.to)
            self.sockets += [client, head]
            threading.Thread(target=self.copy, args=(client, head, self.word), daemon=True).start()
            threading.Thread(target=self.copy, args=(head, client), daemon=True).start()

    def copy(self, source, to, word=None):
        try:
            seen = b""
            while data := source.recv(65536):
                if word:
                    seen = seen[-len(word):] + data  # it may come in two pieces
                    if word in seen:
                        word = None
                        self.open.clear()
                if source.getpeername() == self.to:
                    self.open.wait()
                to.sendall(data)
        except OSError:
            pass
        for s in (source, to):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.release()
        self.server.shutdown(socket.SHUT_RDWR)
        for s in (self.server, *self.sockets):
            s.close()


def case_head_killed(s, bin_dir, head, node, gcs):
    """The head comes back with what it knew; a gang elsewhere does not notice."""
    pg = gcs.create_group([{"mobula_gpu": 3}])
    group = gcs.wait_created(pg)
    assert group.bundles[0].node_id.hex() == node.info["node_id"], "only it has three"
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(cluster.FOR_EVER)
    d.expect("launched")
    d.hears(b"up\n")
    killed = head.kill_agent()
    head.wait_alive(other_than_pid=killed)
    cluster.wait_for("both nodes", lambda: set(gcs.alive()) == {head.info["node_id"],
                                                               node.info["node_id"]})
    assert node.state()["gangs"][0]["state"] == "RUNNING"
    gcs.remove_group(pg)
    assert "group was removed" in d.expect("failure").text
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")


def case_another_cluster(s, bin_dir, head, node, gcs):
    """Bundles of the old cluster are void, the node registers under a new id."""
    pg = gcs.create_group([{"mobula_gpu": 3}])
    gcs.wait_created(pg)
    d = cluster.Driver(s, node.grpc_address(), pg)
    d.expect("hello_reply")
    d.launch(cluster.FOR_EVER)
    d.expect("launched")
    d.hears(b"up\n")
    port = head.info["gcs_address"].split(":")[1]
    old_id = node.info["node_id"]
    assert head.stop() == 0
    other = s.node(bin_dir, "--head", "--port", port, "--dashboard-port", "0", "--num-gpus", "1")
    other.wait_alive()
    assert "group was removed" in d.expect("failure").text
    assert d.expect("rank_exit").exit_code == 0
    d.expect("ended")
    fresh = cluster.Gcs(s, other.info["gcs_address"])
    cluster.wait_for("both nodes", lambda: len(fresh.alive()) == 2)
    # The head lists the node a moment before the agent has its answer and writes node.json.
    cluster.wait_for("the new id in node.json", lambda: node.wait_alive()["node_id"] != old_id)
    assert node.info["node_id"] in fresh.alive()
    assert node.state()["bundles"] == []
    pg = fresh.create_group([{"mobula_gpu": 3}])
    fresh.wait_created(pg)
    return other


def case_no_answer(s, bin_dir, head, gcs):
    """What was not answered is asked again, under the same id: no node appears twice or is lost."""
    before = set(gcs.alive())
    proxy = Proxy(head.info["gcs_address"])
    proxy.hold_at(b"RegisterNode")
    node = s.node(bin_dir, "--address", proxy.address, "--num-gpus", "3")
    cluster.wait_for("the registration", lambda: set(gcs.alive()) - before)
    (registered,) = set(gcs.alive()) - before
    cluster.wait_for("the next try", lambda: "trying again" in node.log()
                     or node.process.poll() is not None)
    proxy.release()
    assert node.wait_alive()["node_id"] == registered
    assert set(gcs.alive()) == before | {registered}
    print("ok   no_answer to a registration", flush=True)
    proxy.hold_at(bytes.fromhex(registered))  # whether it is alive
    n_tries = node.log().count("trying again")
    killed = node.kill_agent()
    cluster.wait_for("the next question", lambda: node.log().count("trying again") > n_tries
                     or "is not in use any more" in node.log())
    proxy.release()
    assert node.wait_alive(other_than_pid=killed)["node_id"] == registered
    assert set(gcs.alive()) == before | {registered}
    assert node.stop() == 0
    proxy.close()


def main():
    with cluster.Sandbox() as s:
        head = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0", "--num-gpus",
                      "1")
        address = head.wait_alive()["gcs_address"]
        node = s.node(sys.argv[1], "--address", address, "--num-gpus", "3")
        node.wait_alive()
        gcs = cluster.Gcs(s, address)
        case_head_killed(s, sys.argv[1], head, node, gcs)
        print("ok   head_killed", flush=True)
        case_no_answer(s, sys.argv[1], head, gcs)
        print("ok   no_answer", flush=True)
        other = case_another_cluster(s, sys.argv[1], head, node, gcs)
        print("ok   another_cluster", flush=True)
        assert node.stop() == 0
        assert other.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
