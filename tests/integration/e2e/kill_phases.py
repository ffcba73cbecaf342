"""Jobs that stand still in one phase of their life, and the processes there are to kill meanwhile.

Nothing is timed: a phase is held by a process that is stopped (SIGSTOP), by a request that the
object store's gate keeps, or by a file that is not there yet, and reached when its trace is seen.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import time

import s3
from cluster import is_alive, mini_model, wait_until


STOP_GRACE_S = 10


def state_of(directory):
    """(pid of the supervisor, [pids of its children]) of an attempt's directory."""
    text = pathlib.Path(directory, "state").read_text()
    supervisor = int(re.search(r"^supervisor (\d+)", text, re.M)[1])
    return supervisor, [int(p) for p in re.findall(r"^child \d+ running (\d+)", text, re.M)]


class Job:
    """One job of one cell. hold() has returned: it stands in its phase until let_go()."""

    def __init__(self, cluster, gate, store, name):
        self.cluster, self.gate, self.name = cluster, gate, name
        self.url = f"s3://{s3.BUCKET}/{name}"
        self.store = pathlib.Path(store, "s3", s3.BUCKET, name)
        self.go = f"{cluster.dir}/go-{name}"
        self.id = None
        self.holder = None  # another job that has the nodes
        self.last_iteration = None  # what a run that goes on saves at its end
        self._stopped = []

    # ---- processes ----

    def attempts(self, node):
        """Directories of this job's gang on a node."""
        found = []
        for path in (self.cluster.node(node)["dir"] / "gangs").glob("*/gang.json"):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(path.read_text()).get("job_id") == self.id:
                    found.append(path.parent)
        return found

    def driver(self):
        return state_of(self.cluster.node("node-0")["dir"] / "jobs" / self.id)

    def pids(self, process):
        """Who is to be killed; [] when there is no such process in this phase."""
        node = self.cluster.node
        with contextlib.suppress(FileNotFoundError, IndexError):
            if process == "init of the head":
                return [node("node-0")["pid_init"]]
            if process == "init of a worker node":
                return [node("node-1")["pid_init"]]
            if process == "agent of the head":
                return [node("node-0")["pid_agent"]]
            if process == "agent of a worker node":
                return [node("node-1")["pid_agent"]]
            if process == "both agents":
                return self.pids("agent of the head") + self.pids("agent of a worker node")
            if process == "supervisor of the driver":
                return [self.driver()[0]]
            if process == "driver":
                return self.driver()[1][:1]
            if process == "agent of the head and driver":
                driver = self.pids("driver")
                return self.pids("agent of the head") + driver if driver else []
            if process == "supervisor of a gang":  # the worker's, unless its node is still launching
                state = [d for n in ("node-1", "node-0") for d in self.attempts(n) if (d / "state").exists()]
                return [state_of(state[0])[0]]
            if process == "init and supervisor of a gang":
                gang = self.pids("supervisor of a gang")
                return self.pids("init of a worker node") + gang if gang else []
            if process == "rank on the head":
                return state_of(self.attempts("node-0")[0])[1]
            if process == "rank on a worker node":
                return state_of(self.attempts("node-1")[0])[1]
            raise AssertionError(process)
        return []

    def node_is_gone(self):
        return not is_alive(self.cluster.node("node-1")["pid_init"])

    def stop_process(self, pid):
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)

    def let_go(self):
        open(self.go, "w").close()
        self.gate.open()
        for pid in self._stopped:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)

    # ---- phases ----

    def submit(self, *command, shell=""):
        entrypoint = f"{shell}exec " + " ".join(map(str, command))
        self.id = self.cluster.submit(
            entrypoint, submission_id=self.name,
            runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S)}})

    def train(self, iterations, *more, shell=""):
        self.last_iteration = iterations
        self.submit("mobula", "train", "--num-nodes", 2, "--gpus-per-node", 1, "--checkpoint-url",
                    self.url, "--lease", "60s", *mini_model(iterations, *more), shell=shell)

    def agent_log(self, node):
        return (self.cluster.node(node)["dir"] / "agent.log").read_text(errors="replace")

    def said(self, node, text):
        """Wait until this node's agent logs it about this job."""
        line = re.compile(rf"job={self.id}\b.*{text}")
        wait_until(lambda: line.search(self.agent_log(node)),
                   lambda: f"{node}: {text}\n{self.agent_log(node)[-3000:]}", 60)

    def asked_for(self, node):
        """Wait until this node's agent has asked for the supervisor of the ranks."""
        wait_until(lambda: any((d / "spec").exists() for d in self.attempts(node)),
                   lambda: f"{node} launches:\n{self.agent_log(node)[-3000:]}", 60)

    def far_rank(self):
        """(number, pid) of the rank on node-1: which it is depends on the placement."""
        pid = wait_until(lambda: self.pids("rank on a worker node"), f"{self.id} has a rank there")[0]
        log = next(self.attempts("node-1")[0].glob("rank-*.log"))
        return int(log.stem.split("-")[1]), pid

    def hold(self, phase):
        getattr(self, "hold_" + phase)()

    def hold_pending(self):
        """Its driver is asked for, and mobula-init does not listen."""
        self.stop_process(self.cluster.node("node-0")["pid_init"])
        self.submit("mobula", "run", "--num-nodes", 2, "--wait-timeout", "5s", "--", "true")
        spec = self.cluster.node("node-0")["dir"] / "jobs" / self.id / "spec"
        wait_until(spec.exists, "the driver's spec")
        assert self.cluster.job(self.id)["status"] == "PENDING"

    def hold_placement(self):
        """Another job has all of both nodes."""
        slots = int(self.cluster.total()) // 2
        self.holder = self.cluster.submit(
            f"mobula run --num-nodes 2 --ranks-per-node {slots} --lease 60s -- sh -c "
            f"'until test -e {self.go}; do sleep 0.05; done'", submission_id=f"{self.name}-holder")
        wait_until(lambda: self.cluster.available() == 0, "the nodes are taken")
        self.submit("mobula", "run", "--num-nodes", 2, "--wait-timeout", "5s", "--", "true")
        wait_until(lambda: (self.cluster.gang_of(self.id) or {}).get("state") == "WAITING",
                   "it asked for its nodes")

    def hold_launching(self):
        """Both agents ask for the ranks' supervisors, and no mobula-init listens."""
        self.train(20, "--save-interval", 20, shell=f"until test -e {self.go}; do sleep 0.02; done; ")
        self.cluster.wait_job(self.id, ("RUNNING",))
        for node in ("node-0", "node-1"):
            self.stop_process(self.cluster.node(node)["pid_init"])
        open(self.go, "w").close()
        for node in ("node-0", "node-1"):
            self.asked_for(node)

    def hold_rendezvous(self):
        """The rank on the head waits for its peer, which cannot start."""
        self.train(20, "--save-interval", 20, shell=f"until test -e {self.go}; do sleep 0.02; done; ")
        self.cluster.wait_job(self.id, ("RUNNING",))
        self.stop_process(self.cluster.node("node-1")["pid_init"])
        open(self.go, "w").close()
        self.said("node-0", "-> RENDEZVOUS")
        self.asked_for("node-1")

    def hold_training(self):
        """A rank is stopped in the middle of its iterations, a checkpoint is durable."""
        self.train(3000, "--save-interval", 500)
        wait_until(self.latest, lambda: self.cluster.logs(self.id)[-3000:], 60)
        self.stop_process(self.far_rank()[1])

    def hold_saving(self):
        """A rank is stopped while it writes its files, once there is a checkpoint that counts: tried
        at each save from then on. A save takes a moment, so its directory is watched for without a
        pause, and the model is a larger one: a save of the tiny one is over before a process that
        waits for a processor has seen it begin."""
        self.train(400, "--save-interval", 4, "--hidden-size", 128)
        number, pid = self.far_rank()
        local = pathlib.Path(self.cluster.temp, "checkpoints", self.id, f"node-{number}")
        wait_until(self.latest, lambda: self.cluster.logs(self.id)[-3000:], 60)

        def begun():
            return {int(p.name.split("_")[1]) for p in local.glob("iter_*")}

        def hit():
            before, until = begun(), time.monotonic() + 60
            while begun() <= before:
                assert time.monotonic() < until, "no further save begins"
            os.kill(pid, signal.SIGSTOP)
            done = re.findall(rf"job={self.id} rank={number}: saved iteration=(\d+)", self.agent_log("node-1"))
            if max(begun()) > max(map(int, done), default=0):
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        wait_until(hit, "a save is under way")
        self._stopped.append(pid)

    def hold_uploading(self):
        """The store keeps the last request of each node, the ranks go on (one is stopped)."""
        self.gate.shut()
        self.train(4000, "--save-interval", 2000)
        self.said("node-1", "saved iteration=2000")
        self.stop_process(self.far_rank()[1])
        wait_until(lambda: len(self.gate.waiting) == 2, lambda: self.cluster.logs(self.id)[-3000:], 60)

    def hold_draining(self):
        """The store keeps the last request of each node, every rank has ended."""
        self.gate.shut()
        self.train(20, "--save-interval", 20)
        for node in ("node-0", "node-1"):
            self.said(node, "-> DRAINING")
        wait_until(lambda: len(self.gate.waiting) == 2, lambda: self.cluster.logs(self.id)[-3000:], 60)

    def hold_stopping(self):
        """It was asked to stop once a checkpoint is durable, and its ranks take their time. Stopped
        processes would not hold it: who ends a job wakes them, so that they end as they like to."""
        here = self.cluster.dir
        script = f"""
            trap 'until test -e {self.go}; do sleep 0.05; done; exit 143' TERM
            D={here}/{self.name}-$RANK; N=$D/iter_0000001
            mkdir -p $N; head -c 300000 /dev/zero > $N/rank$RANK.bin; : > $D/saved
            until test -e {here}/{self.name}-0/saved && test -e {here}/{self.name}-1/saved; do sleep 0.05; done
            if [ $RANK = 0 ]; then printf 1 > $D/latest_checkpointed_iteration.txt; fi
            while :; do sleep 0.05; done"""
        self.submit("mobula", "run", "--num-nodes", 2, "--save", f"{here}/{self.name}-%n", "--checkpoint-url",
                    self.url, "--lease", "60s", "--", "sh", "-c", shlex.quote(script))
        wait_until(self.latest, lambda: self.cluster.logs(self.id)[-3000:], 60)
        status, text = self.cluster.call("POST", f"/api/jobs/{self.id}/stop")
        assert (status, json.loads(text)) == (200, {"stopped": True}), text
        for node in ("node-0", "node-1"):
            self.said(node, "-> STOPPING")

    # ---- its checkpoints ----

    def latest(self):
        """The newest checkpoint that counts; None: there is none."""
        try:
            return int((self.store / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            return None
