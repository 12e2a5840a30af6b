"""How long rows of tables and weights that servers hold take between workers and servers, besides gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.engines.virtual.network.links import CHUNK_BYTES
from paceline.messages import HEAD_BYTES
from paceline.planner import costs
from paceline.planner.fabric import KINDS, Fabric, Floats, Loads
from paceline.planner.key_ranges import range_s, remote_bytes
from paceline.planner.setting import Setting
from paceline.planner.weight_work import WeightWork, moved_bytes

_TINY_S = 1e-12


class Way(NamedTuple):
    """What rows of all workers take one way, between workers and servers."""

    own_s: Floats
    """For each worker, how long they keep the busiest thing busy that they pass, if it trained alone. Before rows of
    tables that has been quiet: what a card lets pass at once goes as fast as cores pack it."""
    together_s: float
    """The same, where all send at once."""
    loads: Loads


class RowExchange(NamedTuple):
    """What rows take, one request after the other, where servers hold rows of tables or weights."""

    latency_s: float
    """Seconds that one worker's requests of a step take besides what passes the links: the ways there and back, making
    and answering them, and picking rows out and putting them together at both ends."""
    push: Way
    pull: Way
    own_packed_s: Floats
    """How long each worker's cores pack all of that."""
    turn_s: float | None
    """How much later than one worker the next one gets the last it waits for. None: workers stay together, as where
    they ask for rows of tables one after the other: what all others are sent is ahead of a further request, however
    small."""
    trips: tuple[costs.Trip, ...] = ()
    """What rows of tables of one asynchronous worker meet of others' rows, on their way to servers and back."""
    core_s: tuple[float, float] = (0.0, 0.0)
    """Where hosts share cores: how long one worker's step and both ends of its requests need one, and the same over the
    cores that there are."""
    served_s: float = 0.0
    """A server answers one worker's requests of a step for so long."""

    @property
    def own_s(self) -> Floats:
        own_s: Floats = self.push.own_s + self.pull.own_s
        return own_s

    @property
    def own_other_s(self) -> Floats:
        """Each worker's time for the way that takes less, which is not that of the busiest link."""
        own_s: Floats = np.minimum(self.push.own_s, self.pull.own_s)
        return own_s

    @property
    def together_s(self) -> float:
        return self.push.together_s + self.pull.together_s

    @property
    def ways(self) -> tuple[tuple[Floats, float], tuple[Floats, float]]:
        """To servers and back: each worker's time, and that of all together. If they stay together, all of it passes
        before their gradients."""
        if self.are_together:
            return (self.own_s, self.together_s), (np.zeros_like(self.own_s), 0.0)
        return (self.push.own_s, self.push.together_s), (self.pull.own_s, self.pull.together_s)

    @property
    def are_together(self) -> bool:
        return self.turn_s is None

    @property
    def in_turns_s(self) -> float:
        """Where all wait for all: who gets rows first has pushed others before the next one does. Workers that stay
        together wait for servers to answer all of them, of whom `latency_s` has one."""
        num_others = len(self.push.own_s) - 1
        others_s = self.push.together_s - float(self.push.own_s.max())
        return self.together_s - min(others_s, num_others * (self.turn_s or 0.0)) + num_others * self.served_s

    @property
    def loads(self) -> Loads:
        return self.push.loads + self.pull.loads


def row_exchange(setting: Setting, row_staleness: int, weights: Sequence[WeightWork]) -> RowExchange:
    """A worker waits for the rows of its batch from tables before it computes, and sends gradients of rows, which
    servers have to have, before it pushes those of the model. Then it asks for rows of weights that have changed."""
    rows, num_servers = setting.work.rows, len(setting.places.servers)
    if rows is None and not weights:
        nobody, nothing = np.zeros(setting.num_workers), setting.fabric.nothing
        no_way = Way(nobody, 0.0, nothing)
        return RowExchange(0.0, no_way, no_way, nobody, None)
    heads_bytes = float(HEAD_BYTES * num_servers)
    num_requests, push_bytes, pull_bytes, turn_s = 1.0, heads_bytes, 0.0, None  # of gradients
    if rows is not None:
        key_bytes, row_bytes = rows.asked_bytes(row_staleness)
        num_requests += rows.requests
        push_bytes += key_bytes + rows.requests * heads_bytes + rows.sent_bytes
        pull_bytes += row_bytes + rows.requests * heads_bytes
    if weights:
        num_requests += 1
        push_bytes += moved_bytes(weights, 1)
        pull_bytes += moved_bytes(weights, setting.num_workers) + heads_bytes
    is_quiet = rows is not None
    push = _way(setting, push_bytes, to_servers=True, is_quiet=is_quiet)
    pull = _way(setting, pull_bytes, to_servers=False, is_quiet=is_quiet)
    if rows is None:
        chunk_share = min(1.0, CHUNK_BYTES * num_servers / pull_bytes)
        turn_s = chunk_share * (pull.together_s - float(pull.own_s.max())) / max(1, setting.num_workers - 1)
    packed_bytes = remote_bytes(setting, (push_bytes + pull_bytes) / num_servers)
    packed_s = packed_bytes / setting.fabric.packing_bytes_per_s
    cluster = setting.cluster
    requests_s = num_requests * (_ways_s(setting) + cluster.communication.row_request_s + cluster.servers.row_request_s)
    handled_s = _handled_s(setting, push_bytes + pull_bytes)
    if rows is None:
        return RowExchange(requests_s + handled_s, push, pull, packed_s, turn_s)
    trips = _trips(setting, ((push, push_bytes), (pull, pull_bytes)))
    core_s = setting.alone_s + num_requests * cluster.communication.row_request_core_s
    num_cores = len({cluster.core_of(host) for host in (*setting.places.workers, *setting.places.servers)})
    cores = (core_s, core_s / num_cores) if cluster.shared_cores is not None else (0.0, 0.0)
    served_s = num_requests * cluster.servers.row_request_s
    return RowExchange(requests_s + handled_s, push, pull, packed_s, turn_s, trips, cores, served_s)


