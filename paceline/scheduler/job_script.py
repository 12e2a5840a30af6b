"""The job script that `paceline slurm` writes: it can be read, changed and kept."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

_NOTICE_S = 90


@final
@dataclass(frozen=True)
class Asked:
    """What a job asks SLURM for.

    Args:
        name: of the job.
        nodes: hosts.
        cores: of each host.
        gpus: of each host.
        options: further options of sbatch, without the dashes, such as `{"time": "01:00:00"}`.
    """

    name: str
    nodes: int
    cores: int
    gpus: int
    options: Mapping[str, str]


@final
@dataclass(frozen=True)
class Job:
    """What a job runs, and asks for.

    Args:
        command: `paceline run` with all that it is to be given, but the directory of its results.
        directory: where results go; the job's number is put behind.
    """

    asked: Asked
    command: Sequence[str]
    directory: str
    checkpoint: str
    """The file in there that a run goes on from."""
    interrupted: int
    """The status of a run that was interrupted, which alone has something left to do."""
    outlives_hosts: bool = False
    """The run goes on when one of its hosts dies, and so does the job, unless that host is the first."""


def job_script(job: Job) -> str:
    """A script for bash. SLURM tells it 90 s before the job's time is over: the run then saves where it is and ends,
    and the job goes back into the queue. Started again, it goes on from there."""
    lives_on = {"no-kill": ""} if job.outlives_hosts else {}
    head = _head(job.asked, {"signal": f"B:USR1@{_NOTICE_S}", "requeue": "", "open-mode": "append", **lives_on})
    program, first, *rest = job.command
    return f"""{head}

results={shlex.quote(job.directory)}-$SLURM_JOB_ID
goes_on=(--out "$results")
if [ -e "$results/{job.checkpoint}" ]; then
    goes_on=(--resume "$results")
elif [ -e "$results" ]; then
    mv "$results" "$results-before-${{SLURM_RESTART_COUNT:-0}}"  # it ended before it had saved anything
fi

{shlex.quote(program)} {shlex.quote(first)} "${{goes_on[@]}}" {shlex.join(rest)} &
run=$!

# The job's time is nearly over: Paceline saves a checkpoint on SIGTERM, and the job is queued again.
again=no
trap 'again=yes; kill -TERM "$run" 2>/dev/null' USR1
trap 'kill -TERM "$run" 2>/dev/null' TERM

# Not by `wait`: when a signal ends that as the run ends, bash loses the run's status. Traps are run between two sleeps.
while kill -0 "$run" 2>/dev/null; do sleep 1; done
trap '' USR1 TERM
wait "$run"; status=$?
if [ "$again" = yes ] && [ "$status" -eq {job.interrupted} ]; then  # else it had come to its end, or failed
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def array_script(asked: Asked, command: Sequence[str], *, num_tasks: int) -> str:
    """A script for bash: a job of many tasks, each of which runs `paceline compare` for the run of its own number, from
    1. A task whose host is lost is queued again."""
    head = _head(asked, {"array": f"1-{num_tasks}", "requeue": "", "open-mode": "append"})
    program, first, *rest = command
    return f"""{head}

exec {shlex.quote(program)} {shlex.quote(first)} --point "$SLURM_ARRAY_TASK_ID" {shlex.join(rest)}
"""


def _head(asked: Asked, own: Mapping[str, str]) -> str:
    """The lines that sbatch reads; `own`: options that the user's may replace."""
    asks = {
        "job-name": asked.name,
        "nodes": str(asked.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(asked.cores),
        **({"gpus-per-node": str(asked.gpus)} if asked.gpus else {}),
        **own,
        **asked.options,
    }
    lines = [f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in asks.items()]
    return "\n".join(["#!/bin/bash", *lines])
