"""What passes from one exchange to the next under each kind of traffic: computing, waiting, exchanging."""

import math
import statistics
from dataclasses import dataclass, replace

import numpy as np

from paceline.planner import algorithms, costs, neighbours
from paceline.planner import filling as buckets
from paceline.planner.coded import CodedMean, coded_exchange, coded_mean, settled
from paceline.planner.draws import Draws
from paceline.planner.fabric import Floats, Loads
from paceline.planner.quorums import QuorumRounds
from paceline.planner.row_exchange import rows_beside
from paceline.planner.servers import ServerExchange, server_exchange
from paceline.planner.setting import Setting
from paceline.planner.turns import NUM_ROUNDS, Turns
from paceline.planner.weight_work import told_bytes
from paceline.strategies.traits import AllReduced, ClientTurns, Neighbouring, Served, Traffic

_NUM_DRAWS = 4096  # of computing times for one prediction, all workers together
_NUM_PUSHES, _LEAST_CYCLES = 1500, 8  # at servers with a quorum, all workers together; and of each worker
_NUM_TURNS, _MOST_DRAWS = 256, 8  # of clients, about so many are drawn for each round, and each one so often at most


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """A worker's mean cycle: so many steps and an exchange, without what a step takes besides."""

    slowest_s: float
    """Computing of those that are waited for, in all steps of the cycle."""
    end_s: float
    loads: Loads
    """What the exchanges of all workers put on the links."""
    num_steps: float = 1
    hidden_s: float = 0.0
    """The part of the exchange that backward hides."""
    served_s: float = 0.0
    """A server is busy with requests and updates of all workers for so long."""
    num_updates: float = 1
    """By the pushes of all workers: more than one where it takes only some of these."""
    num_counted: int | None = None
    """Workers whose gradients count; none: all."""
    bounds_s: tuple[float, float] | None = None
    """The least and the most that `end_s` may be, where that is all that is known."""


def cycle_of(traffic: Traffic | None, setting: Setting) -> Cycle:
    if isinstance(traffic, Served):
        return _of_served(traffic, setting)
    if isinstance(traffic, AllReduced):
        cycle = _of_fragments(traffic, setting) if traffic.is_in_fragments else _of_all_reduced(traffic, setting)
        return _with_what_is_besides(cycle, traffic, setting)
    if isinstance(traffic, Neighbouring):
        return _of_neighbours(traffic, setting)
    if isinstance(traffic, ClientTurns):
        return _of_turns(traffic, setting)
    return Cycle(slowest_s=setting.mean_s, end_s=setting.mean_s, loads=setting.fabric.nothing)


def besides_s(traffic: AllReduced, setting: Setting) -> float:
    """How long workers take for what follows an exchange."""
    return _besides(traffic, setting)[0]


def _besides(traffic: AllReduced, setting: Setting) -> tuple[float, Loads]:
    """How long workers take after an exchange, and what that puts on the links: they average further tensors of the
    gradients' size, servers take rows of tables, and weights that are no part of the gradients move."""
    time_s, loads = rows_beside(setting, row_staleness=traffic.row_staleness, joins=traffic.joins_rows)
    if setting.num_workers == 1:
        return time_s, loads
    work, algorithm = setting.work, traffic.algorithm
    parts_s = sum(algorithms.parts_s(algorithm, setting, work.parameter_bytes))
    time_s += traffic.num_besides * (parts_s + algorithms.operation_s(algorithm, setting))
    loads += algorithms.loads(algorithm, setting, work.parameter_bytes) * traffic.num_besides
    if work.weights:
        gathered_s, gathered = algorithms.all_gather(setting, told_bytes(work.weights))
        time_s, loads = time_s + gathered_s, loads + gathered
    for num_bytes in (each.num_rows * each.row_bytes for each in work.weights if each.is_dense):
        time_s += sum(algorithms.parts_s("auto", setting, num_bytes)) + algorithms.operation_s("auto", setting)
        loads += algorithms.loads("auto", setting, num_bytes)
    return time_s, loads


