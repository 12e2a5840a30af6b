"""`paceline doctor`: what is wrong with this machine or cluster, and the remedy."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import requires, version
from typing import Annotated

import psutil
import torch
import typer
import zmq
from packaging.requirements import Requirement
from rich.console import Console

from paceline.comm.shared_memory.block import SharedBlock
from paceline.engines.ray import probes
from paceline.engines.ray.nodes import chosen_address
from paceline.errors import PacelineError

_MIN_MEMORY_BYTES = 2 * 1024**3
_MIN_SHM_BYTES = 128 * 1024**2


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    name: str
    is_good: bool
    fact: str
    remedy: str = ""


def doctor(
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster to look at (default: RAY_ADDRESS).")
    ] = None,
) -> None:
    """Check Python, torch, Ray, cores, memory, shared memory and the network, and say what to do where one is wrong."""
    console = Console(soft_wrap=True)
    findings = [look() for look in _LOCAL]
    for finding in findings:
        _show(console, finding)
    for finding in _cluster(address):
        findings.append(finding)
        _show(console, finding)
    num_bad = sum(not finding.is_good for finding in findings)
    console.print("Everything is in order." if num_bad == 0 else f"{num_bad} thing(s) need attention.")
    if num_bad:
        raise typer.Exit(code=1)


def _show(console: Console, finding: Finding) -> None:
    mark = "[green]ok  [/]" if finding.is_good else "[red]bad [/]"
    console.print(f"{mark} {finding.name}: {finding.fact}", highlight=False)
    if not finding.is_good:
        console.print(f"     remedy: {finding.remedy}", highlight=False)


def _python() -> Finding:
    return Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")


def _system() -> Finding:
    is_linux = sys.platform == "linux"
    return Finding("system", is_linux, platform.platform(), "run on Linux: workers of a host share memory its way")


def _torch() -> Finding:
    return _library("torch", f"{torch.__version__}, {torch.cuda.device_count()} CUDA device(s)")


def _ray() -> Finding:
    return _library("ray", version("ray"))


def _library(name: str, fact: str) -> Finding:
    """Whether the installed version is one that Paceline's own installation asks for."""
    wanted = next(r for r in map(Requirement, requires("paceline") or ()) if r.name == name)
    is_good = wanted.specifier.contains(version(name), prereleases=True)
    return Finding(name, is_good, fact, f"install {wanted}, best with Paceline's constraints.txt")


def _zeromq() -> Finding:
    return Finding(
        "ZeroMQ",
        bool(zmq.has("curve")),
        f"{zmq.zmq_version()}, CURVE {'in' if zmq.has('curve') else 'missing'}",
        "reinstall pyzmq from its wheel, which has CURVE",
    )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    remedy = "with one core, workers take turns: expect no speed-up"
    return Finding("cores", cores >= 2, f"{cores} for this process", remedy)


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    return Finding(
        "memory",
        available >= _MIN_MEMORY_BYTES,
        f"{available / 1e9:.1f} GB available",
        "free at least 2 GB: every worker holds the model, its gradients and its data",
    )


def _shared_memory() -> Finding:
    try:
        SharedBlock.create(1 << 20).close()
    except (PacelineError, OSError) as error:
        return Finding("shared memory", False, str(error), "run on Linux with memfd_create allowed (seccomp profile)")
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("shared memory", False, f"/dev/shm: {error.strerror}", "mount a tmpfs on /dev/shm: Ray needs it")
    return Finding(
        "shared memory",
        usage.free >= _MIN_SHM_BYTES,
        f"memfd works; /dev/shm has {usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB",
        "enlarge /dev/shm (docker run --shm-size=1g): Ray keeps its object store there",
    )


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding("loopback", False, str(error), "allow TCP on 127.0.0.1; check firewalls and proxies")
    return Finding("loopback", True, "TCP on 127.0.0.1 works")


_LOCAL: tuple[Callable[[], Finding], ...] = (
    _python,
    _system,
    _torch,
    _ray,
    _zeromq,
    _cores,
    _memory,
    _shared_memory,
    _loopback,
)


def _cluster(address: str | None) -> list[Finding]:
    """Start or reach Ray, and have every pair of its hosts exchange a message over the interfaces that runs use."""
    address = chosen_address(address)
    where = "local Ray" if address is None else f"Ray at {address}"
    try:
        hosts = probes.probe(address)
    except PacelineError as error:
        remedy = "see the message; `ray status` and the logs under /tmp/ray say more"
        return [Finding(where, False, str(error), remedy)]
    findings = [Finding(where, True, f"{len(hosts)} host(s)")]
    for host in hosts:
        findings.append(
            Finding(
                f"host {host.address}",
                not host.problems,
                f"{host.num_cpus:g} CPU, {host.num_gpus:g} GPU, Python {host.python}, torch {host.torch}, "
                f"paceline {host.paceline}, interface {host.interface}" + "".join(f"; {p}" for p in host.problems),
                "give every host the same Python, torch and paceline, and open TCP ports between hosts",
            )
        )
    return findings
