"""What a plan comes to, in sentences."""

import math
from dataclasses import replace

from paceline.lab import words
from paceline.lab.variant import Variant
from paceline.planner import failing
from paceline.planner.question import moves_rows, why_unpriced
from paceline.planner.search import CLOSE, Check, Knee, Plan, Point, Unranked
from paceline.planner.weight_work import moved_bytes
from paceline.strategies import build
from paceline.strategies.traits import Served

_COUNTED = (
    "How long a step computes was counted, not measured: its operations over the gflop_per_s of the cluster's file. "
    "Give step_s in [compute] there, or measure it with paceline probe."
)
_EVEN = (
    "Connections are taken to share links evenly, which the cluster's file says they do not: servers with many workers "
    "are slower than planned; --engine virtual shows by how much."
)

_KEPT_STEPS = 3  # for which copies of rows are used, as an example

_WHY_UNRANKED: dict[Unranked, str] = {
    "no noise scale": "Workers' models differ at times; how many more steps that takes follows from the noise scale: "
    "give --noise-scale measure.",
    "no rule": "Workers' models differ at times, and no plan knows how many more steps that takes; paceline compare "
    "measures it.",
    "codec": "A codec leaves out much of each gradient, and no plan knows how many more steps that takes; paceline "
    "compare measures it.",
}


_AHEAD = (
    "The script reads rows ahead (read_ahead), which no plan prices: each step is taken to wait for its rows. "
    "--engine virtual has them come while others move."
)


def answer(plan: Plan) -> list[str]:
    lines = [*_best(plan), *_failures(plan), *_knees(plan), *_ratio(plan)]
    if plan.noise is not None:
        lines.append(_noise(plan))
    elif plan.best.prediction.unit == "gradient" and plan.best.prediction.workers > 1:
        lines.append("A stale gradient's samples count here as a fresh one's: --noise-scale weighs them.")
    if plan.is_counted:
        lines.append(_COUNTED)
    lines += [*_room(plan), *_rows(plan), *_weights(plan)]
    if plan.unpriced:
        lines += _left_out(plan)
    lines += [*_drifting(plan), *_unranked(plan)]
    if plan.cluster.communication.unevenness:
        lines.append(_EVEN)
    return [*lines, *_checks(plan.checks)]


def _rows(plan: Plan) -> list[str]:
    rows = plan.work.rows
    if rows is None:
        return []
    asked, seldom, sent = (
        words.quantity(num_bytes / 1e6)
        for num_bytes in (sum(rows.asked_bytes(0)), sum(rows.asked_bytes(_KEPT_STEPS)), rows.sent_bytes)
    )
    told = (
        f"Rows of tables: a worker's step asks servers for {asked} MB and sends {sent} MB, by the keys of the script's "
        f"first batches; with row_staleness={_KEPT_STEPS} it would ask for {seldom} MB."
    )
    return [told, _AHEAD] if rows.is_read_ahead else [told]


def _weights(plan: Plan) -> list[str]:
    weights = plan.work.weights
    if not weights:
        return []
    most = max(point.prediction.workers for point in plan.points)
    whole = sum(plan.work.tensor_bytes[each.index] for each in weights)
    own, everyone, all_of_it = (
        words.quantity(num_bytes / 1e6) for num_bytes in (moved_bytes(weights, 1), moved_bytes(weights, most), whole)
    )
    traffic = {asked: build(asked).traits.traffic for asked in dict.fromkeys(point.asked for point in plan.points)}
    by_rows = {asked: any(map(moves_rows, moved)) for asked, moved in traffic.items() if moved}
    said = [
        f"{what} under {words.listed(names)}"
        for what, way in (("rows move", True), ("the whole weight moves", False))
        if (names := [asked for asked, is_by_rows in by_rows.items() if is_by_rows is way])
    ]
    return [
        f"Rows of nn.Embedding(sparse=True): a worker's step has gradients of {own} MB of rows, and those of "
        f"{words.workers(most)} come to {everyone} MB, where the weights have {all_of_it} MB, by the keys of the "
        f"script's first batches; {', '.join(said)}."
    ]


