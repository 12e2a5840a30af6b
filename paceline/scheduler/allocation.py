"""The hosts that a scheduler has given this job, as its environment tells."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from paceline.errors import UsageError
from paceline.scheduler.hostlist import expand

_WHOLE_JOB = (None, "", "4294967291", "4294967290")
"""SLURM_STEP_ID in a job script, by older and newer releases, and in an interactive shell that salloc gives."""


@final
@dataclass(frozen=True)
class Allocation:
    """A job's hosts. The job's script runs on the first."""

    job: str
    hosts: tuple[str, ...]
    cores: tuple[int, ...]
    """The job's share of each host."""
    prefixes: tuple[tuple[str, ...], ...] | None = None
    """What starts a command on each host, put before it. None: `srun` starts it on many at once."""
    meeting_port: int | None = None
    """Each host has started this program, and the others join the first one's cluster at this port. None: the first
    host starts them."""
    here: int = 0
    """This host's place among them; never another than the first but where they come by themselves."""


def from_slurm(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation of SLURM that this process is the job script of, or an interactive shell in. None outside one, and
    in another step of it (`srun`), where each process would start a cluster of its own.

    Raises:
        UsageError: SLURM's variables contradict each other, or this is not the job's first host.
    """
    job, hostlist = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not hostlist or environment.get("SLURM_STEP_ID") not in _WHOLE_JOB:
        return None
    hosts = tuple(expand(hostlist))
    here = environment.get("SLURMD_NODENAME")
    if here != hosts[0]:
        where = (
            f"this is {here!r}" if here else "this is none of its hosts, as a shell of salloc's on a login node is not"
        )
        raise UsageError(
            f"the cluster is started on {hosts[0]!r}, the first host of job {job}, and {where}; use sbatch or "
            "paceline slurm, or name a cluster with --address"
        )
    cores = _cores(environment.get("SLURM_JOB_CPUS_PER_NODE", f"1(x{len(hosts)})"))
    if len(cores) != len(hosts):
        raise UsageError(f"job {job} has {len(hosts)} hosts, and SLURM_JOB_CPUS_PER_NODE tells of {len(cores)}")
    return Allocation(job, hosts, cores)


def _cores(text: str) -> tuple[int, ...]:
    """The cores of each host, from a list such as `8(x2),4`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"SLURM_JOB_CPUS_PER_NODE is {text!r}, and not as in 8(x2),4")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)
