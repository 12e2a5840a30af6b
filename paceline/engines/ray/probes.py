"""What the hosts of a cluster are, and whether they reach one another."""

import platform
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast, final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.comm.hosts import interface_with
from paceline.engines.ray.nodes import connected, nodes, own_address
from paceline.errors import RunFailed

_CONNECT_S = 5.0
_PROBE_S = 60.0


@dataclass(frozen=True)
class HostReport:
    """One host of the cluster, and what is wrong with it."""

    address: str
    num_cpus: float
    num_gpus: float
    python: str
    torch: str
    paceline: str
    interface: str
    problems: tuple[str, ...]


@final
class ProbeActor:
    """Looks at one host, and answers the other hosts' calls."""

    def __init__(self) -> None:
        self._server = socket.create_server((own_address(), 0))

    def look(self) -> tuple[tuple[str, int], dict[str, str]]:
        """Where it listens, and what is installed there."""
        address, port = self._server.getsockname()[:2]
        return (address, port), {
            "python": platform.python_version(),
            "torch": _version("torch"),
            "paceline": _version("paceline"),
            "interface": interface_with(address),
        }

    def reach(self, others: list[tuple[str, int]]) -> list[str]:
        """What keeps this host from calling the others."""
        problems = []
        for address, port in others:
            try:
                socket.create_connection((address, port), timeout=_CONNECT_S).close()
            except OSError as error:
                problems.append(f"cannot reach {address}: {error}")
        return problems


def probe(address: str | None, *, insecure: bool = False) -> list[HostReport]:
    """Look at every host of the cluster, or of a local one started for this. Raises UsageError and RunFailed as
    `connected`."""
    with connected(address, insecure=insecure):
        hosts = nodes()
        actors = []
        for host in hosts:
            affinity = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
            configured = cast(Any, ray.remote)(num_cpus=0, scheduling_strategy=affinity)(ProbeActor)
            actors.append(configured.remote())
        try:
            looks = ray.get([actor.look.remote() for actor in actors], timeout=_PROBE_S)
            reaches = ray.get(
                [
                    actor.reach.remote([other for other, _ in looks if other != own])
                    for actor, (own, _) in zip(actors, looks, strict=True)
                ],
                timeout=_PROBE_S + _CONNECT_S * len(hosts),
            )
        except RayError as error:
            raise RunFailed(f"the cluster does not run processes: {error}") from error
        finally:
            for actor in actors:
                ray.kill(actor)
    (first_address, _), first = looks[0]
    reports = []
    for host, (_, facts), problems in zip(hosts, looks, reaches, strict=True):
        for package in ("python", "torch", "paceline"):
            if facts[package] != first[package]:
                problems.append(f"{package} is {facts[package]}, but {first[package]} on {first_address}")
        reports.append(HostReport(host.address, host.num_cpus, host.num_gpus, problems=tuple(problems), **facts))
    return reports


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
