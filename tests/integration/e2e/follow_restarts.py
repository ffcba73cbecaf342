"""A follower of a job's log whose head's agent is killed under it, twice."""

import os
import re
import signal

from cluster import wait_until

N_LINES = 400


def check(test, cluster):
    """Every line comes once and in order, and the follower's status is the job's. Returns its id."""
    job_id = cluster.submit(f"i=0; while [ $i -lt {N_LINES} ]; do echo line $i; i=$((i+1)); "
                            "sleep 0.01; done; exit 5")
    with cluster.running("job", "logs", "-f", "--address", cluster.address, job_id) as follower:
        for mark in ("line 50\n", "line 200\n"):
            wait_until(lambda: mark in follower.output(), follower.output)
            pid = cluster.node("node-0")["pid_agent"]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: cluster.node("node-0")["pid_agent"] != pid, "a new agent")
        test.assertEqual(follower.wait(60), 1, follower.output())
        log = follower.output().split("\nJob '")[0]  # whose message has the last lines again
        seen = re.findall(r"^line (\d+)$", log, re.M)
        test.assertEqual(seen, [str(i) for i in range(N_LINES)])
    return job_id
