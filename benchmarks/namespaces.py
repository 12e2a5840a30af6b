"""Several hosts on one Linux machine: network namespaces joined by a bridge, every link limited in both directions.

Each host is a namespace with one interface, `eth0`. The bridge has a namespace to itself, so that the machine's own
network is not touched. Whoever leaves `network` has removed everything: the processes inside, found by their
namespace, the namespaces with their links, and the directory for files; so does whoever is terminated. A run that was
killed is cleared up by the next.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

PREFIX = "plnet-"
SWITCH = f"{PREFIX}switch"
RAY_PORT = 6379
_BINARIES = Path(sys.executable).parent
_RAY = ["start", "--num-cpus=1", "--object-store-memory=80000000"]
_RAY += ["--disable-usage-stats", "--include-log-monitor=false"]
_HERE = Path(__file__).parent
# A token bucket must hold what passes between two ticks of the kernel's clock. At 1 Gbit/s this is 625 KB, which a host
# that was silent sends at once: little beside 45 MB.
_BURST_S = 0.005
_MIN_BURST_BYTES = 64 * 1024
# What a switch port holds before it drops.
_QUEUE_S = 0.05
# Linux's default, whatever this machine's own is. BBR divides a link among the many streams of a server group unevenly:
# ResNet-18's gradient, a server on each of 8 hosts at 100 Mbit/s, takes 9.2 s under it and 7.4 s under this.
CONGESTION_CONTROL = "cubic"
_ALLOWED_CONTROL = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_END_S = 10.0
_JOIN_S = 120.0


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str
    core: int
    """Where its processes run; hosts take turns at the machine's cores. Each so has one, and as many threads."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.name, "taskset", "--cpu-list", str(self.core), *arguments]


