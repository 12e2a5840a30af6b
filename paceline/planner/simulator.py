"""A run without tensors: the engine's draws of computing times, and exchanges on queues. Checks the closed forms.

Ranks of an exchange advance together, as arrays, so that 10,000 workers take little time: the 2 (n - 1) rounds of a
ring are one sliding maximum, since a late rank is felt by others in the order of their distance (max-plus algebra). For
servers see `server_simulator`. The virtual engine sends each message on its own; tests compare.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paceline.cluster.description import Cluster
from paceline.errors import UsageError
from paceline.planner import algorithms, neighbours
from paceline.planner import filling as buckets
from paceline.planner.coded import coded_exchange, settled
from paceline.planner.cycles import besides_s, cycle_of, fragment_mean, joint_of_turns
from paceline.planner.demand import StepWork
from paceline.planner.draws import Draws
from paceline.planner.fabric import Floats
from paceline.planner.question import Question
from paceline.planner.quorums import QuorumRounds
from paceline.planner.server_simulator import AsynchronousRun, SynchronousRun
from paceline.planner.servers import server_exchange
from paceline.planner.setting import RingReduction, Setting
from paceline.planner.turns import Turns
from paceline.schedule import Rounds
from paceline.strategies.base import Strategy
from paceline.strategies.traits import AllReduced, ClientTurns, Neighbouring, Served

_SETTLING = 0.2
"""The part of the steps after which the means begin: who begins at once with all others is not in a steady state."""


@dataclass(frozen=True)
class Simulation:
    """Means after the first steps."""

    step_s: float
    samples_per_s: float


def simulate(
    cluster: Cluster,
    *,
    strategy: str | Strategy,
    workers: int,
    work: StepWork,
    options: Mapping[str, Any] | None = None,
    steps: int = 100,
    seed: int = 0,
) -> Simulation:
    """As `predict`, by simulating so many exchanges of every worker.

    Raises:
        UsageError: as `predict`, or there are fewer than two steps.
    """
    if steps < 2:
        raise UsageError(f"steps must be at least 2, not {steps}")
    asked = Question.of(cluster, strategy=strategy, workers=workers, work=work, options=options)
    setting, counted = asked.setting, workers
    traffic = asked.traffic.among(workers) if isinstance(asked.traffic, Served) else asked.traffic
    draws = Draws(setting, seed=seed)
    if isinstance(traffic, ClientTurns):
        step_s = _in_turns(traffic, setting, draws, steps)
        return Simulation(step_s, counted * work.samples / step_s)
    if not isinstance(traffic, Served):
        if isinstance(traffic, AllReduced) and traffic.is_in_fragments and workers > 1:
            ends_s = _in_fragments(traffic, setting, draws, steps)
        else:
            ends_s = _lock_step(traffic, setting, draws, steps)
        cycle_s = _mean_s(ends_s) + (besides_s(traffic, setting) if isinstance(traffic, AllReduced) else 0.0)
    elif traffic.takes_some_of(workers):
        assert traffic.quorum is not None
        exchange = server_exchange(setting, num_gradients=traffic.quorum, coding=traffic)
        means = QuorumRounds(traffic, setting, exchange, draws).means(math.ceil(steps * workers / traffic.quorum))
        cycle_s = means.round_s * workers / means.num_joined
    elif traffic.staleness is None:
        cycle_s, counted = _mean_s(SynchronousRun(traffic, setting, draws).run(steps)), workers - traffic.backup_workers
    else:
        cycle_s = _mean_s(AsynchronousRun(traffic, setting, draws).run(steps)) * workers
    step_s = cycle_s if traffic is None else cycle_s / traffic.every
    return Simulation(step_s, counted * work.samples / step_s)


def _mean_s(ends_s: Sequence[float]) -> float:
    """From one end to the next, after the first steps."""
    first = int(len(ends_s) * _SETTLING)
    return (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first)


def _in_turns(traffic: ClientTurns, setting: Setting, draws: Draws, num_rounds: int) -> float:
    """The mean time of a step, over rounds at whose ends all wait for all."""
    turns, took_s, num_steps = Turns(traffic, setting), 0.0, 0.0

    def computing_s(rank: int, steps: float) -> float:
        whole = math.floor(steps)
        drawn_s = draws.next_s(rank, num_steps=whole) + (steps - whole) * draws.next_s(rank)
        return drawn_s + steps * setting.work.overhead_s

    for number in range(num_rounds):
        each = turns.round(number)
        took_s += float(turns.ends_s(each, computing_s).max()) + joint_of_turns(traffic, setting)[0]
        num_steps += sum(map(sum, each)) / setting.num_workers
    return took_s / num_steps


# --- lock-step -------------------------------------------------------------------------------------------------------

_Exchange = Callable[[int, Floats, Floats], Floats]
"""When each worker's exchange is over, given the exchange's number, when they begin to compute, and for how long."""


def _lock_step(
    traffic: AllReduced | Neighbouring | None, setting: Setting, draws: Draws, num_exchanges: int
) -> list[float]:
    """When workers have ended each exchange, on the average of all."""
    if traffic is not None:
        traffic = settled(traffic, setting, lambda each: cycle_of(each, setting).end_s)
    exchange, every = _exchange_of(traffic, setting), 1 if traffic is None else traffic.every
    messages_s: Sequence[Floats | float] = [0.0]
    if isinstance(traffic, Neighbouring):
        messages_s = [each.core_s for each in neighbours.rounds_of(traffic, setting)]
    now_s, ends_s = np.zeros(setting.num_workers), []
    for number in range(num_exchanges):
        for _ in range(every - 1):
            now_s = now_s + draws.all_s(now_s) + setting.work.overhead_s
        computing_s = draws.all_s(now_s, besides_s=messages_s[number % len(messages_s)])
        now_s = exchange(number, now_s, computing_s) + setting.work.overhead_s
        ends_s.append(float(now_s.mean()))
    return ends_s


def _in_fragments(traffic: AllReduced, setting: Setting, draws: Draws, num_rounds: int) -> list[float]:
    """When workers have ended each round, on the average of all."""
    traffic = settled(traffic, setting, lambda each: cycle_of(each, setting).end_s)
    schedule = Rounds(every=traffic.every, fragments=traffic.fragments, delay=traffic.delay)
    fragments, operation_s = buckets.of_fragments(traffic, setting), algorithms.operation_s(traffic.algorithm, setting)
    now_s, over_s, ends_s = np.zeros(setting.num_workers), [np.zeros(setting.num_workers)] * len(fragments), []
    for step in range(1, num_rounds * traffic.every + 1):
        now_s = now_s + draws.all_s(now_s) + setting.work.overhead_s
        for fragment in schedule.leaving(step):
            now_s = now_s + operation_s
            if traffic.codec is None:
                over_s[fragment] = _reduced(traffic.algorithm, setting, now_s, fragments[fragment].num_bytes)
            else:
                lasts_s = fragment_mean(traffic, setting, fragments[fragment]).time_s
                over_s[fragment] = np.full_like(now_s, float(now_s.max()) + lasts_s)
        for fragment in schedule.due(step):
            now_s = np.maximum(now_s, over_s[fragment])
        if step % traffic.every == 0:
            ends_s.append(float(now_s.mean()))
    return ends_s


def _exchange_of(traffic: AllReduced | Neighbouring | None, setting: Setting) -> _Exchange:
    if isinstance(traffic, Neighbouring):
        rounds, coding_s = neighbours.rounds_of(traffic, setting), neighbours.coding_s(traffic, setting)
        hidden_s = setting.work.overhead_s if traffic.behind_computing else None
        among = partial(_among_neighbours, rounds, hidden_s)
        return lambda number, now_s, computing_s: among(number, now_s, computing_s) + coding_s
    if not isinstance(traffic, AllReduced) or setting.num_workers == 1:
        return lambda number, now_s, computing_s: now_s + computing_s
    coded = None if traffic.codec is None else coded_exchange(traffic, setting)
    if coded is not None:
        exchange_s = coded.time_s + algorithms.operation_s(traffic.algorithm, setting)
        return lambda number, now_s, computing_s: np.full_like(now_s, float((now_s + computing_s).max()) + exchange_s)
    sizes = buckets.of(traffic, setting)
    num_bytes = [bucket.num_bytes for bucket in sizes]
    if traffic.behind_backward:
        return partial(_behind_backward, traffic.algorithm, setting, num_bytes, buckets.ready_parts(sizes, setting))
    return partial(_after_backward, traffic.algorithm, setting, num_bytes)


def _among_neighbours(
    rounds: list[neighbours.Round], hidden_s: float | None, number: int, now_s: Floats, computing_s: Floats
) -> Floats:
    """Each worker waits for its neighbours' messages alone, which had been posted so long before it began to compute;
    none: they are when it has computed, which has what they take of a core in it."""
    messages, over_s = rounds[number % len(rounds)], now_s + computing_s
    senders, posting_s = messages.senders, np.zeros_like(over_s)
    np.maximum.at(posting_s, senders, np.maximum(0.0, messages.posting_s - messages.turns_s))
    if hidden_s is None:
        over_s = over_s + posting_s
        np.maximum.at(over_s, messages.receivers, over_s[senders] + messages.way_s)
        return over_s
    np.maximum.at(over_s, messages.receivers, now_s[senders] - hidden_s + messages.way_s)
    return over_s + posting_s


def _behind_backward(
    algorithm: str,
    setting: Setting,
    sizes_bytes: list[float],
    parts: list[float],
    number: int,
    now_s: Floats,
    computing_s: Floats,
) -> Floats:
    """Each bucket from when it is full and the one before has left the links."""
    operation_s = algorithms.operation_s(algorithm, setting)
    ends_s, free_s = now_s, 0.0
    for place, (num_bytes, part) in enumerate(zip(sizes_bytes, parts, strict=True), start=1):
        begin_s = np.maximum(now_s + part * computing_s + place * operation_s, free_s)
        free_s = float(begin_s.max()) + algorithms.parts_s(algorithm, setting, num_bytes)[0]
        ends_s = _reduced(algorithm, setting, begin_s, num_bytes)
    over_s: Floats = np.maximum(ends_s, now_s + computing_s + len(sizes_bytes) * operation_s)
    return over_s


def _after_backward(
    algorithm: str, setting: Setting, sizes_bytes: list[float], number: int, now_s: Floats, computing_s: Floats
) -> Floats:
    now_s = now_s + computing_s
    for num_bytes in sizes_bytes:
        now_s = _reduced(algorithm, setting, now_s + algorithms.operation_s(algorithm, setting), num_bytes)
    return now_s


def _reduced(algorithm: str, setting: Setting, begin_s: Floats, num_bytes: float) -> Floats:
    """When each rank is through an all-reduce that they enter at these times. Where they take turns at cores, nobody
    gains by being early: its core is at the others' messages."""
    if setting.takes_turns:
        return np.full_like(begin_s, float(begin_s.max()) + sum(algorithms.parts_s(algorithm, setting, num_bytes)))
    if algorithm == "auto":
        return _through_hosts(setting, begin_s, num_bytes)
    if algorithm == "ring":
        return ring_ends_s(setting.ring_of_ranks, begin_s, num_bytes)
    if algorithm == "halving-doubling":
        return _halved(setting, begin_s, num_bytes)
    if algorithm == "reduce-broadcast":
        return _through_one(setting, begin_s, num_bytes)
    return np.full_like(begin_s, float(begin_s.max()) + algorithms.time_s(algorithm, setting, num_bytes))


