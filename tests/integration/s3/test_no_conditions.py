"""Checkpoints in a store that takes no conditional writes: test_no_conditions.py STORE_TOOL KIND

A real server behind a proxy that answers every If-None-Match and If-Match of a write as such servers
do. The first node alone commits, what is saved becomes durable, and the agents say so.
"""

import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e"), str(HERE.parent)]

import faults  # noqa: E402
import servers  # noqa: E402
from cluster import Cluster, wait_until  # noqa: E402

WORD = "takes no conditional writes"


def is_conditional(request):
    return request.method in ("PUT", "POST") and (request.header("If-None-Match") or request.header("If-Match"))


def main():
    tool_path, kind = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="mb-nocond-") as directory, \
            servers.behind_a_proxy(kind, directory) as (server, proxy, env), Cluster(nodes=2, env=env) as cluster, \
            servers.Tool(tool_path, server.direct(), url=f"s3://{servers.BUCKET}/run") as tool:
        proxy.rule("", "", faults.error(501, "NotImplemented"), when=is_conditional)
        save = pathlib.Path(directory, "save")
        save.mkdir()

        def latest():
            answer = tool("get", key="latest_checkpointed_iteration.txt", max=64)
            number = int(answer["data"]) if answer["code"] == "OK" else 0
            (save / "pace").write_text(str(number))
            return number

        job = cluster.submit(
            ["mobula", "run", "--num-nodes", "2", "--checkpoint-url", f"s3://{servers.BUCKET}/run", "--save", save,
             "--stop-grace", "5s", "--", sys.executable, HERE / "crash_rank.py", save, str(70 << 20)])
        wait_until(lambda: latest() >= 3, lambda: f"three checkpoints: {latest()}\n{cluster.logs(job)}", 300)
        cluster.call("POST", f"/api/jobs/{job}/stop")
        cluster.wait_job(job)
        verified = cluster.mobula("checkpoint", "verify", f"s3://{servers.BUCKET}/run")
        assert verified.returncode == 0, verified.stdout
        written = [r for r in proxy.requests if r.status == 200 and is_conditional(r)]
        assert not written, written[:3]
        logs = [(n["dir"] / "agent.log").read_text(errors="replace") for n in cluster.nodes()]
        assert all(WORD in text for text in logs), logs
        moved = proxy.seen("PUT", "/latest_checkpointed_iteration.txt$")
        print(f"{kind}: durable up to {latest()} without conditional writes, {len(moved)} writes of the pointer", flush=True)


if __name__ == "__main__":
    main()