def _with_what_is_besides(cycle: Cycle, traffic: AllReduced, setting: Setting) -> Cycle:
    more_s, loads = _besides(traffic, setting)
    bounds_s = None if cycle.bounds_s is None else (cycle.bounds_s[0] + more_s, cycle.bounds_s[1] + more_s)
    return replace(cycle, end_s=cycle.end_s + more_s, loads=cycle.loads + loads, bounds_s=bounds_s)


def _of_all_reduced(traffic: AllReduced, setting: Setting) -> Cycle:
    traffic = settled(traffic, setting, lambda each: _of_all_reduced(each, setting).end_s)
    step_s = setting.slowest_s(traffic.every)
    slowest_s, before_s = traffic.every * step_s, (traffic.every - 1) * step_s
    if setting.num_workers == 1:
        return Cycle(slowest_s=slowest_s, end_s=slowest_s, loads=setting.fabric.nothing, num_steps=traffic.every)
    coded = None if traffic.codec is None else coded_exchange(traffic, setting)
    if coded is not None:
        end_s = slowest_s + algorithms.operation_s(traffic.algorithm, setting) + coded.time_s
        return Cycle(slowest_s=slowest_s, end_s=end_s, loads=coded.loads, num_steps=traffic.every)
    sizes = buckets.of(traffic, setting)
    parts = [algorithms.parts_s(traffic.algorithm, setting, bucket.num_bytes) for bucket in sizes]
    alone_s = sum(busy_s for busy_s, _ in parts) + parts[-1][1]
    operation_s = algorithms.operation_s(traffic.algorithm, setting)
    computed_s = step_s + len(sizes) * operation_s  # starting an exchange holds up backward
    if traffic.behind_backward:
        ready_s = [
            step_s * part + number * operation_s
            for number, part in enumerate(buckets.ready_parts(sizes, setting), start=1)
        ]
        ends_s = costs.queue_ends_s(ready_s, [busy_s for busy_s, _ in parts])
        last_s = max(computed_s, max(end + rest for end, (_, rest) in zip(ends_s, parts, strict=True)))
    else:
        last_s = computed_s + alone_s
    return Cycle(
        slowest_s=slowest_s,
        end_s=before_s + last_s,
        loads=algorithms.loads(traffic.algorithm, setting, sum(bucket.num_bytes for bucket in sizes)),
        num_steps=traffic.every,
        hidden_s=max(0.0, alone_s - (last_s - step_s)),
    )


def _of_fragments(traffic: AllReduced, setting: Setting) -> Cycle:
    """Each fragment's exchange is hidden as far as the steps that workers go on for meanwhile are long.

    A worker that is late by less than these steps keeps nobody waiting. With L, the steps by which chance makes the
    slowest late from one fragment to the next, a delay of d steps leaves L / (L + d) of what chance costs without one:
    an estimate, within a tenth of the simulator. A host that is always slower is not made up for.
    """
    traffic = settled(traffic, setting, lambda each: _of_fragments(each, setting).end_s)
    fragments = buckets.of_fragments(traffic, setting)
    spacing = traffic.every / traffic.fragments
    most_s, steady_s = (traffic.every * setting.slowest_s(num_steps) for num_steps in (spacing, math.inf))
    late = spacing * (most_s / steady_s - 1)
    lasts_s = steady_s + (most_s - steady_s) * (late / (late + traffic.delay) if traffic.delay else 1.0)
    if setting.num_workers == 1:
        return Cycle(slowest_s=lasts_s, end_s=lasts_s, loads=setting.fabric.nothing, num_steps=traffic.every)
    hides_s = traffic.delay * (lasts_s / traffic.every + setting.work.overhead_s)
    exchanges = [fragment_mean(traffic, setting, fragment) for fragment in fragments]
    exchanges_s = [each.time_s for each in exchanges]
    shown_s = sum(max(0.0, each_s - hides_s) for each_s in exchanges_s)
    shown_s += len(fragments) * algorithms.operation_s(traffic.algorithm, setting)
    return Cycle(
        slowest_s=lasts_s,
        end_s=lasts_s + shown_s,
        loads=sum((each.loads for each in exchanges), setting.fabric.nothing),
        num_steps=traffic.every,
        hidden_s=sum(min(each_s, hides_s) for each_s in exchanges_s),
        bounds_s=((steady_s if traffic.delay else lasts_s) + shown_s, most_s + shown_s),
    )