def _through_hosts(setting: Setting, begin_s: Floats, num_bytes: float) -> Floats:
    """A ring among hosts, which each enters with the last of its ranks."""
    hosts = [np.array(ranks) for ranks in setting.places.ranks_by_host]
    ends_s = ring_ends_s(setting.ring, np.array([begin_s[ranks].max() for ranks in hosts]), num_bytes)
    over_s = np.empty_like(begin_s)
    for ranks, end_s in zip(hosts, ends_s.tolist(), strict=True):
        over_s[ranks] = end_s
    return over_s


def ring_ends_s(ring: RingReduction, begin_s: Floats, num_bytes: float) -> Floats:
    """When each host is through a ring that they enter at these times.

    In each of R = 2 (n - 1) rounds a host waits for the one before it, so it ends at the maximum over d of when the
    host d places before began, plus d hops' latency, plus R times what a part takes through the slowest hop; of the d
    that lead to the same host, which differ by n, the largest counts.
    """
    size = len(begin_s)
    memory_s = 2 * float((ring.num_inner * num_bytes / ring.fabric.rates.memory[ring.leaders]).max())
    if size == 1:
        return begin_s + memory_s
    rounds = 2 * (size - 1)
    latencies_s = np.tile(ring.hop_latencies_s(num_bytes), 3)
    passed_s = np.concatenate([[0.0], np.cumsum(latencies_s)[:-1]])
    heads_s = np.tile(begin_s, 3) - passed_s
    places = np.arange(2 * size, 3 * size)
    latest_s = _largest_of_each(heads_s, size)[places - rounds] + passed_s[places]
    over_s: Floats = latest_s + rounds * num_bytes / (size * ring.hop_bytes_per_s) + memory_s
    return over_s


