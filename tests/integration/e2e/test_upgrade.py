"""Agents are upgraded below a job: other programs take the place of all that is installed, as a package
manager does it, and the agents are killed. The new ones adopt what runs; no line and no job is lost."""

import json
import os
import pathlib
import re
import shutil
import signal
import unittest
import urllib.request

from cluster import MOBULA, Cluster, is_alive, wait_until


class Installed(Cluster):
    """Runs from an installation of its own."""

    def __init__(self, **more):
        super().__init__(**more)
        self.bin = pathlib.Path(self.dir, "bin")
        shutil.copytree(MOBULA.parent, self.bin)
        self.old = self.version()
        self.new = self.old[:-1] + ("8" if self.old[-1] == "9" else "9")

    def command(self, argv):
        return [str(self.bin / "mobula"), *map(str, argv)]

    def version(self):
        return json.loads(self.mobula("version", "--json").stdout)["version"]

    def upgrade(self):
        """Every file is another one under the same name, and says another version."""
        for path in self.bin.iterdir():
            other = path.with_name(f".{path.name}.new")
            other.write_bytes(path.read_bytes().replace(self.old.encode(), self.new.encode()))
            other.chmod(0o755)
            other.rename(path)

    def agent_version(self, node):
        with urllib.request.urlopen(f"http://127.0.0.1:{node['http_port']}/api/mobula/node") as reply:
            return json.load(reply)["version"]

    def kill_agents(self):
        """The nodes once other agents are up in the place of those."""
        before = self.nodes()
        for node in before:
            os.kill(node["pid_agent"], signal.SIGKILL)

        def others():
            nodes = {n["node_name"]: n for n in self.nodes()}
            alive = {n["node_id"] for n in self.status()["nodes"] if n["state"] == "ALIVE"}
            return all(nodes[b["node_name"]]["pid_agent"] != b["pid_agent"] and b["node_id"] in alive
                       for b in before) and nodes.values()

        def look():
            try:
                return others()
            except OSError:  # the head is one of them
                return None

        return wait_until(look, lambda: f"{before}: {self.nodes()}", 120)


class Upgrade(unittest.TestCase):
    def test_jobs_go_on_below_other_agents(self):
        with Installed(nodes=2) as cluster:
            marker = f"{cluster.dir}/go-on"
            count = (f"i=0; until test -e {marker}; do echo line $i; i=$((i+1)); sleep 0.02; done; "
                     "echo last $i")
            # Every start of a rank adds a line: its pid.
            cluster.submit(f"mobula run --num-nodes 2 -- sh -c 'echo $$ >> {cluster.dir}/rank-$RANK; {count}'",
                           submission_id="gang")

            def ranks():
                return [[int(pid) for pid in f.read_text().split()]
                        for f in sorted(pathlib.Path(cluster.dir).glob("rank-*"))]

            cluster.submit(count, submission_id="driver")
            for job in ("gang", "driver"):
                wait_until(lambda: "line 20\n" in cluster.logs(job), lambda: cluster.logs(job))
            first = wait_until(lambda: len(r := ranks()) == 2 and all(r) and r, "both ranks run")
            with cluster.running("job", "logs", "-f", "--address", cluster.address, "driver") as follower:
                wait_until(lambda: "line 20\n" in follower.output(), follower.output)
                cluster.upgrade()
                self.assertEqual(cluster.version(), cluster.new)
                self.assertEqual({cluster.agent_version(n) for n in cluster.nodes()}, {cluster.old})
                for node in cluster.kill_agents():
                    self.assertEqual(cluster.agent_version(node), cluster.new)
                    exe = os.readlink(f"/proc/{node['pid_agent']}/exe")
                    self.assertEqual(exe, str(cluster.bin / "mobula-agent"))
                self.assertEqual(ranks(), first, "a rank was started again")
                self.assertTrue(all(is_alive(pid) for pids in first for pid in pids), "a rank ended")
                # What comes after it is of the new programs, beside what is still of the old ones.
                later = cluster.submit("mobula version; mobula run --num-nodes 2 -- mobula version")
                self.assertEqual(cluster.wait_job(later)["status"], "SUCCEEDED", cluster.logs(later))
                self.assertEqual(re.findall(r"mobula (\d\S+)", cluster.logs(later)), [cluster.new] * 3)
                n_lines = [cluster.logs(job).count("line") for job in ("gang", "driver")]
                wait_until(lambda: all(cluster.logs(job).count("line") > n + 20 for job, n in
                                       zip(("gang", "driver"), n_lines)), "lines come as before")
                pathlib.Path(marker).touch()
                self.assertEqual(follower.wait(120), 0, follower.output())
            for job in ("gang", "driver"):
                self.assertEqual(cluster.wait_job(job)["status"], "SUCCEEDED", cluster.logs(job))
            for tag, log in (("", cluster.logs("driver")), ("", follower.output()),
                             (r"\[rank 0\] ", cluster.logs("gang")),
                             (r"\[rank 1\] ", cluster.logs("gang"))):
                seen = re.findall(rf"^{tag}line (\d+)$", log, re.M)
                self.assertEqual(seen, [str(i) for i in range(len(seen))])
                self.assertEqual(re.findall(rf"^{tag}last (\d+)$", log, re.M), [str(len(seen))])
            cluster.assert_all_free()


if __name__ == "__main__":
    unittest.main()