def rows_beside(setting: Setting, *, row_staleness: int, joins: bool) -> tuple[float, Loads]:
    """What rows take in a step where servers hold nothing else, and a push without gradients says that they are due."""
    work, num_workers = setting.work, setting.num_workers
    if work.rows is None or not setting.places.servers:
        return 0.0, setting.fabric.nothing
    rows, servers = row_exchange(setting, row_staleness, ()), np.array(setting.places.servers)
    touched_bytes = work.rows.updated_bytes_of(num_workers) if joins else num_workers * work.rows.updated_bytes_of(1)
    update_s = touched_bytes / len(servers) / float(setting.fabric.row_bytes_per_s[servers].min())
    due_s = _ways_s(setting) + setting.cluster.communication.request_s  # it says so
    requests_s = num_workers * setting.cluster.servers.request_s
    return rows.latency_s + rows.together_s + due_s + requests_s + update_s, rows.loads


def _ways_s(setting: Setting) -> float:
    """How long a request and its answer are on their way."""
    workers, servers = np.array(setting.places.workers), np.array(setting.places.servers)
    return 2 * float(setting.fabric.farthest_s(workers, servers).max())


def _trips(setting: Setting, ways: Sequence[tuple[Way, float]]) -> tuple[costs.Trip, ...]:
    """Of each of these ways of the first worker, to servers and back, each with its bytes: it meets others' on the link
    that would have to pass most if all were under way. Where servers have hosts of their own, those are on the same
    way, and each takes a part of a server's link; where they are on workers' hosts, what one worker is sent meets what
    the others send."""
    fabric, num_others = setting.fabric, setting.num_workers - 1
    if not num_others:
        return ()
    all_s = [_flat(fabric, way.loads) for way, _ in ways]
    worker, servers = np.array(setting.places.workers[:1]), np.array(setting.places.servers)
    (_, push_bytes), (_, pull_bytes) = ways
    own_s = [
        _flat(fabric, fabric.everyone_to_everyone(sources, takers, num_bytes / len(servers), is_packed=True))
        for sources, takers, num_bytes in ((worker, servers, push_bytes), (servers, worker, pull_bytes))
    ]
    alone_s = [max(float(own.max()), _TINY_S) for own in own_s]
    parts = [own / alone for own, alone in zip(own_s, alone_s, strict=True)]
    others = [(whole - own) / num_others / alone for whole, own, alone in zip(all_s, own_s, alone_s, strict=True)]
    found = []
    for (way, _), part in zip(ways, parts, strict=True):
        asked = [np.where(part > 0, part + num_others * other, 0.0) for other in others]
        meets = int(np.argmax([each.max() for each in asked]))
        link = int(np.argmax(asked[meets]))
        found.append(
            costs.Trip(float(way.own_s.mean()), min(1.0, float(part[link])), float(others[meets][link]), meets)
        )
    return tuple(found)


def _flat(fabric: Fabric, loads: Loads) -> Floats:
    """How long each link is busy with these."""
    return np.concatenate([getattr(loads, kind) / getattr(fabric.rates, kind) for kind in KINDS])


def _handled_s(setting: Setting, num_bytes: float) -> float:
    """A worker divides so many bytes of keys, rows and gradients among servers, or puts them together; and each server
    its part of them."""
    workers, servers = (np.array(hosts) for hosts in (setting.places.workers, setting.places.servers))
    slowest = (float(setting.fabric.row_bytes_per_s[hosts].min()) for hosts in (workers, servers))
    worker_bytes_per_s, server_bytes_per_s = slowest
    return num_bytes / worker_bytes_per_s + num_bytes / len(servers) / server_bytes_per_s


def _way(setting: Setting, num_bytes: float, *, to_servers: bool, is_quiet: bool) -> Way:
    """So many bytes of each worker, of which each server has an equal part, on links that have been quiet or not."""
    fabric, range_bytes = setting.fabric, num_bytes / len(setting.places.servers)
    near, far = (fabric.rates.up, fabric.rates.down)[:: 1 if to_servers else -1]
    ends = np.array(setting.places.workers), np.array(setting.places.servers)
    senders, takers = ends[:: 1 if to_servers else -1]
    loads = fabric.everyone_to_everyone(senders, takers, range_bytes, is_packed=True)
    packed_s: Floats = remote_bytes(setting, range_bytes) / fabric.packing_bytes_per_s
    own_s, together_s = np.maximum(range_s(setting, near, far, range_bytes), packed_s), fabric.busiest(loads).busy_s
    if is_quiet:
        workers, servers = ends
        burst_s = np.minimum(fabric.burst_bytes[workers] / near[workers], (fabric.burst_bytes / far)[servers].min())
        left_s = np.where(packed_s > 0, np.maximum(own_s - burst_s, packed_s), own_s)
        own_s, together_s = left_s, together_s - float((own_s - left_s).min())
    return Way(own_s, together_s, loads)
