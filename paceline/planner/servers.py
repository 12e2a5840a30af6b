"""How long pushing to and pulling from a group of servers takes on a cluster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.engines.virtual.network.links import CHUNK_BYTES
from paceline.engines.virtual.server import update_bytes
from paceline.messages import FRAME_BYTES, HEAD_BYTES
from paceline.planner import costs
from paceline.planner.coded import payload_bytes
from paceline.planner.fabric import KINDS, Fabric, Floats, Loads
from paceline.planner.setting import Setting
from paceline.planner.weight_work import WeightWork, moved_bytes
from paceline.server.windows import PIECES_UNDER_WAY
from paceline.strategies.traits import Served

_TINY_S = 1e-12


@dataclass(frozen=True)
class ServerExchange:
    """How long gradients and parameters keep links, memories and servers busy. `own_`: one value for each worker, as if
    it trained alone. Push is from workers to servers, pull the way back."""

    own_push_s: Floats
    own_pull_s: Floats
    own_all_s: Floats
    """The busiest thing that a worker's push and pull and its rows pass, with all of them."""
    own_beside: Floats
    """The part of its pull that passes while the worker still pushes."""
    push_s: float
    """The busiest link, with all workers' pushes."""
    pull_s: float
    both_s: float
    """The busiest link, with all pushes and pulls that pass it."""
    both_push_s: float
    """The same link, with the pushes alone."""
    update_s: float
    """The slowest server reads and writes memory for so long to make one update."""
    request_s: float
    """A server handles one worker's requests for so long, besides the update."""
    ask_s: float
    """A worker makes its requests for so long; those for rows, and their way there and back, are among it."""
    latency_s: Floats
    """There and back; twice, where workers tell the other servers what one has decided."""
    num_pieces: float
    """Each server's key range travels in so many pieces."""
    turn_s: float
    """Between the ends of the answers to two workers: a link serves them chunk by chunk, in turns."""
    clash_s: float
    """All workers begin with the same server, and all servers with the same worker: others idle meanwhile."""
    chunk_share: float
    """A chunk is this part of a key range."""
    ahead: float
    """An early worker sends at most this part of a key range before the others' gradients come."""
    overlap_s: float
    """Servers get a lone worker's last chunks in turns, so that the first one answers before the last has all."""
    rows: "RowExchange"
    """What passes before and after that, one request after the other."""
    all_s: float
    """The busiest link, with all of that."""
    shared_push_s: float
    """The link that is busiest of those that both ways may pass, with what goes to servers."""
    shared_pull_s: float
    other_s: float
    """What else rows pass, the other way."""
    loads: Loads

    @property
    def after_push_s(self) -> float:
        """From the last gradient's arrival until the last parameters arrive, where all workers begin at once."""
        pieces, count = self.num_pieces, len(self.own_push_s)
        requests_s = count * self.request_s
        stages = [self.push_s / pieces, (requests_s + self.update_s) / pieces, self.pull_s / pieces]
        shared_s = self.push_s + stages[1] + self.pull_s * (1 - (pieces - 1) / pieces * self.beside)
        # While a piece still comes from others, the server handles the requests that it has.
        taken_s = (count - 1) / count * min(requests_s, self.push_s) / pieces
        return max(costs.pipeline_s(stages, pieces), shared_s) - taken_s - self.push_s + self.clash_s

    @property
    def beside(self) -> float:
        """The part of the pull that passes while workers still push."""
        return float(_beside(self.push_s, self.pull_s, self.both_push_s, self.both_s - self.both_push_s))

    def answered_s(self, starts_s: Floats) -> Floats:
        """When the last parameters arrive, without latency, where workers begin to push at these times.

        Args:
            starts_s: ascending along the last axis; other axes are independent draws.

        Links to the servers pass chunks as they come. So the first piece is complete when whole chunks that others sent
        before the last worker began have passed, and with them that worker's piece, among those of all who still send.
        From then on every piece is answered to all. What others could not send ahead comes beside the last one's.
        """
        each_s, own_s, last_s = self.push_s / len(self.own_push_s), float(self.own_push_s.max()), starts_s[..., -1]
        chunk = min(1.0, self.chunk_share)
        begun = np.floor((last_s[..., None] - starts_s) / own_s / chunk) * chunk + 1 / self.num_pieces
        sent = np.minimum(self.ahead, begun)
        first_s = np.maximum(last_s + own_s / self.num_pieces, _passed_s(starts_s, sent * each_s))
        kept_back_s = (starts_s.shape[-1] - 1) * (1 - self.ahead) * each_s
        all_in_s = np.maximum(last_s + own_s, _passed_s(starts_s, np.full_like(starts_s, each_s)))
        all_in_s = np.maximum(all_in_s, last_s + each_s + kept_back_s)
        piece_s = (self.request_s + self.update_s) / self.num_pieces
        end_s: Floats = np.maximum(all_in_s + self.after_push_s, first_s + piece_s + self.pull_s + self.clash_s)
        return end_s

    @property
    def trips_s(self) -> Floats:
        """Each worker's push, update and pull together, where it meets no other."""
        pieces = self.num_pieces
        served_s = np.full_like(self.own_push_s, self.served_s)
        stages = np.stack([self.own_push_s, served_s, self.own_pull_s]) / pieces
        in_turn_s = stages.sum(axis=0) + (pieces - 1) * stages.max(axis=0)
        answered = (pieces - 1) / pieces * self.own_beside
        shared_s = self.own_push_s + stages[1] + self.own_pull_s * (1 - answered)
        trips: Floats = np.maximum(in_turn_s, shared_s) - self.overlap_s + self.latency_s
        return trips

    @property
    def served_s(self) -> float:
        """A server handles one worker's gradient for so long, where each is an update."""
        return self.request_s + self.update_s

    @property
    def hub_s(self) -> float:
        """One worker's push and pull keep the link that workers share most busy for so long."""
        return self.all_s / len(self.own_push_s)


