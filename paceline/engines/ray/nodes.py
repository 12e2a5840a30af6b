"""The Ray cluster a run uses: connected to or started for it, and which node gets which process."""

import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray

from paceline.comm.hosts import is_of_this_host
from paceline.engines.ray.allocated_node import OBJECT_STORE_BYTES, RAY_SETTINGS
from paceline.engines.ray.allocation import cluster_over
from paceline.engines.ray.forks.launching import served
from paceline.engines.ray.interrupts import hold_back_interrupts, keep_handlers
from paceline.engines.ray.local_directory import RAYS_OWN, local_directory, same_directory
from paceline.engines.ray.local_start import start_local
from paceline.engines.ray.meeting_host import directory_of
from paceline.engines.ray.tokens import jobs_token, own_token, require_token_mode, users_token
from paceline.errors import RunFailed, UsageError
from paceline.scheduler import Allocation, from_environment
from paceline.threads import let_idle_threads_sleep

_CONNECT_S, _ANSWER_S, _LOOK_S = 5.0, 0.5, 0.5


@dataclass(frozen=True)
class Node:
    """A host as Ray knows it. Two nodes are two hosts, even on one machine."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: float
    port: int = 0

    @property
    def answers(self) -> bool:
        """Whether Ray is there. Of a host that has died Ray itself says so after a minute."""
        try:
            socket.create_connection((self.address, self.port), timeout=_ANSWER_S).close()
        except OSError:
            return False
        return True


def chosen_address(address: str | None) -> str | None:
    """The one given, or what Ray's own variable RAY_ADDRESS says; none: no cluster is named."""
    named = address or os.environ.get("RAY_ADDRESS")
    return None if named in ("", "local") else named


def is_of_this_host_alone(address: str | None) -> bool:
    """Whether a run would start a Ray of its own on this host: no cluster is named or connected to, and no job spans
    several hosts. Raises UsageError as `from_environment`."""
    if ray.is_initialized() or chosen_address(address) is not None:
        return False
    allocation = from_environment(os.environ, socket.gethostname())
    return allocation is None or len(allocation.hosts) == 1


@contextmanager
def connected(address: str | None, *, insecure: bool = False, num_workers: int = 0) -> Iterator[None]:
    """A connection to the cluster at the chosen address, or to one started here that ends with the run.

    A connection that the calling process already has is used and left as it is.

    Args:
        insecure: the cluster may be one that takes work from anybody, without a token.
        num_workers: for so many members, but at most one a core, a Ray that is started here has a process ready.

    Raises:
        UsageError: the calling process is connected to another cluster, or the cluster asks for no token.
        RunFailed: the cluster does not answer; the message says what was tried.
    """
    if ray.is_initialized():
        own = connected_to()
        if address is not None and not _is_same(address, own):
            raise UsageError(f"this process is connected to Ray at {own}, not at {address}; call ray.shutdown() first")
        require_token_mode(own, insecure=insecure)
        yield
        return
    address = chosen_address(address)
    with ExitStack() as until_disconnected:
        try:
            # Ray that is interrupted while it starts can crash the process; a second Ctrl-C takes that risk.
            with hold_back_interrupts(patience=1), keep_handlers():
                _connect(address, until_disconnected, insecure=insecure, num_workers=num_workers)
            yield
        finally:
            with hold_back_interrupts():
                ray.shutdown()


