"""What a job asks of SLURM, on its hosts."""

import os
import subprocess
from threading import Event

from paceline.scheduler import Allocation, expand

_LOOK_S = 5.0


def srun(allocation: Allocation) -> list[str]:
    """What starts a command on each host but the first, put before it."""
    number = len(allocation.hosts) - 1
    return [
        "srun",
        f"--nodes={number}",
        f"--ntasks={number}",
        "--ntasks-per-node=1",
        f"--exclude={allocation.hosts[0]}",
        f"--cpus-per-task={min(allocation.cores[1:])}",
        "--kill-on-bad-exit=0",  # where one ends, or its host dies, the others go on
        "--no-kill",
        "--overlap",
    ]


def address_of(host: str) -> tuple[str, str]:
    """The host's address, or its name if SLURM does not know it, and what SLURM says against it."""
    fields, complaint = _node(host)
    return fields.get("NodeAddr", host), f"; {complaint}"


def queue_again_without_first_host(is_told: Event) -> None:
    """Give the job back if its first host, which runs its script, is dead. With --no-kill SLURM would leave the others
    with nothing to do until the job's time is over.

    Args:
        is_told: this step is to end, as it does when the job has ended.
    """
    first, *_ = expand(os.environ["SLURM_JOB_NODELIST"])
    while not is_told.wait(_LOOK_S):
        if "DOWN" in _node(first)[0].get("State", ""):
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
            return


def _node(host: str) -> tuple[dict[str, str], str]:
    shown = subprocess.run(["scontrol", "show", "node", "-o", host], capture_output=True, text=True, check=False)
    return dict(field.partition("=")[::2] for field in shown.stdout.split()), shown.stderr.strip()
