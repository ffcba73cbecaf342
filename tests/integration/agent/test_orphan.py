"""A placement group whose driver died before its first Hello: test_orphan.py BIN_DIR"""

import sys

import cluster


def main():
    with cluster.Sandbox() as s:
        head = s.node(sys.argv[1], "--head", "--port", "0", "--dashboard-port", "0")
        gcs = cluster.Gcs(s, head.wait_alive()["gcs_address"])
        before = head.state()["resources_available"]["mobula_slot"]
        pg = gcs.create_group([{"mobula_slot": 1}])
        gcs.wait_created(pg)
        assert head.state()["resources_available"]["mobula_slot"] == before - 1
        cluster.wait_for("the slot to be given back",
                         lambda: head.state()["resources_available"]["mobula_slot"] == before,
                         deadline_s=90)
        assert head.stop() == 0
    print("ok   a group without a driver is given back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
