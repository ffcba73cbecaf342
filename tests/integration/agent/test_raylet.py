"""A node of Ray's own joins our head, and stays: test_raylet.py BIN_DIR"""

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import cluster  # noqa: E402
from ray.job_submission import JobSubmissionClient  # noqa: E402
from commands import RAY, call, check, clean_env, machine_ip  # noqa: E402

BIN = sys.argv[1]
STAYS_S = 25  # much longer than our head takes to declare a node dead


@contextlib.contextmanager
def ray_node(address, env=None):
    """`ray start --address` in front, below the directory of the head."""
    process = subprocess.Popen(
        [RAY, "start", f"--address={address}", "--block", "--num-cpus=1", "--disable-usage-stats",
         "--object-store-memory=80000000", "--include-log-monitor=false"], env=clean_env(**(env or {})),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True)
    text = b""
    try:
        end = time.monotonic() + 240
        while b"Ray runtime started" not in text:
            left = max(0, end - time.monotonic())
            part = os.read(process.stdout.fileno(), 65536) \
                if select.select([process.stdout], [], [], left)[0] else b""
            if not part:
                raise AssertionError(f"ray start said only:\n{text.decode()}")
            text += part
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(stat[3]) == process.pid and stat[0] not in "ZX":
                    os.kill(int(entry.name), signal.SIGKILL)
        process.wait()
        process.stdout.close()


def check_driver_info(head):
    """A job of ours whose entrypoint calls ray.init, which it does at the node of Ray's."""
    client = JobSubmissionClient(f"http://{machine_ip()}:{head.file()['dashboard_port']}")
    program = "import os, ray, time; ray.init(); print('pid', os.getpid(), flush=True); time.sleep(600)"
    client.submit_job(entrypoint=f"exec {sys.executable} -c \"{program}\"", submission_id="with-init")
    end = time.monotonic() + cluster.DEADLINE_S
    while not (pid := re.search(r"^pid (\d+)$", client.get_job_logs("with-init"), re.M)):
        assert time.monotonic() < end, client.get_job_logs("with-init")
        time.sleep(0.2)
    for look in ("while it runs", "afterwards"):
        jobs = client.list_jobs()
        assert len(jobs) == 1, jobs  # the driver is inside the submission, not a row of its own
        info, driver = client.get_job_info("with-init"), client.get_job_info("with-init").driver_info
        assert info == jobs[0] and info.job_id == driver.id == "01000000", info
        assert (driver.node_ip_address, driver.pid) == (machine_ip(), pid[1]), info
        print(f"ok   driver_info {look}", flush=True)
        if not info.status.is_terminal():
            assert client.stop_job("with-init")
        while not client.get_job_status("with-init").is_terminal():
            assert time.monotonic() < end + 30, client.get_job_info("with-init")
            time.sleep(0.2)
    assert client.get_job_status("with-init") == "STOPPED"


def main():
    with cluster.Sandbox() as s:
        head = s.node(BIN, "--head", "--port", "0", "--dashboard-port", "0", "--num-gpus", "2",
                      "--no-token", "--node-ip-address", machine_ip())
        head.wait_alive()
        address = head.file()["gcs_address"]
        gcs = cluster.Gcs(s, address)
        with ray_node(address) as process:
            theirs = [h for h, n in gcs.nodes().items() if h != head.info["node_id"]]
            assert len(theirs) == 1, gcs.nodes()
            n = gcs.nodes()[theirs[0]]
            assert n.state == 0 and n.resources_total["CPU"] == 1.0, n
            print("ok   joins", flush=True)
            end = time.monotonic() + STAYS_S
            while time.monotonic() < end:
                assert gcs.nodes()[theirs[0]].state == 0, head.log()
                assert process.poll() is None, "the node of Ray ended"
                time.sleep(0.5)
            print("ok   stays", flush=True)
            check_driver_info(head)
            check("ray status", call(clean_env(), RAY, "status", "--address", address), 0,
                  theirs[0], "/1.0 CPU", "/2.0 mobula_gpu")
            text = check("ray list nodes", call(clean_env(), RAY, "list", "nodes", "--address",
                                                address), 0, theirs[0])
            assert text.count("ALIVE") == 2, text
        n = gcs.nodes()[theirs[0]]
        assert n.state == 1 and "SIGTERM" in n.death_info.reason_message, n
        print("ok   leaves", flush=True)
        assert head.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
