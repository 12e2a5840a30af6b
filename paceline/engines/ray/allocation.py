"""A Ray cluster over the hosts of a batch job, which ends with the run."""

import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray

from paceline.engines.ray import allocated_node, slurm
from paceline.engines.ray.logged_process import LoggedProcess
from paceline.engines.ray.remote_start import shared_environment
from paceline.errors import RunFailed
from paceline.scheduler import Allocation

START_S = 30.0
"""Time until all hosts have come that are started from the first."""
MEET_S = 300.0
"""Time until those have come that start by themselves."""


@contextmanager
def cluster_over(allocation: Allocation, directory: Path, connect: Callable[[str], object]) -> Iterator[None]:
    """A cluster of the job's hosts, with ports of its own, so that jobs share hosts. Nothing else that runs on them is
    touched. The caller has set Ray's token.

    Args:
        directory: for Ray's sockets and logs, on every host.
        connect: connects this process to the cluster at an address.

    Raises:
        RunFailed: a host does not come within 30 s; the message has what Ray or the scheduler's launcher says. Those
            that start by themselves have 5 minutes.
    """
    with ExitStack() as stack:
        first = allocation.hosts[0]
        host = _own_address(allocation)
        port = allocation.meeting_port or _free_port(host)
        address = f"{host}:{port}"
        head = _start(stack, directory / "head.log", allocated_node.head(host, port, directory, allocation.cores[0]))
        with ExitStack() as starting:
            joining = [
                (_start(stack, directory / f"others-{number}.log", command), hosts)
                for number, (command, hosts) in enumerate(_on_others(starting, allocation, address, directory))
            ]
            _wait_for([(head, first)], lambda: allocated_node.listens(host, port))
            connect(address)
            if allocation.meeting_port is None:
                _wait_for(joining, lambda: _num_hosts() == len(allocation.hosts))
            else:
                _meet(allocation)
        yield


def _start(stack: ExitStack, log: Path, command: Sequence[str]) -> LoggedProcess:
    process = LoggedProcess(command, log)
    stack.callback(process.stop)
    return process


def _on_others(
    starting: ExitStack, allocation: Allocation, address: str, directory: Path
) -> Iterator[tuple[list[str], str]]:
    """The commands that start Ray on all hosts but the first, each with the hosts that it is for. `starting` ends once
    they have."""
    node = [sys.executable, "-m", allocated_node.__name__, address, str(directory)]
    if allocation.meeting_port is not None:
        return
    if allocation.prefixes is None:
        yield [*slurm.srun(allocation), *node], ", ".join(allocation.hosts[1:])
        return
    # pbsdsh starts a program in an environment that has nothing of this one, not even the cluster's token. A command
    # line could be read by everybody on the host, so a file of the job's directory has it, which only the user reads.
    environment = starting.enter_context(shared_environment())
    program = [sys.executable, "-I", str(Path(allocated_node.__file__).with_name("remote_start.py")), str(environment)]
    others = zip(allocation.hosts[1:], allocation.cores[1:], allocation.prefixes[1:], strict=True)
    for host, cores, prefix in others:
        yield [*prefix, *program, *node, str(cores)], host


def _own_address(allocation: Allocation) -> str:
    """This host's address on the way to the second. Its name may not tell: many a host has 127.0.1.1 for its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((_address_of(allocation, allocation.hosts[1]), 9))  # sends nothing
        return str(way.getsockname()[0])


def _address_of(allocation: Allocation, host: str) -> str:
    """As the scheduler reaches the host; raises RunFailed if nobody knows it."""
    name, said = slurm.address_of(host) if allocation.prefixes is None else (host, "")
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise RunFailed(f"no address is known of host {host!r} of this job: {error}{said}") from error


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def _wait_for(joining: Sequence[tuple[LoggedProcess, str]], have_come: Callable[[], bool]) -> None:
    """Raises RunFailed, which names the hosts whose launcher has ended, or all if none has."""
    give_up_s = time.monotonic() + START_S
    while not have_come():
        ended = [(process, hosts) for process, hosts in joining if process.has_ended]
        if ended or time.monotonic() > give_up_s:
            late = "" if ended else f" within {START_S:.0f} s"
            process, _ = (ended or joining)[0]
            raise RunFailed(f"Ray does not start on {', '.join(h for _, h in ended or joining)}{late}: {process.words}")
        time.sleep(0.1)


def _meet(allocation: Allocation) -> None:
    """Wait for hosts that start by themselves; raises RunFailed if they are too few after `MEET_S`."""
    give_up_s = time.monotonic() + MEET_S
    while (num := _num_hosts()) < len(allocation.hosts):
        if time.monotonic() > give_up_s:
            come = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            missing = [host for host in allocation.hosts[1:] if _address_of(allocation, host) not in come]
            raise RunFailed(
                f"{num} of {len(allocation.hosts)} hosts have come within {MEET_S:.0f} s; missing are "
                f"{', '.join(missing)}: look into what paceline says there"
            )
        time.sleep(0.2)


def _num_hosts() -> int:
    """How many hosts have come to the cluster, and are there."""
    return sum(node["Alive"] for node in ray.nodes())