def fragment_mean(traffic: AllReduced, setting: Setting, fragment: buckets.Bucket) -> CodedMean:
    """The average of one fragment, through the codec if there is one, all workers beginning at once."""
    if traffic.codec is not None:
        coded = coded_mean(traffic.codec, traffic.codec_scope, setting, tensors=fragment.tensors)
        if coded is not None:
            return coded
    num_bytes = fragment.num_bytes
    time_s = sum(algorithms.parts_s(traffic.algorithm, setting, num_bytes))
    return CodedMean(time_s, algorithms.loads(traffic.algorithm, setting, num_bytes))


def _of_neighbours(traffic: Neighbouring, setting: Setting) -> Cycle:
    """A worker waits for its neighbours, and they for theirs. Of all messages of an exchange the slowest decides."""
    traffic = settled(traffic, setting, lambda each: _of_neighbours(each, setting).end_s)
    rounds = neighbours.rounds_of(traffic, setting)
    coding_s = neighbours.coding_s(traffic, setting)
    exchange_s = statistics.fmean(each.slowest_s for each in rounds)
    loads = sum((each.loads for each in rounds), setting.fabric.nothing) * (1 / len(rounds))

    def computed_s(hops: int) -> float:
        waited_for = neighbours.waited_for(traffic.topology, setting.groups, hops=hops)
        return traffic.every * setting.slowest_s(traffic.every, among=waited_for)

    slowest_s = computed_s(hops=2)
    if traffic.behind_computing:
        shown_s = coding_s + statistics.fmean(each.posted_s for each in rounds)
        cycle = _behind_computing(traffic, setting, slowest_s, exchange_s - shown_s + coding_s, loads)
        low_s, high_s = cycle.bounds_s or (cycle.end_s, cycle.end_s)
        return replace(cycle, end_s=cycle.end_s + shown_s, bounds_s=(low_s + shown_s, high_s + shown_s))
    all_s = traffic.every * setting.slowest_s(traffic.every)
    return Cycle(
        slowest_s=slowest_s,
        end_s=slowest_s + coding_s + exchange_s,
        loads=loads,
        num_steps=traffic.every,
        bounds_s=(computed_s(hops=1) + coding_s + exchange_s, all_s + coding_s + exchange_s),
    )


def _behind_computing(
    traffic: Neighbouring, setting: Setting, slowest_s: float, exchange_s: float, loads: Loads
) -> Cycle:
    """A worker needs what its neighbours had a step ago: it waits about as where nobody is more than one clock ahead.

    That is within 4 % of the simulator for log-normal times, and within 12 % for exponential ones.
    """
    computing_s = _window_s(setting, slowest_s, 1, traffic.every)
    hides_s = min(setting.mean_s, setting.steady_s) if setting.takes_turns else setting.mean_s
    left_s = max(0.0, exchange_s - hides_s - setting.work.overhead_s)
    return Cycle(
        slowest_s=computing_s,
        end_s=computing_s + left_s,
        loads=loads,
        num_steps=traffic.every,
        hidden_s=exchange_s - left_s,
        bounds_s=(min(computing_s, traffic.every * setting.mean_s) + left_s, slowest_s + exchange_s),
    )


# --- clients ---------------------------------------------------------------------------------------------------------