def connected_to() -> str:
    """The address of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def _is_same(address: str, own: str) -> bool:
    """Whether an address as users give it names the cluster at `own`, as far as can be told."""
    if address == "auto" or "://" in address:
        return True
    host, _, port = address.rpartition(":")
    own_host, _, own_port = own.rpartition(":")
    try:
        named, known = socket.gethostbyname(host), socket.gethostbyname(own_host)
    except OSError:
        return False
    # Ray that is named by the loopback tells its address on the network.
    is_here = ip_address(named).is_loopback and is_of_this_host(known)
    return port == own_port and (named == known or is_here)


def _connect(address: str | None, until_disconnected: ExitStack, *, insecure: bool, num_workers: int) -> None:
    # Without these, Ray prints a notice about accelerators for every start, and one about every process that died.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    let_idle_threads_sleep()  # in a notebook, too: the processes that Ray starts inherit it
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        allocation = from_environment(os.environ, socket.gethostname()) if address is None else None
        if allocation is not None and len(allocation.hosts) > 1:
            until_disconnected.enter_context(_spanned(allocation, partial(ray.init, **common)))
        elif address is None:
            until_disconnected.enter_context(own_token())
            directory = Path(until_disconnected.enter_context(local_directory()))
            cores = len(os.sched_getaffinity(0))
            start_local(
                directory / RAYS_OWN,
                until_disconnected.enter_context(served(directory)),
                num_cpus=cores,
                object_store_memory=OBJECT_STORE_BYTES,
                _system_config=_system_config(min(cores, num_workers)),
                **common,
            )
        else:
            _require_listener(address)
            until_disconnected.enter_context(users_token(address, insecure=insecure))
            _join(address, common)
    except UsageError:
        raise
    except Exception as error:
        where = "start a local Ray" if address is None else f"connect to Ray at {address}"
        doctor = "paceline doctor" if address is None else f"paceline doctor --address {address}"
        raise RunFailed(f"cannot {where}: {error}; `{doctor}` checks what may be wrong") from error


@contextmanager
def _spanned(allocation: Allocation, connect: Callable[[str], object]) -> Iterator[None]:
    """A cluster over a job's hosts, with what protects it and a place for its files. Raises UsageError on a host that
    is not the first."""
    if allocation.here != 0:
        own, first = allocation.hosts[allocation.here], allocation.hosts[0]
        raise UsageError(
            f"this is {own!r}, and the cluster is started on {first!r}; call paceline run or paceline compare on "
            "all hosts of the job, or name a cluster with --address"
        )
    if allocation.meeting_port is None:
        with own_token(), local_directory() as made, cluster_over(allocation, Path(made), connect):
            yield
        return
    directory = directory_of(allocation)
    with jobs_token(), same_directory(directory), cluster_over(allocation, directory, connect):
        yield


def _join(address: str, options: dict[str, Any]) -> None:
    """Connect to a cluster. At an address of Ray's client, a server there forks a process for each client. Now and then
    that process dies as it begins (ray-project/ray, issue 63202). The server lives on, and is asked for another."""
    for is_last in (False, False, True):
        try:
            ray.init(address=address, **options)
            return
        except ConnectionAbortedError:
            if is_last:
                raise
            ray.shutdown()


def _system_config(num_ready: int) -> dict[str, Any]:
    config: dict[str, Any] = {**RAY_SETTINGS}
    if num_ready > 0:
        # Processes load what members need while Ray still starts. Ray would start one a core, so their number is
        # limited, by how many may start at a time.
        config["enable_worker_prestart"] = True
        config["worker_maximum_startup_concurrency"] = num_ready
        config["preload_python_modules"] = ["paceline.engines.ray.preload"]
    return config


def _require_listener(address: str) -> None:
    """Raises OSError if nobody listens there; Ray itself would try for a minute and more. Raises UsageError for what
    is no address."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() and "://" not in address and address != "auto":
        raise UsageError(f"{address!r} is no address of Ray's; give HOST:PORT, ray://HOST:PORT or auto")
    if port.isdigit():
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=_CONNECT_S).close()


def own_address() -> str:
    """The address under which the cluster's other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


def own_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def nodes() -> list[Node]:
    """The nodes that are alive, the driver's own first, the others by id."""
    own = own_node_id()
    alive = [
        Node(
            info["NodeID"],
            info["NodeManagerAddress"],
            info["Resources"].get("CPU", 0.0),
            info["Resources"].get("GPU", 0.0),
            info["NodeManagerPort"],
        )
        for info in ray.nodes()
        if info["Alive"]
    ]
    return sorted(alive, key=lambda node: (node.node_id != own, node.node_id))


def answering(hosts: Sequence[Node], say: Callable[[str], None]) -> list[Node]:
    """Those that answer, or all where none does, as they may not be reached from here; says which are left out. Where
    a host has just died Ray still lists it, and what is placed there never starts."""
    there = [host for host in hosts if host.answers]
    if not there:
        return list(hosts)
    for host in hosts:
        if host not in there:
            say(f"the host at {host.address} does not answer, and gets no process; Ray still lists it")
    return there


def await_hosts(addresses: Sequence[str], *, within_s: float) -> None:
    """Until Ray lists a node on each of these hosts, and none that does not answer.

    Raises:
        RunFailed: it still does not; the message says what there is.
    """
    until_s = time.monotonic() + within_s
    while True:
        found = nodes()
        silent = [node.address for node in found if not node.answers]
        missing = [*(Counter(addresses) - Counter(node.address for node in found)).elements()]
        if not silent and not missing:
            return
        if time.monotonic() > until_s:
            raise RunFailed(
                f"after {within_s:g} s Ray has no node at {', '.join(missing) or 'no other address than before'}, and "
                f"lists some that do not answer: {', '.join(silent) or 'none'}"
            )
        time.sleep(_LOOK_S)