def server_exchange(setting: Setting, *, num_gradients: int, coding: Served | None = None) -> ServerExchange:
    """The exchange of a setting in which `num_gradients` form one update, and pushes may be coded."""
    fabric, work, cluster = setting.fabric, setting.work, setting.cluster
    workers, servers = np.array(setting.places.workers), np.array(setting.places.servers)
    num_workers, num_servers = len(workers), len(servers)
    range_bytes = work.parameter_bytes / num_servers
    push_part, encode_s, decode_s = _coded(setting, coding)
    push = fabric.everyone_to_everyone(workers, servers, range_bytes * push_part, is_packed=True)
    pull = fabric.everyone_to_everyone(servers, workers, range_bytes, is_packed=True)
    push_s, pull_s = fabric.busiest(push).busy_s, fabric.busiest(pull).busy_s
    both = fabric.busiest(push + pull)
    is_local = len({*setting.places.workers, *setting.places.servers}) == 1
    is_apart = not {*setting.places.workers} & {*setting.places.servers}
    is_sent_in_pieces = work.is_element_wise and not is_local
    has_quorum = coding is not None and coding.quorum is not None
    is_cut = is_sent_in_pieces and not has_quorum  # one part decides of whom an update is: no other answers before it
    needs_all = num_gradients == num_workers
    piece_bytes = min(range_bytes, FRAME_BYTES if is_cut else range_bytes)
    frame_bytes = min(range_bytes, FRAME_BYTES if is_sent_in_pieces else range_bytes)
    last_bytes = (range_bytes % piece_bytes or piece_bytes) % CHUNK_BYTES or CHUNK_BYTES
    touched_bytes = update_bytes(num_gradients, range_bytes, work.state_bytes / num_servers)
    rows = _row_exchange(setting, coding.row_staleness if coding is not None else 0, work.weights)
    touched_row_bytes = sum(each.updated_bytes(num_gradients) for each in work.weights) / num_servers
    if work.rows is not None:
        touched_row_bytes += work.rows.updated_bytes_of(num_gradients) / num_servers
    update_s = touched_bytes / fabric.rates.memory[servers] + touched_row_bytes / fabric.row_bytes_per_s[servers]
    packing = fabric.packing_bytes_per_s
    card = float(min(fabric.rates.down[workers].min(), fabric.rates.down[servers].min(), packing))
    own_packed_s = _remote_bytes(setting, range_bytes) / packing
    own_push_s = push_part * np.maximum(own_packed_s, _own_s(setting, fabric.rates.up, fabric.rates.down, range_bytes))
    own_pull_s = np.maximum(own_packed_s, _own_s(setting, fabric.rates.down, fabric.rates.up, range_bytes))
    own_both_s = np.maximum(np.maximum(own_push_s, own_pull_s), (1 + push_part) * own_packed_s)
    to_servers, back, link = push, pull, both
    if not rows.are_together:
        to_servers, back = push + rows.push.loads, pull + rows.pull.loads
        link = fabric.busiest(to_servers + back)
        own_both_s = np.maximum(
            np.maximum(own_push_s + rows.push.own_s, own_pull_s + rows.pull.own_s),
            (1 + push_part) * own_packed_s + rows.own_packed_s,
        )
    return ServerExchange(
        own_push_s=own_push_s,
        own_pull_s=own_pull_s,
        own_all_s=own_both_s + rows.own_s if rows.are_together else own_both_s,
        own_beside=_beside(own_push_s, own_pull_s, push_part * own_packed_s, own_packed_s),
        push_s=push_s,
        pull_s=pull_s,
        both_s=both.busy_s,
        both_push_s=fabric.busy_s(push, both),
        update_s=float(update_s.max()),
        request_s=math.ceil(range_bytes / frame_bytes) * cluster.servers.request_s + decode_s,
        ask_s=cluster.communication.request_s + encode_s + rows.latency_s,
        latency_s=2 * fabric.farthest_s(workers, servers) * (2 if has_quorum and num_servers > 1 else 1),
        num_pieces=range_bytes / piece_bytes,
        turn_s=min(1.0, last_bytes / range_bytes) * pull_s / num_workers if rows.turn_s is None else rows.turn_s,
        clash_s=2 * (min(num_workers, num_servers) - 1) * CHUNK_BYTES / card
        if range_bytes > piece_bytes and is_apart
        else 0.0,
        chunk_share=CHUNK_BYTES / range_bytes,
        ahead=min(1.0, PIECES_UNDER_WAY * FRAME_BYTES / range_bytes) if is_cut and needs_all else 1.0,
        overlap_s=(num_servers - 1) * min(last_bytes, range_bytes) / card if not is_local else 0.0,
        rows=rows,
        all_s=link.busy_s + rows.together_s if rows.are_together else link.busy_s,
        shared_push_s=fabric.busy_s(to_servers, link),
        shared_pull_s=fabric.busy_s(back, link),
        other_s=0.0 if rows.are_together else rows.together_s - fabric.busy_s(rows.loads, link),
        loads=push + pull + rows.loads,
    )


