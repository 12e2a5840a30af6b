"""How long pushing to and pulling from a group of servers takes on a cluster."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from paceline.codec import TensorCodec
from paceline.engines.virtual.network.links import CHUNK_BYTES
from paceline.engines.virtual.server import update_bytes
from paceline.messages import FRAME_BYTES
from paceline.planner import costs
from paceline.planner.coded import bytes_apart, payload_bytes
from paceline.planner.fabric import Floats, Loads
from paceline.planner.key_ranges import range_s, remote_bytes
from paceline.planner.row_exchange import RowExchange, row_exchange
from paceline.planner.setting import Setting
from paceline.server.coded_push import push_coding_s
from paceline.server.windows import PIECES_UNDER_WAY
from paceline.strategies.traits import Served


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
    """How much later than one worker's answer the next one's ends: a link serves them chunk by chunk, in turns."""
    clash_s: float
    """All workers begin with the same server, and all servers with the same worker: others idle meanwhile."""
    chunk_share: float
    """A chunk is this part of a key range."""
    ahead: float
    """An early worker sends at most this part of a key range before the others' gradients come."""
    overlap_s: float
    """Servers get a lone worker's last chunks in turns, so that the first one answers before the last has all."""
    rows: RowExchange
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
    is_local = len({*setting.places.workers, *setting.places.servers}) == 1
    is_sent_in_pieces = work.is_element_wise and not is_local
    frame_bytes = min(range_bytes, FRAME_BYTES if is_sent_in_pieces else range_bytes)
    coded = _coded(setting, coding, frame_bytes)
    push_part = coded.part
    push = fabric.everyone_to_everyone(workers, servers, range_bytes * push_part, is_packed=True)
    pull = fabric.everyone_to_everyone(servers, workers, range_bytes, is_packed=True)
    push_s, pull_s = fabric.busiest(push).busy_s, fabric.busiest(pull).busy_s
    both = fabric.busiest(push + pull)
    is_apart = not {*setting.places.workers} & {*setting.places.servers}
    has_quorum = coding is not None and coding.quorum is not None
    is_cut = is_sent_in_pieces and not has_quorum  # one part decides of whom an update is: no other answers before it
    needs_all = num_gradients == num_workers
    piece_bytes = min(range_bytes, FRAME_BYTES if is_cut else range_bytes)
    last_bytes = (range_bytes % piece_bytes or piece_bytes) % CHUNK_BYTES or CHUNK_BYTES
    touched_bytes = update_bytes(num_gradients, range_bytes, work.state_bytes / num_servers)
    rows = row_exchange(setting, coding.row_staleness if coding is not None else 0, work.weights)
    touched_row_bytes = sum(each.updated_bytes(num_gradients) for each in work.weights) / num_servers
    if work.rows is not None:
        touched_row_bytes += work.rows.updated_bytes_of(num_gradients) / num_servers
    update_s = touched_bytes / fabric.rates.memory[servers] + touched_row_bytes / fabric.row_bytes_per_s[servers]
    packing = fabric.packing_bytes_per_s
    card = float(min(fabric.rates.down[workers].min(), fabric.rates.down[servers].min(), packing))
    own_packed_s = remote_bytes(setting, range_bytes) / packing
    own_push_s = push_part * np.maximum(own_packed_s, range_s(setting, fabric.rates.up, fabric.rates.down, range_bytes))
    own_pull_s = np.maximum(own_packed_s, range_s(setting, fabric.rates.down, fabric.rates.up, range_bytes))
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
        request_s=math.ceil(range_bytes / frame_bytes) * cluster.servers.request_s + coded.decode_s,
        ask_s=cluster.communication.request_s + coded.encode_s + rows.latency_s,
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


@final
class _Coded(NamedTuple):
    part: float
    """Bytes of a push over those of the gradients."""
    encode_s: float
    """The slowest worker encodes its push for so long."""
    decode_s: float
    """The busiest server decodes its part of one worker's push for so long, on the average of all workers; where hosts
    share cores, all servers of the busiest core do."""


def _coded(setting: Setting, coding: Served | None, piece_bytes: float) -> _Coded:
    """What a codec makes of pushes. Workers code each piece of `piece_bytes` by itself, or each tensor where the
    optimizer wants whole ones. A server on a worker's host gets gradients as they are, or the worker decodes them."""
    places, work = setting.places, setting.work
    is_local = len({*places.workers, *places.servers}) == 1
    if coding is None or not isinstance(coding.codec, TensorCodec) or (coding.codec_scope == "links" and is_local):
        return _Coded(1.0, 0.0, 0.0)
    codec, num_servers, operation_s = coding.codec, len(places.servers), setting.cluster.communication.coding_s
    range_bytes = work.parameter_bytes / num_servers
    num_tensors = math.ceil(range_bytes / piece_bytes) if work.is_element_wise else len(work.tensor_bytes) / num_servers
    encode_s, decode_s = push_coding_s(codec, range_bytes, num_tensors=num_tensors, operation_s=operation_s)
    here = np.bincount(places.servers, minlength=setting.fabric.num_hosts)[np.array(places.workers)]
    encoding_s = (num_servers - here) * encode_s
    if coding.codec_scope == "all":
        encoding_s = encoding_s + here * (encode_s + decode_s)
    beside = np.bincount(places.workers, minlength=setting.fabric.num_hosts)[np.array(places.servers)]
    speeds = np.array([setting.cluster.each_host()[host].speed for host in places.servers])
    elsewhere = 1 - beside / setting.num_workers
    num_bytes = payload_bytes(codec, work) if work.is_element_wise else bytes_apart(codec, work)
    shares = setting.cluster.shared_cores is not None
    cores = [setting.cluster.core_of(host) for host in places.servers] if shares else range(num_servers)
    decoding_s = np.bincount(cores, elsewhere * decode_s / speeds)
    return _Coded(
        num_bytes / work.parameter_bytes,
        float((encoding_s * setting.core_shares).max()),
        float(decoding_s.max()),
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