def starting_again() -> list[str]:
    """The command that starts this host's part of Ray once more, with the same resources."""
    own = own_node_id()
    info = next(info for info in ray.nodes() if info["NodeID"] == own)
    resources = info["Resources"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={connected_to()}"),
        f"--node-ip-address={info['NodeManagerAddress']}",
        f"--num-cpus={resources.get('CPU', 0):g}",
        f"--num-gpus={resources.get('GPU', 0):g}",
        f"--object-store-memory={int(resources.get('object_store_memory', OBJECT_STORE_BYTES))}",
        *("--disable-usage-stats", "--include-log-monitor=false"),
    ]


@dataclass(frozen=True)
class Place:
    """Where one process goes, and the share of the node's resources it asks for."""

    node: Node
    num_cpus: float
    num_gpus: float
    bundle: int | None = None
    """Which bundle of the launcher's placement group the process goes into; None where the launcher is in no group."""
    host_cores: int | None = None
    """How many of the node's cores the run may compute with; None: all of them."""


def place(
    hosts: Sequence[Node], *, num_workers: int, num_servers: int, wants_gpus: bool, is_spread: bool = False
) -> tuple[list[Place], list[Place]]:
    """Spread workers, then servers, over the hosts in proportion to their cores (or GPUs, for workers that want them).

    More processes than cores is allowed: each then asks for its share of a core. Workers' ranks run host by host.

    Args:
        is_spread: workers go to all hosts alike instead.

    Raises:
        UsageError: no host has the resources at all.
    """
    capacity = [host.num_gpus if wants_gpus else host.num_cpus for host in hosts]
    if sum(capacity) <= 0:
        raise UsageError(f"no node of the cluster has a {'GPU' if wants_gpus else 'core'} to run on")
    worker_counts = _apportion(num_workers, [1.0] * len(hosts) if is_spread else capacity)
    server_counts = _apportion(num_servers, [host.num_cpus for host in hosts])
    workers: list[Place] = []
    servers: list[Place] = []
    for host, num_here, num_servers_here in zip(hosts, worker_counts, server_counts, strict=True):
        num_processes = num_here + num_servers_here
        cpus = _share(host.num_cpus, num_processes)
        gpus = _share(host.num_gpus, num_here) if wants_gpus else 0.0
        workers += [Place(host, cpus, gpus)] * num_here
        servers += [Place(host, cpus, 0.0)] * num_servers_here
    return workers, servers


def least_loaded(
    hosts: Sequence[Node], count: Mapping[str, int], *, doubtful: Collection[str], shunned: Collection[str] = ()
) -> Node:
    """Where one more process goes: the host with the fewest of its kind a core, the first among equals.

    Args:
        count: of those that are there, by node; none where it says nothing.
        doubtful: nodes that may be cut off. They come last, but for those without cores.
        shunned: nodes that come behind others.
    """

    def load(host: Node) -> tuple[bool, bool, bool, float]:
        num = count.get(host.node_id, 0) + 1
        has_cores, is_shunned = host.num_cpus > 0, host.node_id in shunned
        return not has_cores, host.node_id in doubtful, is_shunned, num / host.num_cpus if has_cores else math.inf

    return min(hosts, key=load)


def roomiest(
    count: Mapping[str, int],
    *,
    doubtful: Collection[str],
    shunned: Collection[str] = (),
    among: Collection[str] | None = None,
) -> Node:
    """As `least_loaded`, of the cluster's hosts, which may have come since the run began, or of some of these. A
    launcher within a placement group stays on its own."""
    hosts = nodes()[:1] if ray.util.get_current_placement_group() is not None else nodes()
    some = [host for host in hosts if among is None or host.node_id in among] or hosts
    silent = set(doubtful)
    while True:
        node = least_loaded(some, count, doubtful=silent, shunned=shunned)
        if node.node_id in silent or node.answers:
            return node
        silent.add(node.node_id)


def _apportion(count: int, capacity: Sequence[float]) -> list[int]:
    """Deal `count` out one by one, each to where the load per capacity stays lowest; the first among equals."""
    dealt = [0] * len(capacity)
    for _ in range(count):
        loads = [(dealt[i] + 1) / c if c > 0 else math.inf for i, c in enumerate(capacity)]
        dealt[loads.index(min(loads))] += 1
    return dealt


def _share(total: float, num_processes: int) -> float:
    """Each process's share of this resource, at most one unit; Ray counts in ten-thousandths."""
    if num_processes == 0 or total >= num_processes:
        return min(1.0, total)
    return math.floor(total / num_processes * 1e4) / 1e4
