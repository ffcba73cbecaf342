"""What follows when a process is killed (SIGKILL) in a phase of a job: the one source of the table
in docs/reliability.md and of the cells that test_kill_table.py tries.

    python3 kill_table.py        prints the table
"""

PHASES = {
    "pending": "recorded, its driver is being started",
    "placement": "the driver waits for nodes that another job has",
    "launching": "the agents are starting the ranks",
    "rendezvous": "the rank on the head waits for its peer, whose node is still launching",
    "training": "the ranks iterate, a checkpoint is durable",
    "saving": "a rank is writing its files of a later checkpoint",
    "uploading": "the ranks iterate, a checkpoint is on its way",
    "draining": "every rank has ended, the last checkpoint is on its way",
    "stopping": "a stop was asked for, the ranks have not ended",
}

# name: (state of the job, what its message must match, the sentence below the table)
OUTCOMES = {
    "goes on": ("SUCCEEDED", "", "The job does not notice: mobula-init starts the agent again, which adopts drivers, "
                "ranks and uploads. SUCCEEDED"),
    "head gone": (None, "", "The head's node ends as a whole: its driver and ranks get their grace, the other ranks end "
                  "too. There is no head to ask; `mobula start --head --resume` goes on with its jobs "
                  "(e2e/test_resume.py), without `--resume` a new cluster begins"),
    "no nodes": ("FAILED", "no 2 nodes were free within 5 s", "The node leaves, the driver goes on waiting and says so when "
                 "its --wait-timeout is over. FAILED"),
    "node lost": ("FAILED", r"node \d", "The node's ranks are stopped and what they saved is uploaded, the driver stops the "
                  "others. FAILED, the message names the node"),
    "driver lost": ("FAILED", r"exit code -9", "The head knows at once: the job is over, its ranks are stopped and their "
                    "nodes free. FAILED, exit code -9"),
    "supervisor lost": ("FAILED", r"exit code -9 \(supervisor died\)", "The kernel and mobula-init end what it owned, and "
                        "the gang with it. FAILED, \"supervisor died\""),
    "rank lost": ("FAILED", r"rank [01] (was killed by signal 9|exited)|supervisor died", "The attempt ends, the other "
                  "ranks with it. FAILED, the message names rank and cause"),
    "drained": ("SUCCEEDED", "", "A node that ends uploads what was saved first, and there was nothing else to do. "
                "SUCCEEDED"),
    "stopped": ("STOPPED", "", "The stop goes on. STOPPED"),
}

_AGENTS = {"agent of the head": "goes on", "agent of a worker node": "goes on", "both agents": "goes on"}
_DRIVER = {"supervisor of the driver": "supervisor lost", "driver": "driver lost",
           "agent of the head and driver": "driver lost"}
_GANG = {"supervisor of a gang": "rank lost", "init and supervisor of a gang": "node lost",
         "rank on the head": "rank lost", "rank on a worker node": "rank lost"}
_NODE = {"init of the head": "head gone", "init of a worker node": "node lost"}

# Of a process that is missing in TABLE.
NOTE = """`-`: there is none in that phase. In "launching" no front process has started the supervisor of a gang, in "rendezvous" only the
head's, which is killed; it ends with its ranks, before "draining"."""

TABLE = {
    "pending": {**_NODE, **_AGENTS, "init of a worker node": "no nodes"},
    "placement": {**_NODE, **_AGENTS, **_DRIVER, "init of a worker node": "no nodes"},
    "launching": {**_NODE, **_AGENTS, **_DRIVER},
    "rendezvous": {**_NODE, **_AGENTS, **_DRIVER, "supervisor of a gang": "rank lost",
                   "rank on the head": "rank lost"},
    "training": {**_NODE, **_AGENTS, **_DRIVER, **_GANG},
    "saving": {**_NODE, **_AGENTS, **_DRIVER, **_GANG},
    "uploading": {**_NODE, **_AGENTS, **_DRIVER, **_GANG},
    "draining": {**_NODE, **_AGENTS, **_DRIVER, "init of a worker node": "drained"},
    "stopping": {**{p: "stopped" for p in (*_NODE, *_AGENTS, *_DRIVER, *_GANG)},
                 "init of the head": "head gone"},
}

PROCESSES = [*_NODE, *_AGENTS, *_DRIVER, *_GANG]

# Tried by default: every phase and every process at least once.
QUICK = [
    ("pending", "agent of the head"), ("pending", "init of the head"),
    ("placement", "both agents"), ("placement", "supervisor of the driver"),
    ("launching", "agent of a worker node"), ("launching", "driver"),
    ("rendezvous", "rank on the head"), ("rendezvous", "agent of the head"),
    ("training", "rank on a worker node"), ("training", "supervisor of a gang"),
    ("training", "agent of the head and driver"), ("training", "init and supervisor of a gang"),
    ("saving", "rank on a worker node"), ("saving", "init of a worker node"),
    ("uploading", "both agents"), ("uploading", "rank on the head"),
    ("draining", "both agents"), ("draining", "driver"),
    ("stopping", "rank on a worker node"), ("stopping", "agent of the head"),
]  # fmt: skip


def markdown():
    """The table and its legend as they stand in docs/reliability.md."""
    lines = ["| killed | " + " | ".join(PHASES) + " |", "| --- |" + " --- |" * len(PHASES)]
    for process in PROCESSES:
        cells = (TABLE[phase].get(process, "-") for phase in PHASES)
        lines.append(f"| {process} | " + " | ".join(cells) + " |")
    lines += ["", NOTE]
    lines += ["", "| phase | the job stands there because |", "| --- | --- |"]
    lines += [f"| {name} | {why} |" for name, why in PHASES.items()]
    lines += ["", "| outcome | what follows |", "| --- | --- |"]
    lines += [f"| {name} | {sentence} |" for name, (_, _, sentence) in OUTCOMES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