@dataclass(frozen=True)
class Network:
    """Hosts on a switch."""

    hosts: tuple[Host, ...]
    directory: Path
    """For files of the hosts' processes; removed with the network."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every process on a host."""
    programs: Path = _BINARIES
    """The folder of `ray`."""

    def limit(self, rate_mbit: float) -> None:
        """Let every link carry so much each way."""
        burst_bytes = max(_MIN_BURST_BYTES, int(rate_mbit * 1e6 / 8 * _BURST_S))
        shape = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", str(burst_bytes), "latency", f"{_QUEUE_S * 1e3}ms"]
        for number, host in enumerate(self.hosts, start=1):
            _run("tc", "-n", host.name, "qdisc", "replace", "dev", "eth0", *shape)
            _run("tc", "-n", SWITCH, "qdisc", "replace", "dev", f"port{number}", *shape)

    def start(self, host: Host, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start a process on a host, in this file's folder; it ends with the network at the latest."""
        variables = {**os.environ, **self.environment}
        return subprocess.Popen(host.command(arguments), env=variables, cwd=_HERE, text=True, stdout=PIPE, stderr=PIPE)

    def run(self, host: Host, arguments: Sequence[str], *, timeout_s: float) -> str:
        """Run a command on a host and return what it prints.

        Raises:
            RuntimeError: it failed or took too long; the message holds what it said.
        """
        return self.run_all({host: arguments}, timeout_s=timeout_s)[0]

    def run_all(self, commands: Mapping[Host, Sequence[str]], *, timeout_s: float) -> list[str]:
        """Run a command on each host at the same time and return what they print.

        Raises:
            RuntimeError: one failed or took too long; the message holds what it said. The others are ended.
        """
        running = {host: self.start(host, command) for host, command in commands.items()}
        give_up_s = time.monotonic() + timeout_s
        outputs = []
        try:
            for host, process in running.items():
                try:
                    output, errors = process.communicate(timeout=max(0.1, give_up_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise RuntimeError(f"{host.name} took longer than {timeout_s:g} s: {commands[host]}") from None
                if process.returncode != 0:
                    raise RuntimeError(f"{host.name} failed: {commands[host]}\n{output[-2000:]}\n{errors[-4000:]}")
                outputs.append(output)
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return outputs

    def start_ray(self, num_hosts: int | None = None) -> str:
        """One Ray node a host, on the first so many; returns the cluster's address once all have joined.

        Raises:
            RuntimeError: a node did not start.
        """
        head, *others = self.hosts[:num_hosts]
        address = f"{head.address}:{RAY_PORT}"
        directory = f"--temp-dir={self.directory / 'ray'}"
        head_only = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", directory]
        self._start_node(head, *head_only)
        for host in others:
            self.join_ray(host, address)
        return address

    def join_ray(self, host: Host, address: str) -> None:
        """One more node of the cluster. Raises RuntimeError if it did not start."""
        self._start_node(host, f"--address={address}")

    def _start_node(self, host: Host, *options: str) -> None:
        command = [str(self.programs / "ray"), *_RAY, *options, f"--node-ip-address={host.address}"]
        try:
            self.run(host, command, timeout_s=_JOIN_S)
        except RuntimeError:  # a Ray whose agents need more than 15 s ends itself, as on a busy machine
            _end_processes([host.name])
            self.run(host, command, timeout_s=_JOIN_S)


def address_of(number: int) -> str:
    """Of a host, the first of which has the number 1."""
    return f"10.77.0.{number}"


@contextmanager
def network(num_hosts: int, *, congestion: str = CONGESTION_CONTROL) -> Iterator[Network]:
    """So many hosts on a switch, without a limit yet.

    Args:
        congestion: TCP's congestion control on every host, as the kernel names it.

    Raises:
        SystemExit: this is not Linux, the user is not root, a tool is missing, or another network is up.
    """
    _require_rights()
    with _only_one(), _termination_is_an_exit():
        _clear()
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))  # the paths of Ray's sockets must be short
        try:
            cores = sorted(os.sched_getaffinity(0))
            hosts = tuple(
                Host(f"{PREFIX}h{number}", address_of(number), cores[number % len(cores)])
                for number in range(1, num_hosts + 1)
            )
            with _allowed(congestion):
                _build(hosts, congestion=congestion)
            yield Network(hosts, directory, _environment())
        finally:
            _clear()


@contextmanager
def _termination_is_an_exit() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",  # Ray's default, 15, would starve beside whatever else runs here
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


def _build(hosts: Sequence[Host], *, congestion: str) -> None:
    _run("ip", "netns", "add", SWITCH)
    _run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
    for number, host in enumerate(hosts, start=1):
        port = f"port{number}"
        _run("ip", "netns", "add", host.name)
        link = ["link", "add", "eth0", "netns", host.name, "type", "veth", "peer", "name", port, "netns", SWITCH]
        _run("ip", *link)
        _run("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        _run("ip", "-n", host.name, "link", "set", "eth0", "up")
        _run("ip", "-n", host.name, "link", "set", "lo", "up")
        setting = f"net.ipv4.tcp_congestion_control={congestion}"
        _run("ip", "netns", "exec", host.name, "sysctl", "-qw", setting)


@contextmanager
def _allowed(congestion: str) -> Iterator[None]:
    """Let namespaces choose it: the kernel keeps from them what the machine does not use until it is told."""
    before = _ALLOWED_CONTROL.read_text().split()
    try:
        if congestion not in before:
            _ALLOWED_CONTROL.write_text(" ".join([*before, congestion]))
        yield
    finally:
        _ALLOWED_CONTROL.write_text(" ".join(before))


def _clear() -> None:
    """End the processes of all our namespaces, and remove these and our directories."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]
    _end_processes(names)
    for name in names:
        _run("ip", "netns", "delete", name)
    for directory in Path("/tmp").glob(f"{PREFIX}*/"):
        shutil.rmtree(directory, ignore_errors=True)


def _end_processes(names: Sequence[str]) -> None:
    """Kill whoever is in the namespaces, until they are empty: nothing in there is worth a farewell.

    Raises:
        RuntimeError: a process does not end.
    """
    until_s = time.monotonic() + _END_S
    while pids := [int(pid) for name in names for pid in _run("ip", "netns", "pids", name).split()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until_s:
            raise RuntimeError(f"processes {pids} in network namespaces {PREFIX}* do not end")
        time.sleep(0.05)


@contextmanager
def _only_one() -> Iterator[None]:
    """Names are the same in every run, so that leftovers are known; two runs at a time would end each other."""
    with Path(f"/run/{PREFIX}lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit("another network benchmark is running; wait for its end") from None
        yield


def _require_rights() -> None:
    if sys.platform != "linux":
        raise SystemExit("network namespaces need Linux")
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this as root, or in a virtual machine or container as root")
    for tool, package in {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux", "sysctl": "procps"}.items():
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing: install {package}")


def _run(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