def _drifting(plan: Plan) -> list[str]:
    """What is assumed of workers whose models differ."""
    apart = [point for point in plan.best_of_each if point.is_ranked and point.drift > 1]
    if not apart:
        return []
    said = words.listed([f"{point.label} {point.drift:.1f}" for point in apart])
    return [
        "Workers whose models differ between exchanges need a smaller learning rate, and so more steps than if they "
        f"averaged every gradient: {said} times as many, if data are alike on all of them (docs/planning.md)."
    ]


def _unranked(plan: Plan) -> list[str]:
    """A line a reason."""
    labels: dict[Unranked, list[str]] = {}
    for point in plan.best_of_each:
        if point.unranked is not None:
            labels.setdefault(point.unranked, []).append(point.label)
    return [f"Shown, but not ranked: {words.listed(own)}. {_WHY_UNRANKED[why]}" for why, own in labels.items()]


def _left_out(plan: Plan) -> list[str]:
    """A line a reason."""
    names: dict[str | None, list[str]] = {}
    for name in plan.unpriced:
        names.setdefault(why_unpriced(build(name).traits, plan.work), []).append(name)
    return [
        f"Left out: {words.listed(own)}, {'which' if len(own) == 1 else 'each of which'} {reason}."
        for reason, own in names.items()
    ]


def _best(plan: Plan) -> list[str]:
    best = plan.best.prediction
    rate = f"{words.quantity(best.samples_per_s)} samples/s"
    by = _by(plan)
    if best.workers == 1:
        has_others = any(point.prediction.workers > 1 for point in plan.points)
        return [f"One worker alone{f': {by} no exchange pays on this cluster' if has_others else ''}. {rate}."]
    place = f"{plan.best.label} on {words.workers(best.workers)}"
    if plan.best.target_s is not None:
        gain = (
            f"the target in {words.seconds(plan.best.target_s)}, {words.ratio(plan.best.merit)} times sooner than one"
        )
    elif plan.best.target_speedup is not None:
        gain = f"the target {words.ratio(plan.best.merit)} times sooner than one worker"
    else:
        gain = f"{words.ratio(plan.best.merit)} times one worker"
    efficiency = f"{words.percent(best.efficiency)} of what its hosts would do alone"
    return [f"{place}: {gain} {by}.", f"It does {rate}, {efficiency}; what binds is {best.binding}."]


def _failures(plan: Plan) -> list[str]:
    """What gets there first where hosts fail, what failures cost it, and how often the best is to be saved."""
    if not plan.cluster.can_fail:
        return []
    survey = failing.Survey(plan)
    first = survey.first
    whole = "the target" if first.point.target_s is not None else "what takes a day without failures"
    lines = [
        f"With failures, {_named(first)} gets furthest: {whole} in {takes(first)}, "
        f"{words.percent(first.goodput)} of the time of use{_price(first)}. A host of it goes every "
        f"{words.seconds(first.between_s)} on average."
    ]
    restarting = next(each for each in survey.of(plan.best) if each.way == "restart")
    if restarting.every is not None:
        lines.append(
            f"{_named(restarting)} would take {takes(restarting)}{_price(restarting)}, with "
            f"--checkpoint-every {restarting.every}."
        )
    staying = replace(plan, cluster=failing.on_demand(plan.cluster))
    if first.cost and staying.cluster != plan.cluster:
        kept = min(failing.Survey(staying).of(first.point), key=lambda outcome: outcome.time_s)
        lines.append(f"On hosts that nobody takes away: {takes(kept)}{_price(kept)}.")
    return lines


def _named(outcome: failing.Outcome) -> str:
    how = "with --elastic" if outcome.way == "elastic" else "begun anew from checkpoints"
    return f"{outcome.point.label} on {words.workers(outcome.point.prediction.workers)}, {how},"


def _price(outcome: failing.Outcome) -> str:
    return f", for {words.quantity(outcome.cost)}" if 0 < outcome.cost < math.inf else ""


def takes(outcome: failing.Outcome) -> str:
    return words.seconds(outcome.time_s) if outcome.time_s < math.inf else "for ever"


def _by(plan: Plan) -> str:
    """What the best is the best in."""
    if plan.noise is None:
        return "by throughput only, without a noise scale"
    if math.isinf(plan.noise.samples):
        return "by a gradient that is lost in its noise"
    return f"by a noise scale of {words.quantity(plan.noise.samples)} samples"