def rows_beside(setting: Setting, *, row_staleness: int, joins: bool) -> tuple[float, Loads]:
    """What rows take in a step where servers hold nothing else, and a push without gradients says that they are due."""
    work, num_workers = setting.work, setting.num_workers
    if work.rows is None or not setting.places.servers:
        return 0.0, setting.fabric.nothing
    rows, servers = _row_exchange(setting, row_staleness, ()), np.array(setting.places.servers)
    touched_bytes = work.rows.updated_bytes_of(num_workers) if joins else num_workers * work.rows.updated_bytes_of(1)
    update_s = touched_bytes / len(servers) / float(setting.fabric.row_bytes_per_s[servers].min())
    due_s = _ways_s(setting) + setting.cluster.communication.request_s  # it says so
    requests_s = num_workers * setting.cluster.servers.request_s
    return rows.latency_s + rows.together_s + due_s + requests_s + update_s, rows.loads


def _ways_s(setting: Setting) -> float:
    """Of a request and its answer."""
    workers, servers = np.array(setting.places.workers), np.array(setting.places.servers)
    return 2 * float(setting.fabric.farthest_s(workers, servers).max())


class Way(NamedTuple):
    """What rows of all workers take one way, between workers and servers."""

    own_s: Floats
    """Of each worker, alone: they keep the busiest thing busy that they pass. Before rows of tables it has been quiet:
    what a card lets pass at once goes as fast as cores pack it."""
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
    """Of all that, what each worker's cores pack."""
    turn_s: float | None
    """Between the ends of what comes last to two workers. None: they stay together, as where workers ask for rows of
    tables one after the other: what all others are sent is ahead of a further request, however small."""
    trips: tuple[costs.Trip, ...] = ()
    """Of rows of tables, what asynchronous workers meet of others' on their way to servers, and back."""
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
        """Of the way that takes less, which is not that of the busiest link."""
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


