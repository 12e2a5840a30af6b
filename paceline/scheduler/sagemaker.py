"""Hosts of a training job of SageMaker, which starts one program on each of them, and what its settings ask for."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from paceline.errors import UsageError
from paceline.scheduler.allocation import Allocation

CONFIGURATION = Path("/opt/ml/input/config")
"""Where SageMaker puts its files in a container: resourceconfig.json and hyperparameters.json."""
MEETING_PORT = 6379
_MOST_BYTES = 1024 * 1024
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_MOST_PROCESSES = 1024


def from_sagemaker(environment: Mapping[str, str], configuration: Path = CONFIGURATION) -> Allocation | None:
    """The hosts of the job, by `SM_RESOURCE_CONFIG` or else the file resourceconfig.json. None outside a job.

    Raises:
        UsageError: the hosts are no list of names with this one among them, or MPI has started this process, as it does
            by SageMaker's setting `mpi`, whose launcher would start it many times on a host.
    """
    text, where = _text(environment, "SM_RESOURCE_CONFIG", configuration / "resourceconfig.json")
    if text is None:
        return None
    read = _object(text, where)
    hosts, here = read.get("hosts"), read.get("current_host")
    if not isinstance(hosts, list) or not hosts or not all(_is_name(host) for host in hosts):
        raise UsageError(f"{where} has no list of names of hosts, but {str(hosts)[:80]!r}")
    hosts = sorted(hosts)  # all are to take the same for the first
    if here not in hosts or len(set(hosts)) != len(hosts):
        raise UsageError(f"{where} says that this is {str(here)[:80]!r}, and names {', '.join(hosts)[:200]}")
    if len(hosts) > 1 and "OMPI_COMM_WORLD_RANK" in environment:
        raise UsageError(
            "MPI has started this process, and paceline run is to be started once a host: let the container's own "
            "program be paceline run, and not an entry point of SageMaker's toolkit with the setting mpi"
        )
    cores = environment.get("SM_NUM_CPUS", "")
    number = int(cores) if re.fullmatch(r"[1-9][0-9]{0,4}", cores) else 1
    job = environment.get("TRAINING_JOB_NAME", "of SageMaker")
    place = hosts.index(here)
    return Allocation(job, tuple(hosts), (number,) * len(hosts), (), meeting_port=MEETING_PORT, here=place)


@final
@dataclass(frozen=True)
class Wanted:
    """The options of `paceline run` that do what the estimator's `distribution` asks for."""

    setting: str
    strategy: str
    workers: int


def wanted(environment: Mapping[str, str], hosts: int, configuration: Path = CONFIGURATION) -> Wanted | None:
    """The settings `parameter_server` and `mpi`, by `SM_FRAMEWORK_PARAMS` or else the file hyperparameters.json. For
    the first SageMaker starts a server and a worker on each host, asynchronous; for the second as many processes a host
    as asked for, which all-reduce. None: neither is on.

    Raises:
        UsageError: the number of processes a host is none, or what is to be read is no JSON object.
    """
    text, where = _text(environment, "SM_FRAMEWORK_PARAMS", configuration / "hyperparameters.json")
    if text is None:
        return None
    settings = _object(text, where)
    if _is_on(settings.get("sagemaker_parameter_server_enabled")):
        return Wanted("parameter_server", f"ps-asp:servers={hosts}", hosts)
    if not _is_on(settings.get("sagemaker_mpi_enabled")):
        return None
    per_host = str(settings.get("sagemaker_mpi_num_of_processes_per_host", 1)).strip('"')
    if not re.fullmatch(r"[1-9][0-9]{0,3}", per_host) or int(per_host) > _MOST_PROCESSES:
        raise UsageError(
            f"{where} asks for {per_host[:40]!r} processes a host, which is no number up to {_MOST_PROCESSES}"
        )
    return Wanted("mpi", "all-reduce", hosts * int(per_host))


def _is_on(value: object) -> bool:
    """A hyperparameter is a text in the file, which may be JSON itself, and what that says in the variable."""
    return str(value).strip('"').lower() == "true"


def _is_name(host: object) -> bool:
    return isinstance(host, str) and _HOST.fullmatch(host) is not None


def _text(environment: Mapping[str, str], variable: str, file: Path) -> tuple[str | None, str]:
    """Reads the variable or, without it, the file. Returns the text, None if there is neither, and which was read."""
    if variable in environment:
        return environment[variable], variable
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None, str(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{file} is larger than {_MOST_BYTES >> 20} MiB, so none of SageMaker's")
    return content.decode(errors="replace"), str(file)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON: {str(error)[:200]}") from error
    if not isinstance(read, dict):
        raise UsageError(f"{where} is no JSON object, but {text[:80]!r}")
    return read
