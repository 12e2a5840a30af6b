"""`paceline doctor`: what is wrong with this machine or cluster, and the remedy."""

import itertools
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires, version
from typing import Annotated

import psutil
import torch
import typer
import zmq
from packaging.requirements import Requirement
from rich.console import Console

from paceline.cli import common_options
from paceline.comm.shared_memory.block import SharedBlock
from paceline.engines.ray import probes
from paceline.engines.ray.nodes import chosen_address
from paceline.errors import PacelineError, UsageError

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
    insecure: common_options.Insecure = False,
) -> None:
    """Check Python, torch, Ray, cores, memory, shared memory and the network, and say what to do where one is wrong."""
    console = Console(soft_wrap=True)
    num_bad = 0
    for finding in itertools.chain(_local(), _cluster(address, insecure=insecure)):
        _show(console, finding)
        num_bad += not finding.is_good
    console.print("Everything is in order." if num_bad == 0 else f"{num_bad} thing(s) need attention.")
    if num_bad:
        raise typer.Exit(code=1)


def _show(console: Console, finding: Finding) -> None:
    mark = "[green]ok  [/]" if finding.is_good else "[red]bad [/]"
    console.print(f"{mark} {finding.name}: {finding.fact}", highlight=False)
    if finding.remedy and not finding.is_good:
        console.print(f"     remedy: {finding.remedy}", highlight=False)


def _local() -> Iterator[Finding]:
    """Findings about this machine."""
    yield Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")
    is_linux = sys.platform == "linux"
    yield Finding("system", is_linux, platform.platform(), "run on Linux: workers of a host share memory its way")
    yield _library("torch", f"{torch.__version__}, {torch.cuda.device_count()} CUDA device(s)")
    yield _library("ray", version("ray"))
    curve = f"CURVE {'in' if zmq.has('curve') else 'missing'}"
    remedy = "reinstall pyzmq from its wheel, which has CURVE"
    yield Finding("ZeroMQ", bool(zmq.has("curve")), f"{zmq.zmq_version()}, {curve}", remedy)
    cores = len(os.sched_getaffinity(0))
    remedy = "with one core, workers take turns: expect no speed-up"
    yield Finding("cores", cores >= 2, f"{cores} for this process", remedy)
    available = psutil.virtual_memory().available
    remedy = "free at least 2 GB: every worker holds the model, its gradients and its data"
    yield Finding("memory", available >= _MIN_MEMORY_BYTES, f"{available / 1e9:.1f} GB available", remedy)
    yield _shared_memory()
    yield _loopback()


def _library(name: str, fact: str) -> Finding:
    """Whether the installed version is one that Paceline's own installation asks for."""
    wanted = next(r for r in map(Requirement, requires("paceline") or ()) if r.name == name)
    is_good = wanted.specifier.contains(version(name), prereleases=True)
    return Finding(name, is_good, fact, f"install {wanted}, best with Paceline's constraints.txt")


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


def _cluster(address: str | None, *, insecure: bool) -> Iterator[Finding]:
    """Start or reach Ray, and have every pair of its hosts exchange a message over the interfaces that runs use."""
    address = chosen_address(address)
    where = "local Ray" if address is None else f"Ray at {address}"
    try:
        hosts = probes.probe(address, insecure=insecure)
    except UsageError as error:  # says what to do
        yield Finding(where, False, str(error))
        return
    except PacelineError as error:
        fact, _, _ = str(error).partition("; `paceline doctor")
        remedy = "start Ray there, or open its port (6379, if none was named); its logs under /tmp/ray say more"
        yield Finding(where, False, fact, remedy)
        return
    yield Finding(where, True, f"{len(hosts)} host(s)")
    for host in hosts:
        versions = f"Python {host.python}, torch {host.torch}, paceline {host.paceline}"
        said = f"{host.num_cpus:g} CPU, {host.num_gpus:g} GPU, {versions}, interface {host.interface}"
        remedy = "give every host the same Python, torch and paceline, and open TCP ports between hosts"
        yield Finding(f"host {host.address}", not host.problems, "; ".join([said, *host.problems]), remedy)