def _of_turns(traffic: ClientTurns, setting: Setting) -> Cycle:
    """The mean of some rounds, each with some typical draws of computing times."""
    turns = Turns(traffic, setting)
    rounds = [turns.round(number) for number in range(NUM_ROUNDS)]
    num_turns = statistics.fmean(sum(map(len, each)) for each in rounds)
    num_draws = 1 if setting.is_constant else math.ceil(min(_MOST_DRAWS, _NUM_TURNS / max(1.0, num_turns)))
    random = np.random.default_rng(0)  # the same whatever is compared
    slowest_s, ends_s = [], []
    for each in rounds * num_draws:
        computed_s = np.zeros(setting.num_workers)

        def computing_s(rank: int, steps: float, computed_s: Floats = computed_s) -> float:
            times = setting.groups[setting.group_of[rank]].times
            own_s = steps * times.expected_s
            if steps and not setting.is_constant:
                chances = random.random(math.ceil(steps))
                own_s = float(times.at(chances).sum()) * steps / len(chances)
            own_s += steps * setting.work.overhead_s  # who plays more turns has more of it
            computed_s[rank] += own_s
            return own_s

        ends_s.append(float(turns.ends_s(each, computing_s).max()))
        slowest_s.append(float(computed_s.max()))
    joint_s, joint_loads = joint_of_turns(traffic, setting)
    num_steps = statistics.fmean(sum(map(sum, each)) for each in rounds) / setting.num_workers or 1.0
    besides_s = num_steps * setting.work.overhead_s  # of the mean worker, which a cycle is without
    return Cycle(
        slowest_s=statistics.fmean(slowest_s) - besides_s,
        end_s=statistics.fmean(ends_s) + joint_s - besides_s,
        loads=sum((turns.loads(each) for each in rounds), setting.fabric.nothing) * (1 / NUM_ROUNDS) + joint_loads,
        num_steps=num_steps,
    )


def joint_of_turns(traffic: ClientTurns, setting: Setting) -> tuple[float, Loads]:
    """Prices the all-reduce at a round's end, which joins changes and their weights: its time, and its bytes a link."""
    if setting.num_workers == 1:
        return 0.0, setting.fabric.nothing
    num_bytes = (1 + traffic.num_besides) * setting.work.parameter_bytes
    return sum(setting.ring.parts_s(num_bytes)) + 2 * setting.operation_s, setting.ring.loads(num_bytes)


# --- servers ---------------------------------------------------------------------------------------------------------


def _of_served(traffic: Served, setting: Setting) -> Cycle:
    traffic = traffic.among(setting.num_workers)
    if traffic.takes_some_of(setting.num_workers):
        return _of_quorum(traffic, setting)
    return _of_synchronous(traffic, setting) if traffic.staleness is None else _of_asynchronous(traffic, setting)


def _of_quorum(traffic: Served, setting: Setting) -> Cycle:
    """The mean of some rounds, drawn."""
    assert traffic.quorum is not None
    exchange = server_exchange(setting, num_gradients=traffic.quorum, coding=traffic)
    num_rounds = math.ceil(max(_NUM_PUSHES, _LEAST_CYCLES * setting.num_workers) / traffic.quorum)
    means = QuorumRounds(traffic, setting, exchange, Draws(setting, seed=0)).means(num_rounds)
    num_updates = setting.num_workers / means.num_joined
    end_s = means.round_s * num_updates - traffic.every * setting.work.overhead_s
    trip_s = exchange.ask_s + float(exchange.trips_s.mean())
    return Cycle(
        slowest_s=max(traffic.every * setting.mean_s, end_s - trip_s),
        end_s=end_s,
        loads=exchange.loads,
        num_steps=traffic.every,
        num_updates=num_updates,
        served_s=setting.num_workers * exchange.request_s + num_updates * exchange.update_s,
    )


def _of_asynchronous(traffic: Served, setting: Setting) -> Cycle:
    every, staleness = traffic.every, traffic.staleness
    assert staleness is not None
    exchange = server_exchange(setting, num_gradients=1, coding=traffic)
    free_s = _asynchronous_cycle_s(setting, exchange, every)
    mean_s, slowest_s = every * setting.mean_s, every * setting.slowest_s(every)
    # Workers that begin together and always compute as long stay together, and wait for links with all others.
    together_s = mean_s + exchange.ask_s + exchange.rows.together_s + exchange.push_s + exchange.after_push_s
    together_s += float(exchange.latency_s.max())
    computing_s, end_s = mean_s, free_s
    bounds_s = free_s, max(free_s, together_s) if setting.is_constant else free_s
    if traffic.is_bounded:
        computing_s = max(mean_s, _window_s(setting, slowest_s, staleness, every))
        # Where links are full, who waits for others gives them the links: no cycle is shorter than what those need.
        full_s = setting.num_workers * max(exchange.hub_s, exchange.served_s)
        alone_s = exchange.ask_s + float((exchange.rows.own_s + exchange.trips_s).mean())
        end_s = max(free_s, full_s, computing_s + alone_s)
        computing_s = min(computing_s, end_s)
        bounds_s = free_s, max(end_s, slowest_s + free_s - mean_s, bounds_s[1])
    return Cycle(
        slowest_s=computing_s,
        end_s=end_s,
        loads=exchange.loads,
        num_steps=every,
        num_updates=setting.num_workers,
        served_s=exchange.served_s * setting.num_workers,
        bounds_s=bounds_s,
    )