def _knees(plan: Plan) -> list[str]:
    """Knees of the best strategy with no servers; of the best with servers, at one server and the most that help."""
    lines = []
    curved = {knee.strategy for knee in plan.knees}
    known = [point for point in plan.ranked if point.prediction.strategy in curved]
    for has_servers in (False, True):
        alike = [point for point in known if bool(point.prediction.servers) == has_servers]
        if alike:
            best = max(alike, key=lambda point: point.merit).prediction.strategy
            mine = [knee for knee in plan.knees if knee.strategy == best]
            lines.append(_knee(mine[0], mine[-1]))
    return lines


def _knee(first: Knee, last: Knee) -> str:
    name = f"{first.strategy} with {words.servers(first.servers)}" if first.servers else first.strategy
    if first.workers is None:
        return f"{name}: no knee up to the most workers looked at."
    said = f"{name}: beyond {words.workers(first.workers)} another adds less than half of one; "
    said += f"what binds there is {first.resource}"
    if last is first:
        return f"{said}."
    moved = "there is no knee" if last.workers is None else f"the knee is at {last.workers}"
    return f"{said}; with {words.servers(last.servers)} {moved}."


def _ratio(plan: Plan) -> list[str]:
    """The fewest servers that do as well as any number, where there are most workers: for workers that wait for all,
    and for those that wait for nobody."""
    lines = []
    for best in plan.best_of_each:
        traffic = Variant.parse(best.label).strategy.traits.traffic or ()
        count = best.prediction.workers
        if count == 1 or not any(isinstance(moved, Served) and not moved.is_bounded for moved in traffic):
            continue
        name = best.prediction.strategy
        mine = [point for point in plan.points if point.prediction.strategy == name]
        servers = _fewest([point for point in mine if point.prediction.workers == count]).prediction.servers
        each = count / servers
        ratio = f"one to every {each:.3g} workers" if each > 1 else f"{1 / each:.3g} to every worker"
        come = f"{words.servers(servers)} {'comes' if servers == 1 else 'come'}"
        lines.append(f"{name} on {words.workers(count)}: {come} within 5 % of the most samples/s, {ratio}.")
    return lines


def _room(plan: Plan) -> list[str]:
    """Where hosts are too few for servers of their own, which is not to be taken for a verdict on servers; or workers
    are on more than the script takes."""
    demand = plan.work.demand
    if demand is not None and demand.is_of_one_host:
        return [
            f"{demand.by} takes one host; for workers on several write MultiWorkerMirroredStrategy, or say nothing."
        ]
    if demand is not None and not build(demand.strategy).traits.num_servers:
        return []
    most = max(point.prediction.workers for point in plan.points)
    beside = max((point.prediction.workers for point in plan.points if point.prediction.servers), default=0)
    if 2 * beside > most:
        return []
    found = f"with more than {words.workers(beside)} no host is" if beside else "no host is"
    return [
        f"Strategies with servers are left out where {found} free for one: "
        'add hosts, or say placement = "with workers" in [servers].'
    ]


def _fewest(points: list[Point]) -> Point:
    top = max(point.prediction.samples_per_s for point in points)
    close = [point for point in points if point.prediction.samples_per_s >= (1 - CLOSE) * top]
    return min(close, key=lambda point: point.prediction.servers)


def _noise(plan: Plan) -> str:
    assert plan.noise is not None
    samples = plan.noise.samples
    if math.isinf(samples):
        return "The gradient is lost in its noise: larger batches are taken to save as many steps as they cost samples."
    batch = plan.best.prediction.global_batch
    return (
        f"Gradient noise scale: about {words.quantity(samples)} samples; an update of the best has "
        f"{words.quantity(batch)}. Far above the scale, larger batches save hardly any steps."
    )


def _checks(checks: tuple[Check, ...]) -> list[str]:
    if not checks:
        return []
    said = [f"{check.label} on {check.workers} {round(check.deviation, 3) + 0.0:+.1%}" for check in checks]
    return [f"The closed forms beside the simulator: {words.listed(said)}."]
