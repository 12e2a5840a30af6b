"""Hosts of jobs of PBS and LSF, which name a host once for each of its slots."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.scheduler.allocation import Allocation

_MOST_BYTES = 16 * 1024 * 1024
_MOST_SLOTS = 1_000_000
# Names go onto command lines, so none may begin with a dash.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_REMEDY = "start the job anew, or name a cluster with --address"


def from_pbs(environment: Mapping[str, str], here: str | None) -> Allocation | None:
    """The allocation of PBS (OpenPBS, PBS Professional, Torque): `PBS_NODEFILE` has a line a slot.

    None outside a job, and in a task that pbsdsh or MPI has started.

    Args:
        here: this host's name; None: not checked.

    Raises:
        UsageError: the file is missing, empty, too large or no list of hosts, or this is not the first host of several.
    """
    job, file = environment.get("PBS_JOBID"), environment.get("PBS_NODEFILE")
    if not job or not file or environment.get("PBS_TASKNUM", "1") not in ("", "1"):
        return None
    where = f"PBS_NODEFILE {file!r}"
    slots = _lines(Path(file), where)
    cores = _counted(slots, where)
    _require_first(tuple(cores), job, here)
    # pbsdsh knows a host by the number of a line.
    prefixes = tuple(("pbsdsh", "-n", str(slots.index(host)), "--") for host in cores)
    return Allocation(job, tuple(cores), tuple(cores.values()), prefixes)


def from_lsf(environment: Mapping[str, str], here: str | None) -> Allocation | None:
    """The allocation of LSF: `LSB_DJOB_HOSTFILE` has a line a slot; without it, `LSB_MCPU_HOSTS` is as in `a 4 b 2`.

    None outside a job, and in a task that blaunch has started.

    Args:
        here: this host's name; None: not checked.

    Raises:
        UsageError: the file is missing, empty, too large or no list of hosts, so the variable, or this is not the
            first host of several.
    """
    job = environment.get("LSB_JOBID")
    file, pairs = environment.get("LSB_DJOB_HOSTFILE"), environment.get("LSB_MCPU_HOSTS")
    if not job or not (file or pairs) or environment.get("LSF_PM_TASKID"):
        return None
    if file:
        where = f"LSB_DJOB_HOSTFILE {file!r}"
        cores = _counted(_lines(Path(file), where), where)
    else:
        cores = _paired(pairs or "")
    _require_first(tuple(cores), job, here)
    return Allocation(job, tuple(cores), tuple(cores.values()), tuple(("blaunch", host) for host in cores))


def _lines(file: Path, where: str) -> list[str]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}; {_REMEDY}") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{where} is larger than {_MOST_BYTES >> 20} MiB, so no list of hosts; {_REMEDY}")
    return [line.strip() for line in content.decode(errors="replace").splitlines() if line.strip()]


def _counted(slots: Sequence[str], where: str) -> dict[str, int]:
    """Slots by host, in the order in which hosts first come."""
    if not slots:
        raise UsageError(f"{where} names no host; {_REMEDY}")
    counts = dict(Counter(slots))
    for host in counts:
        _require_name(host, where)
    return counts


def _paired(text: str) -> dict[str, int]:
    where = "LSB_MCPU_HOSTS"
    words = text.split()
    counts: dict[str, int] = {}
    for host, number in zip(words[::2], words[1::2], strict=False):
        _require_name(host, where)
        if not re.fullmatch(r"[1-9][0-9]{0,6}", number) or int(number) > _MOST_SLOTS:
            raise UsageError(f"{where} gives {host!r} {number[:40]!r} slots, and not a number as in a 4 b 2; {_REMEDY}")
        counts[host] = counts.get(host, 0) + int(number)
    if not words or len(words) % 2:
        raise UsageError(f"{where} is {text[:80]!r}, and not as in a 4 b 2; {_REMEDY}")
    return counts


def _require_name(host: str, where: str) -> None:
    if _HOST.fullmatch(host) is None:
        raise UsageError(f"{where} has {host[:80]!r}, which is no host's name; {_REMEDY}")


def _require_first(hosts: Sequence[str], job: str, here: str | None) -> None:
    """Names may be with their domain or without. One host alone needs no cluster, whatever it calls itself."""
    first = hosts[0]
    if here is not None and len(hosts) > 1 and _short(first) != _short(here):
        raise UsageError(
            f"the cluster is started on {first!r}, the first host of job {job}, and this is {here!r}; call paceline "
            "run in the job's script, or name a cluster with --address"
        )


def _short(host: str) -> str:
    return host.partition(".")[0].lower()
