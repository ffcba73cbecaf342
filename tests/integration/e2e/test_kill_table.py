"""SIGKILL of every process in every phase of a job: the cells of kill_table.py.

By default the cells of QUICK; with --all every one. A cell is right when the job's end and message
say what the table says, no process of the job is left, all bundles are free, what the store's
pointer names is complete, and the next job runs.
"""

import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import unittest

import checkpoints
import kill_table
import s3
from cluster import TERMINAL, Cluster, is_alive, wait_until
from kill_phases import Job

ALL = "--all" in sys.argv
END_S = 120


class Document(unittest.TestCase):
    def test_docs_hold_the_table_that_is_tried(self):
        doc = pathlib.Path(__file__).parents[3] / "docs/reliability.md"
        self.assertIn(kill_table.markdown(), doc.read_text(),
                      "docs/reliability.md differs from tests/integration/e2e/kill_table.py")

    def test_the_default_has_every_phase_and_process(self):
        self.assertEqual({p for p, _ in kill_table.QUICK}, set(kill_table.PHASES))
        self.assertEqual({p for _, p in kill_table.QUICK}, set(kill_table.PROCESSES))


class Table(unittest.TestCase):
    def setUp(self):
        self.cluster = None
        store = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-s3-"))
        port = self.enterContext(s3.server(store))
        self.gate = self.enterContext(s3.Gate(port, r"\.mobula/part-"))
        self.store = store

    def test_cells(self):
        cells = [(phase, process) for phase in kill_table.PHASES for process in kill_table.PROCESSES
                 if process in kill_table.TABLE[phase]] if ALL else kill_table.QUICK
        for number, (phase, process) in enumerate(cells):
            began = time.monotonic()
            outcome = kill_table.TABLE[phase][process]
            with self.subTest(phase=phase, killed=process):
                try:
                    self.cell(f"{phase}-{number}", phase, process, outcome)
                except BaseException:
                    print(f"FAILED   {phase} | {process} | {outcome}", flush=True)
                    self.end_cluster(*sys.exc_info())
                    raise
                print(f"{time.monotonic() - began:5.1f} s  {phase} | {process} | {outcome}",
                      flush=True)
        self.end_cluster(None, None, None)

    def end_cluster(self, *how):
        cluster, self.cluster = self.cluster, None
        self.gate.open()
        if cluster is not None:
            cluster.__exit__(*how)

    def cell(self, name, phase, process, outcome):
        self.gate.open()
        if self.cluster is None:
            # A phase that is held by a stopped mobula-init is none that hangs.
            self.cluster = Cluster(nodes=2, env=s3.environment(self.gate.port),
                                   start_args=("--launch-timeout", "10m")).__enter__()
        cluster = self.cluster
        job = Job(cluster, self.gate, self.store, name)
        try:
            job.hold(phase)
            pids = job.pids(process)
            self.assertTrue(pids, f"there is no {process}")
            agents = job.pids("both agents")
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        finally:
            job.let_go()
        if outcome == "head gone":
            self.head_is_gone()
        else:
            self.job_ends(job, outcome)
        latest = job.latest()
        if latest is not None:
            checkpoints.assert_complete(job.store, latest)
        if outcome == "goes on" and phase not in ("pending", "placement"):
            self.assertEqual(latest, job.last_iteration)
        if "init" in process:  # the node's agent leaves by itself, with nobody to tell
            gone = agents[0 if process == "init of the head" else 1]
            wait_until(lambda: not is_alive(gone), "the agent of the node ends", END_S)
            self.end_cluster(None, None, None)

    def head_is_gone(self):
        """The other node stays, without a rank; nothing of the head's node is left."""
        node = self.cluster.node("node-1")
        rest = {node["pid_init"], node["pid_agent"]}
        wait_until(lambda: set(self.cluster.own_pids()) <= rest,
                   lambda: f"left: {set(self.cluster.own_pids()) - rest}", END_S)

    def job_ends(self, job, outcome):
        cluster = self.cluster
        status, message, _ = kill_table.OUTCOMES[outcome]

        def look():
            try:
                seen = cluster.job(job.id)
            except OSError:
                return None
            return seen if seen["status"] in TERMINAL else None

        seen = wait_until(look, lambda: f"{job.id} has not ended:\n{cluster.logs(job.id)[-3000:]}",
                          END_S)
        self.assertEqual(seen["status"], status, seen["message"])
        self.assertRegex(seen["message"], re.compile(message))
        if job.holder is not None:
            cluster.wait_job(job.holder)
        wait_until(lambda: not cluster.rank_pids(), lambda: f"left: {cluster.rank_pids()}", END_S)
        cluster.assert_all_free(END_S)
        nodes = 1 if outcome in ("node lost", "no nodes", "drained") or job.node_is_gone() else 2
        after = cluster.submit(f"mobula run --num-nodes {nodes} --wait-timeout 20s -- true")
        self.assertEqual(cluster.wait_job(after)["status"], "SUCCEEDED", cluster.logs(after))


if __name__ == "__main__":
    unittest.main(argv=[a for a in sys.argv if a != "--all"])
