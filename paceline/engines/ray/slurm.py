"""What a run asks SLURM for from inside its job."""

import os
import subprocess
import sys
from threading import Event

from paceline.scheduler import Allocation, expand

_LOOK_S = 5.0
_ANSWER_S = 20.0


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
    with nothing to do until the job's time is over. So a refusal is told once, and SLURM is asked again.

    Args:
        is_told: this step is to end, as it does when the job has ended.
    """
    first, *_ = expand(os.environ["SLURM_JOB_NODELIST"])
    job, has_said = os.environ["SLURM_JOB_ID"], False
    while not is_told.wait(_LOOK_S):
        if "DOWN" not in _node(first)[0].get("State", ""):
            continue
        asked = _scontrol("requeue", job)
        if asked.returncode == 0:
            return
        if not has_said:
            print(
                f"host {first} is down, and SLURM does not queue job {job} again: {asked.stderr.strip()}; "
                f"it is asked every {_LOOK_S:.0f} s until the job ends (`scancel {job}`)",
                file=sys.stderr,
                flush=True,
            )
            has_said = True


def _node(host: str) -> tuple[dict[str, str], str]:
    shown = _scontrol("show", "node", "-o", host)
    return dict(field.partition("=")[::2] for field in shown.stdout.split()), shown.stderr.strip()


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What it answers; it has failed if it does not within `_ANSWER_S`."""
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 1, "", str(late))