def _asynchronous_cycle_s(setting: Setting, exchange: ServerExchange, every: int) -> float:
    """A worker's mean seconds from one push to the next, without the overhead of its steps."""
    num_workers, overhead_s = setting.num_workers, setting.work.overhead_s
    rows, trips = exchange.rows, exchange.rows.trips
    own_s, shared_s = float(exchange.own_all_s.mean()), exchange.hub_s
    other_s, other_shared_s = float(rows.own_other_s.mean()), exchange.other_s / num_workers
    besides_s = exchange.ask_s + float((exchange.trips_s + rows.own_s).mean()) + overhead_s
    if trips:  # what is met on them is no part of the rest
        own_s, shared_s = own_s - float(rows.own_s.mean()), shared_s - rows.together_s / num_workers
        other_s, other_shared_s = rows.core_s
    besides_s -= own_s + other_s + sum(trip.own_s for trip in trips)
    before_s = (every - 1) * overhead_s
    cycle_s = num_workers / sum(
        group.count / (every * group.times.expected_s + before_s + besides_s) for group in setting.groups
    )
    rate = costs.asynchronous_rate(
        num_workers, cycle_s=cycle_s, own_s=own_s, shared_s=shared_s, other=(other_s, other_shared_s), trips=trips
    )
    busy_s = setting.fabric.busiest(exchange.loads).busy_s  # cards let something pass at once, but no more in the end
    return max(num_workers / rate, num_workers * exchange.served_s, busy_s) - every * overhead_s


def _window_s(setting: Setting, slowest_s: float, staleness: float, every: int) -> float:
    """A clock's mean computing time where nobody is more than s clocks ahead, an estimate between the bounds.

    With w, what a barrier at every clock would cost in parts of a clock: w / (s + 1), as if there were one at every
    s + 1 clocks, or w**2 / (2 s + 1) where that is less: the difference of two workers is a random walk held within
    2 s + 1 clocks, whose pushes back are in proportion to its variance. It is within a tenth of a step of the simulator
    for log-normal times, and above it for exponential ones. A host that is always slower is not made up for.
    """
    mean_s = every * setting.steady_s
    wait = max(0.0, slowest_s / mean_s - 1)
    part = min(wait / (staleness + 1), wait**2 / (2 * staleness + 1)) if staleness else wait
    return mean_s * (1 + part)


def _of_synchronous(traffic: Served, setting: Setting) -> Cycle:
    counted = setting.num_workers - traffic.backup_workers
    exchange = server_exchange(setting, num_gradients=counted, coding=traffic)
    slowest_s = traffic.every * setting.slowest_s(traffic.every, left_out=traffic.backup_workers)
    end_s = slowest_s + exchange.ask_s + _after_slowest_s(setting, exchange, counted, traffic.every)
    end_s += exchange.rows.in_turns_s + float(exchange.latency_s.max())
    return Cycle(
        slowest_s=slowest_s,
        end_s=end_s,
        loads=exchange.loads,
        num_steps=traffic.every,
        served_s=exchange.update_s + setting.num_workers * exchange.request_s,
        num_counted=counted,
    )


def _after_slowest_s(setting: Setting, exchange: ServerExchange, counted: int, every: int) -> float:
    """From when the last worker that counts has computed until all are answered: the mean over some typical draws.

    Who is answered first computes first, and so is less in the others' way when it pushes.
    """
    num_workers = setting.num_workers
    computing_s = setting.drawn_s(every, 1 if setting.is_constant else max(1, _NUM_DRAWS // num_workers))
    ahead_s = exchange.turn_s * np.arange(num_workers - 1, -1, -1)
    starts_s = np.sort(computing_s - ahead_s, axis=1)[:, :counted]
    last_s = np.sort(computing_s, axis=1)[:, counted - 1]
    return float(np.mean(exchange.answered_s(starts_s) - last_s))
