"""Reads TF_CONFIG: which hosts a cluster has, and which of them this is."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from paceline.compat.strategies.shown_errors import show_marked_alone
from paceline.engines.world import current
from paceline.errors import UsageError, unknown

VARIABLE = "TF_CONFIG"
JOBS = ("chief", "worker", "ps")
_EVALUATES = "Paceline evaluates between steps, in the function that @worker.evaluation marks"
_MOST_BYTES = 1 << 20
_MOST_SHOWN = 60  # characters of a value in an error message


class WrongTFConfig(UsageError):
    """TF_CONFIG says what cannot be. Where nobody catches it, Python shows its message alone."""

    is_message_enough = True


@dataclass(frozen=True)
class Task:
    """A process of the cluster: its job, and its place among those of the job."""

    type: str
    index: int


@final
class TFConfigClusterResolver:
    """What TF_CONFIG says: `{"cluster": {"worker": ["host:port", ...], ...}, "task": {"type": ..., "index": ...}}`.

    Jobs are `chief`, `worker` and `ps`. Ports are read and not used: Paceline finds its own. `environment`, which some
    launchers set, says nothing here and is passed over.

    Args:
        text: what the variable would hold; none: what it holds.

    Raises:
        WrongTFConfig: the variable is not set, or something in it is not as above; the message names the field.
    """

    def __init__(self, text: str | None = None) -> None:
        if text is None and current() is None:  # a run shows its workers' errors itself
            show_marked_alone()
        self._cluster, self._task = _read(os.environ.get(VARIABLE) if text is None else text)

    @property
    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """The addresses of every job that has some."""
        return MappingProxyType(self._cluster)

    @property
    def task(self) -> Task | None:
        """The task that this process is; None where TF_CONFIG names none."""
        return self._task

    def num_tasks(self, *jobs: str) -> int:
        """How many tasks these jobs have together: 0 if the cluster lacks them."""
        return len(self._addresses(jobs))

    def hosts(self, *jobs: str) -> tuple[str, ...]:
        """The hosts that the tasks of these jobs are on, each once."""
        return tuple(dict.fromkeys(address.rpartition(":")[0] for address in self._addresses(jobs)))

    def _addresses(self, jobs: tuple[str, ...]) -> list[str]:
        return [address for job in jobs for address in self._cluster.get(job, ())]

    def require_starts(self, *, who: str) -> None:
        """Raise WrongTFConfig unless this task starts the others: the chief or first worker, or who has no task."""
        first = Task("chief" if self.num_tasks("chief") else "worker", 0)
        if self._task not in (None, first):
            assert self._task is not None
            raise WrongTFConfig(
                f"{VARIABLE}: task.type={self._task.type} index={self._task.index} has nothing to start: one command "
                f"on {first.type} {first.index} starts every worker and server of {who}"
            )


def _read(text: str | None) -> tuple[dict[str, tuple[str, ...]], Task | None]:
    if not text:
        raise WrongTFConfig(f"{VARIABLE} is not set; set it, or give workers=")
    if len(text) > _MOST_BYTES:
        raise WrongTFConfig(f"{VARIABLE} has {len(text)} characters, more than {_MOST_BYTES}")
    try:
        read = json.loads(text, object_pairs_hook=_without_twins)
    except WrongTFConfig:
        raise
    except (ValueError, RecursionError) as error:
        reason = "it nests too deep" if isinstance(error, RecursionError) else str(error)[: 2 * _MOST_SHOWN]
        raise WrongTFConfig(f"{VARIABLE} is not JSON: {reason}") from None
    config = _object(read, VARIABLE)
    _require_known(config, ("cluster", "task", "environment"), VARIABLE)
    if "cluster" not in config:
        raise WrongTFConfig(f"{VARIABLE}.cluster is missing; without a cluster leave {VARIABLE} out")
    cluster = _cluster(config["cluster"])
    return cluster, _task(config["task"], cluster) if "task" in config else None


def _cluster(value: Any) -> dict[str, tuple[str, ...]]:
    where = f"{VARIABLE}.cluster"
    jobs = _object(value, where)
    if "evaluator" in jobs:
        raise WrongTFConfig(f"{where}.evaluator has no meaning here: {_EVALUATES}; leave it out")
    _require_known(jobs, JOBS, where)
    cluster: dict[str, tuple[str, ...]] = {}
    owners: dict[str, str] = {}
    for job, addresses in jobs.items():
        if not isinstance(addresses, list):
            raise WrongTFConfig(f'{where}.{job} must be a list of "host:port", not {_shown(addresses)}')
        if not addresses:
            raise WrongTFConfig(f"{where}.{job} is empty; name its hosts, or leave it out")
        for index, address in enumerate(addresses):
            field = f"{where}.{job}[{index}]"
            _require_address(address, field)
            if address in owners:
                raise WrongTFConfig(f"{field} is {_shown(address)}, which {owners[address]} has already")
            owners[address] = field
        cluster[job] = tuple(addresses)
    if len(cluster.get("chief", ())) > 1:
        raise WrongTFConfig(f"{where}.chief must be one host, not {len(cluster['chief'])}")
    return cluster


def _require_address(value: Any, field: str) -> None:
    if isinstance(value, str) and value.isascii() and value.isprintable():
        host, _, port = value.rpartition(":")
        is_host = bool(host) and not set(host) & set(" /@?#,\"'\\") and (":" not in host or host[0] + host[-1] == "[]")
        if is_host and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536:
            return
    raise WrongTFConfig(f'{field} must be "host:port" with a port of 1 to 65535, not {_shown(value)}')


def _task(value: Any, cluster: Mapping[str, tuple[str, ...]]) -> Task:
    where = f"{VARIABLE}.task"
    task = _object(value, where)
    _require_known(task, ("type", "index"), where)
    for field in ("type", "index"):
        if field not in task:
            raise WrongTFConfig(f"{where}.{field} is missing")
    job, index = task["type"], task["index"]
    if job == "evaluator":
        raise WrongTFConfig(f"{where}.type=evaluator has nothing to do: {_EVALUATES}")
    if not isinstance(job, str) or job not in cluster:
        raise WrongTFConfig(
            f"{where}.type must be one of {', '.join(cluster) or 'the jobs of a cluster'}, not {_shown(job)}"
        )
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(cluster[job]):
        raise WrongTFConfig(f"{where}.index must be 0 to {len(cluster[job]) - 1} for {job}, not {_shown(index)}")
    return Task(job, index)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise WrongTFConfig(f"{VARIABLE}: the field {_shown(key)} stands twice in one object")
        found[key] = value
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongTFConfig(f"{where} must be an object, not {_shown(value)}")
    return value


def _require_known(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in found:
        if key not in known:
            raise WrongTFConfig(str(unknown(f"field of {where}:", key[:_MOST_SHOWN], known)))


def _shown(value: Any) -> str:
    """A value as JSON has it, cut where it is long, with all that is not ASCII escaped."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "what nests so deep"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
