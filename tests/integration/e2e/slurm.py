"""A real Slurm on this machine: slurmctld and two slurmd, two "nodes" of one host, without accounts.

Debian's slurmctld, slurmd and slurm-client. Everything lies in one temporary directory and ends
with the `with` block.
"""

import getpass
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile

from cluster import wait_until
from ports import free_port

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="mb-slurm-", dir="/tmp")
        (pathlib.Path(self.dir) / "state").mkdir()
        conf = pathlib.Path(self.dir) / "slurm.conf"
        conf.write_text(CONF.format(dir=self.dir, host=socket.gethostname().split(".")[0],
                                    user=getpass.getuser(), ports=[free_port() for _ in range(3)]))
        self.env = {k: v for k, v in os.environ.items()
                    if not k.startswith(("RAY_", "MOBULA_", "SLURM", "AWS_", "BUCKET_"))}
        self.env.update(SLURM_CONF=str(conf), HOME=self.dir, TMPDIR=self.dir,
                        OPENBLAS_NUM_THREADS="1", AWS_EC2_METADATA_DISABLED="true",
                        PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        self.daemons = [self._start("slurmctld", "-D"), self._start("slurmd", "-D", "-N", "n1"),
                        self._start("slurmd", "-D", "-N", "n2")]
        try:
            wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2",
                       self.logs, 180)
        except BaseException:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, kind, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if kind is not None:
            print(self.logs())
        shutil.rmtree(self.dir, ignore_errors=True)

    def _start(self, *argv):
        with open(f"{self.dir}/{'-'.join(argv)}.log", "wb") as log:
            return subprocess.Popen(argv, env=self.env, cwd=self.dir, stdin=subprocess.DEVNULL,
                                    stdout=log, stderr=log)

    def logs(self):
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-3000:]}"
                         for p in sorted(pathlib.Path(self.dir).glob("*.log")))

    def run(self, *argv, timeout=300):
        """A command of Slurm to its end, with what it printed."""
        return subprocess.run(argv, env=self.env, cwd=self.dir, timeout=timeout, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)

    def start(self, *argv):
        return subprocess.Popen(argv, env=self.env, cwd=self.dir, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def idle(self):
        return self.run("squeue", "-h").stdout.strip() == ""