def _row_exchange(setting: Setting, row_staleness: int, weights: Sequence[WeightWork]) -> RowExchange:
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
    packed_bytes = _remote_bytes(setting, (push_bytes + pull_bytes) / num_servers)
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
    packed_s: Floats = _remote_bytes(setting, range_bytes) / fabric.packing_bytes_per_s
    own_s, together_s = np.maximum(_own_s(setting, near, far, range_bytes), packed_s), fabric.busiest(loads).busy_s
    if is_quiet:
        workers, servers = ends
        burst_s = np.minimum(fabric.burst_bytes[workers] / near[workers], (fabric.burst_bytes / far)[servers].min())
        left_s = np.where(packed_s > 0, np.maximum(own_s - burst_s, packed_s), own_s)
        own_s, together_s = left_s, together_s - float((own_s - left_s).min())
    return Way(own_s, together_s, loads)


def _coded(setting: Setting, coding: Served | None) -> tuple[float, float, float]:
    """What a push is of the gradients' bytes; how long a worker encodes it, and each server decodes its part."""
    hosts = {*setting.places.workers, *setting.places.servers}
    if coding is None or coding.codec is None or (coding.codec_scope == "links" and len(hosts) == 1):
        return 1.0, 0.0, 0.0
    codec, num_bytes = coding.codec, setting.work.parameter_bytes
    each = setting.cluster.each_host()
    encode_s, decode_s = (seconds * num_bytes / 1e9 for seconds in codec.seconds_per_gbyte)
    if codec.feedback:
        encode_s += decode_s
    return (
        payload_bytes(codec, setting.work) / num_bytes,
        encode_s / min(each[host].speed for host in setting.places.workers),
        decode_s / len(setting.places.servers) / min(each[host].speed for host in setting.places.servers),
    )


def _beside(push_s: Any, pull_s: Any, both_push_s: Any, both_pull_s: Any) -> Floats:
    """The part of the pull that passes while workers push. Pushes go at full rate, and pulls get what they leave of the
    link that both pass, which is busy with either for `both_push_s` and `both_pull_s`."""
    left = _ratio(push_s - both_push_s, both_pull_s)
    found: Floats = np.clip(np.minimum(left, _ratio(push_s, pull_s)), 0.0, 1.0)
    return found


def _ratio(above: Any, below: Any) -> Floats:
    """1 where the divisor is 0."""
    found: Floats = np.where(np.asarray(below) > 0, above / np.maximum(below, 1e-300), 1.0)
    return found


def _passed_s(starts_s: Floats, busy_s: Floats) -> Floats:
    """When a link is done with jobs that arrive at these times, in order, and keep it busy for so long each."""
    left_s: Floats = np.cumsum(busy_s[..., ::-1], axis=-1)[..., ::-1]
    end_s: Floats = np.max(starts_s + left_s, axis=-1)
    return end_s


def _own_s(setting: Setting, near: Floats, far: Floats, range_bytes: float) -> Floats:
    """How long one worker's key ranges take through its own card (`near`) and the servers' cards (`far`)."""
    workers, servers = np.array(setting.places.workers), np.array(setting.places.servers)
    here = np.bincount(servers, minlength=setting.fabric.num_hosts)[workers]
    card_s = _remote_bytes(setting, range_bytes) / near[workers]
    server_s = np.where(here < len(servers), range_bytes / far[servers].min(), 0.0)
    memory_s = here * range_bytes / setting.fabric.rates.memory[workers]
    own_s: Floats = np.maximum(np.maximum(card_s, server_s), memory_s)
    return own_s


def _remote_bytes(setting: Setting, range_bytes: float) -> Floats:
    """What each worker sends to servers on other hosts."""
    servers = np.array(setting.places.servers)
    here = np.bincount(servers, minlength=setting.fabric.num_hosts)[np.array(setting.places.workers)]
    remote: Floats = (len(servers) - here) * range_bytes
    return remote
