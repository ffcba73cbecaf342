"""What the cap of a log lets go of: not before the store has it while the store keeps up; else said
to the user, whatever became of the agent meanwhile."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import unittest

import s3
import stored_logs
from cluster import Cluster, wait_until

CAP = {"MOBULA_LOG_MAX_BYTES": "256KiB"}
CAP_SAYS = "its cap of 262144 bytes"
RAISES = "MOBULA_LOG_MAX_BYTES or --log-max-bytes raises it"
LINE_BYTES = 100


def lines(n):
    return f"seq -f '%0{LINE_BYTES - 1}.0f' 1 {n}"


def gang(cluster, script, *options, **env):
    """A gang of one; env is that of its driver, and so of its rank, but not of the driver's log."""
    words = [f"{k}={v}" for k, v in env.items()]
    return cluster.submit(["env", *words, *cluster.command(["run", "--num-nodes", "1", *options]),
                           "--", "sh", "-c", script])


def kill_agent(cluster):
    """Its restarter starts another one, which adopts what runs."""
    pid = cluster.node("node-0")["pid_agent"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.node("node-0")["pid_agent"] != pid, "the agent is started again", 60)


def agent_log(cluster):
    return pathlib.Path(cluster.node("node-0")["dir"], "agent.log").read_text()


def only(cluster, pattern):
    found = list(pathlib.Path(cluster.temp).glob(f"node_*/{pattern}"))
    return found[0] if len(found) == 1 else None


def front(index):
    """Where a log begins that gave its oldest part away, by its .idx (docs/formats.md)."""
    return int.from_bytes(index.read_bytes()[8:16], "little") if index else 0


def answers(cluster):
    try:
        return cluster.status()
    except (OSError, AssertionError):
        return False


