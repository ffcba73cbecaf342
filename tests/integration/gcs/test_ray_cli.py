"""The unmodified ray CLI and JobSubmissionClient against our head; test_ray_cli.py HEAD"""

import json
import pathlib
import subprocess
import sys
import tempfile

from head_process import Checks, HeadProcess, clean_env

check = Checks()
RAY = str(pathlib.Path(sys.executable).parent / "ray")


def ray(*words, address=None, timeout=240):
    env = clean_env(**({"RAY_ADDRESS": address} if address else {}))
    done = subprocess.run([RAY, *words], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=timeout)
    return done.returncode, done.stdout.decode(errors="replace")


def cli(head):
    code, text = ray("job", "submit", "--submission-id", "cli-1", "--", "bash", "-c",
                     "echo hello; sleep 0.5; echo bye", address=head.http)
    check.true("submit follows to the end", code == 0 and "hello\nbye\n" in text
               and "close code 1000" in text and "Job 'cli-1' succeeded" in text, text)
    code, text = ray("job", "submit", "--submission-id", "cli-2", "--", "bash", "-c", "exit 4",
                     address=head.http)
    check.true("a failing job is exit 1", code == 1 and "failed with exit code 4" in text, text)
    code, text = ray("job", "submit", "--submission-id", "cli-1", "--", "true", address=head.http)
    check.true("duplicate id", code == 1 and "Please use a different submission_id" in text, text)
    code, text = ray("job", "status", "cli-2", address=head.http)
    check.true("status", code == 0 and "Job 'cli-2' failed" in text, text)
    code, text = ray("job", "logs", "cli-1", address=head.http)
    check.true("logs", code == 0 and "hello\nbye" in text, text)
    code, text = ray("job", "list", address=head.http)
    check.true("list", code == 0 and "'cli-1'" in text and "'cli-2'" in text, text)
    ray("job", "submit", "--no-wait", "--submission-id", "cli-3", "--", "sleep", "100",
        address=head.http)
    code, text = ray("job", "stop", "cli-3", address=head.http)
    check.true("stop", code == 0 and "Job 'cli-3' was stopped" in text, text)
    code, text = ray("job", "delete", "cli-3", address=head.http)
    check.true("delete", code == 0 and "deleted successfully" in text, text)
    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / "a.py").write_text("print(1)\n")
        code, text = ray("job", "submit", "--working-dir", directory, "--submission-id", "cli-4",
                         "--", "true", address=head.http)
    check.true("working dir", code == 0 and "succeeded" in text, text)


def cluster(head):
    code, text = ray("status", "--address", head.gcs)
    check.true("ray status", code == 0 and head.node_id in text
               and "0.0/2.0 mobula_gpu" in text, text)
    for address in (head.http, head.gcs):
        code, text = ray("list", "nodes", "--address", address)
        check.true(f"ray list nodes {address.split(':')[0]}", code == 0 and head.node_id in text
                   and "ALIVE" in text, text)
    code, text = ray("list", "jobs", "--address", head.http, "--format", "json")
    jobs = {job["submission_id"]: job["status"] for job in json.loads(text[text.index("["):])}
    check.true("ray list jobs", code == 0 and jobs.get("cli-1") == "SUCCEEDED"
               and jobs.get("cli-2") == "FAILED", text)
    code, text = ray("list", "jobs", "--address", head.http, "--filter", "status=FAILED")
    check.true("ray list jobs, filtered", code == 0 and "cli-2" in text and "cli-1" not in text,
               text)
    code, text = ray("health-check", "--address", head.gcs)
    check.true("ray health-check", code == 0, text)


def sdk(head):
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(head.http)
    job = client.submit_job(entrypoint="echo from the sdk", metadata={"who": "test"})
    text = ""

    async def collect():
        nonlocal text
        async for part in client.tail_job_logs(job):
            text += part

    import asyncio
    asyncio.run(collect())
    check.true("tail_job_logs", "from the sdk" in text, text)
    check.equal("status after the tail", client.get_job_status(job), JobStatus.SUCCEEDED)
    info = client.get_job_info(job)
    check.equal("info", (info.metadata, info.driver_exit_code), ({"who": "test"}, 0))
    check.true("list_jobs", job in [d.submission_id for d in client.list_jobs()])
    check.true("logs", "from the sdk" in client.get_job_logs(job))
    check.true("delete_job", client.delete_job(job))


def gcs_client(head):
    """Ray's own C++ GCS client, through its Python binding."""
    from ray._raylet import GcsClient

    client = GcsClient(address=head.gcs)
    client.internal_kv_put(b"key", b"value", True, b"ns")
    check.equal("kv get", client.internal_kv_get(b"key", b"ns"), b"value")
    check.equal("kv keys", client.internal_kv_keys(b"k", b"ns"), [b"key"])
    check.equal("kv exists", client.internal_kv_exists(b"nope", b"ns"), False)
    check.equal("kv del", client.internal_kv_del(b"key", False, b"ns"), 1)
    nodes = client.get_all_node_info()
    check.equal("nodes", [n.hex() for n in nodes], [head.node_id])


def main():
    with HeadProcess(sys.argv[1]) as head:
        try:
            cli(head)
            cluster(head)
            sdk(head)
            gcs_client(head)
        except BaseException:
            print(head.log_text()[-4000:])
            raise
    return check.status()


if __name__ == "__main__":
    sys.exit(main())