def _largest_of_each(values: Floats, width: int) -> Floats:
    """The largest of every `width` consecutive values, found by maxima of blocks from both ends."""
    blocks = values.reshape(-1, width)
    until = np.maximum.accumulate(blocks, axis=1).ravel()
    since = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    count = len(values) - width + 1
    found: Floats = np.maximum(since[:count], until[width - 1 :])
    return found


def _through_one(setting: Setting, now_s: Floats, num_bytes: float) -> Floats:
    """Everyone's tensor queues at rank 0, in the order in which they come; then all get the result."""
    hosts = np.array(setting.places.workers)
    num_others = len(hosts) - 1
    together = setting.fabric.shares_per_s(hosts[1:], np.full(num_others, hosts[0]))
    each_s = num_bytes / float(together.min()) / num_others
    begin_s = np.sort(now_s[1:])
    in_s = float(np.max(begin_s + each_s * np.arange(num_others, 0, -1)))
    rest_s = algorithms.time_s("reduce-broadcast", setting, num_bytes) - each_s * num_others
    return np.full_like(now_s, max(in_s, float(now_s.max())) + rest_s)


def _halved(setting: Setting, now_s: Floats, num_bytes: float) -> Floats:
    """Stage by stage: a rank goes on when its partner's part has come."""
    for senders, receivers, sent_s in setting.timed_halving(num_bytes):
        after_s = now_s.copy()
        after_s[receivers] = np.maximum(now_s[receivers], now_s[senders] + sent_s)
        now_s = after_s
    return now_s