class RankLogs(unittest.TestCase):
    def test_a_cap_without_a_store(self):
        """What the cap let go of before it was read is said, and no hole passes for output."""
        with Cluster(nodes=1) as cluster:
            total = 300000 * LINE_BYTES
            job_id = gang(cluster, lines(300000), **CAP)
            job = cluster.wait_job(job_id, timeout_s=300)
            self.assertEqual(job["status"], "SUCCEEDED", job)
            log = cluster.logs(job_id)
            self.assertEqual(log.count("\0"), 0)
            first = front(only(cluster, "gangs/*/rank-0.log.idx"))
            self.assertGreater(first, total // 2)
            said = "\n".join(re.findall("^mobula: .*$", log, re.M))
            self.assertIn(f"mobula: rank 0 of attempt 1: the first {first} bytes of its log were "
                          f"released to keep it below {CAP_SAYS}; {RAISES}", said)
            missing = re.findall(r"mobula: (\d+) bytes of the output of rank 0 are missing here", said)
            got = len(re.findall(r"^0\d{98}$", log, re.M))
            self.assertEqual(got * LINE_BYTES + sum(map(int, missing)), total, said)

    def test_what_is_sent_is_sent_before_it_goes(self):
        """A real store that keeps up: a log of many times its cap is there whole."""
        rounds, n = 8, 9000
        with tempfile.TemporaryDirectory(prefix="mb-s3-") as directory, \
                s3.server(directory) as port, \
                Cluster(nodes=1, env=s3.environment(port)) as cluster:
            script = "; ".join(
                f"{lines(n)}; until test -e {cluster.dir}/go-{i}; do sleep 0.05; done"
                for i in range(rounds))
            job_id = gang(cluster, script, "--checkpoint-url", f"s3://{s3.BUCKET}/run", "--save",
                          f"{cluster.dir}/save", MOBULA_LOG_MAX_BYTES="1MiB")
            stored = pathlib.Path(directory, "s3", s3.BUCKET, f"run/logs/{job_id}/rank-0/1")
            for i in range(rounds):  # a round is never more than the cap beyond what the store has
                want = (i + 1) * n * LINE_BYTES
                wait_until(lambda: stored_logs.size(stored) > want - (128 << 10),
                           lambda: (stored_logs.pieces(stored), agent_log(cluster)[-3000:]), 100)
                pathlib.Path(cluster.dir, f"go-{i}").touch()
            job = cluster.wait_job(job_id)
            log = cluster.logs(job_id)
            self.assertEqual((job["status"], job["message"]),
                             ("SUCCEEDED", "Job finished successfully."), log)
            want = "".join(f"{k:0{LINE_BYTES - 1}}\n" for k in range(1, n + 1)) * rounds
            self.assertEqual(stored_logs.whole(stored), want)
            self.assertNotIn("of attempt 1:", log)
            self.assertNotIn("does not keep up", agent_log(cluster))
            rank = only(cluster, "gangs/*/rank-0.log")
            self.assertLess(rank.stat().st_blocks * 512, 2 << 20)


class Restarts(unittest.TestCase):
    def test_a_store_that_was_away_and_an_agent_that_died(self):
        """The cap wins, loudly; what it cost is said at the end by an agent that did not see it."""
        with tempfile.TemporaryDirectory() as directory, Cluster(nodes=1) as cluster:
            blocked, url = pathlib.Path(directory, "store"), f"file://{directory}/store"
            blocked.touch()
            script = f"{lines(30000)}; until test -e {cluster.dir}/go; do sleep 0.05; done; echo end"
            ranks = gang(cluster, script, "--checkpoint-url", url, "--save", f"{cluster.dir}/save",
                         **CAP)
            alone = cluster.submit(["sh", "-c", script],
                                   runtime_env={"env_vars": {"MOBULA_LOG_URL": url, **CAP}})
            logs = ("gangs/*/rank-0.log", f"logs/job-driver-{alone}.log")
            for name in ("rank-0", f"job-driver-{alone}"):
                wait_until(lambda: re.search(f"{name}.log: .* does not keep up", agent_log(cluster)),
                           lambda: agent_log(cluster)[-3000:], 60)
            for log in logs:  # all is written before the store is back, so one gap is all there can be
                wait_until(lambda: only(cluster, log).stat().st_size >= 30000 * LINE_BYTES
                           and front(only(cluster, f"{log}.idx")) > 2 << 20,
                           lambda: agent_log(cluster)[-3000:], 60)
            blocked.unlink()
            for log in logs:
                wait_until(lambda: only(cluster, f"{log}.gaps"), lambda: agent_log(cluster)[-3000:], 100)
            kill_agent(cluster)
            pathlib.Path(cluster.dir, "go").touch()
            wait_until(lambda: answers(cluster), "the head answers again", 60)
            for job_id, folder in ((ranks, "rank-0/1"), (alone, "driver")):
                job = cluster.wait_job(job_id, timeout_s=100)
                self.assertEqual(job["status"], "SUCCEEDED", job)
                stored = pathlib.Path(directory, "store/logs", job_id, folder)
                # What was on its way while the front moved may have come before it.
                (begin, end), = stored_logs.gaps(stored)
                self.assertGreater(end, 2 << 20)
                self.assertTrue(stored_logs.whole(stored, end).endswith("\nend\n"))
                lost = (f"bytes {begin} to {end} of its log are not in {url}: they were released to keep "
                        f"the log below {CAP_SAYS} before the store had them; {RAISES}")
                if job_id == alone:
                    self.assertIn(f"Job finished successfully, but {lost}", job["message"])
                else:
                    self.assertIn(f"mobula: rank 0 of attempt 1: {lost}\n", cluster.logs(job_id))

    def wait_for_the_log_alone(self, cluster):
        """Of the gang, whose store does not take it."""

        def waits():
            gang_file = only(cluster, "gangs/*/gang.json")
            gang_ = json.loads(gang_file.read_text()) if gang_file else {"ranks": []}
            return [r["exited"] for r in gang_["ranks"]] == [True] and gang_["released"]

        wait_until(waits, lambda: agent_log(cluster)[-3000:], 60)

    def test_a_node_that_is_stopped_while_the_end_of_a_log_is_on_its_way(self):
        """It ends in good order, and what it owes stays for the agent after it."""
        with tempfile.TemporaryDirectory() as directory, Cluster(nodes=1) as cluster:
            blocked, url = pathlib.Path(directory, "store"), f"file://{directory}/store"
            blocked.touch()
            driver = subprocess.Popen(
                cluster.command(["run", "--num-nodes", "1", "--checkpoint-url", url, "--save",
                                 f"{cluster.dir}/save", "--", "echo", "last words"]),
                env={**cluster.env, "MOBULA_LOG_WAIT": "10m"}, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL)
            try:
                self.wait_for_the_log_alone(cluster)
                log = pathlib.Path(cluster.node("node-0")["dir"], "agent.log")
                done = cluster.mobula("stop", "--temp-dir", cluster.temp, "--grace", "3s")
            finally:
                driver.kill()
                driver.wait()
            self.assertEqual(done.returncode, 0, done.stdout)
            text = log.read_text(errors="replace")
            self.assertIn("received SIGTERM", text)
            self.assertNotIn("the agent ended with status", text)
            gang_ = json.loads(only(cluster, "gangs/*/gang.json").read_text())
            self.assertEqual(gang_["state"], "DRAINING")

    def test_an_agent_that_dies_while_the_end_of_a_log_is_on_its_way(self):
        with tempfile.TemporaryDirectory() as directory, Cluster(nodes=1) as cluster:
            blocked, url = pathlib.Path(directory, "store"), f"file://{directory}/store"
            blocked.touch()
            job_id = gang(cluster, "echo last words", "--checkpoint-url", url, "--save",
                          f"{cluster.dir}/save", MOBULA_LOG_WAIT="10m")
            self.wait_for_the_log_alone(cluster)
            self.assertEqual(cluster.job(job_id)["status"], "RUNNING")
            kill_agent(cluster)
            blocked.unlink()
            wait_until(lambda: answers(cluster), "the head answers again", 60)
            job = cluster.wait_job(job_id, timeout_s=100)
            self.assertEqual(job["status"], "SUCCEEDED", job)
            stored = pathlib.Path(directory, "store/logs", job_id, "rank-0/1")
            self.assertEqual(stored_logs.whole(stored), "last words\n")
            self.assertNotIn("of attempt 1:", cluster.logs(job_id))


if __name__ == "__main__":
    unittest.main(verbosity=2)
