"""Workers die, come and leave under local updates: the others join what they have changed, and every sample counts in
one round.

One process replays each run from what its workers have written down, and has to come to the same model.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.outer import Average, Nesterov, Outer
from tests.distributed.test_elastic import OPTIMIZERS, SCRIPT, of, trained
from tests.distributed.test_joining import held, joined, meanwhile
from tests.gossip_replay import Replica
from tests.rounds_replay import Exchange, Replay
from tests.rounds_replay import rounds_of as strategy_of

pytestmark = pytest.mark.ray
EXCHANGE = "paceline.strategies.outer_model:OuterModel"
OUTER = {"local-sgd": Average(), "diloco": Nesterov()}
Step = tuple[int, list[int]]
"""An epoch, and samples of it."""


def rounds_of(out: Path) -> list[dict[int, list[Step]]]:
    """What each worker has trained on of each round that counts. What the lost had of later ones does not.

    A worker's iteration in the log is that of the last exchange, so that lines of one iteration are of one round.
    """
    found: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for path in (out.parent / "log").glob("rank-*"):
        for line in path.read_text().splitlines():
            epoch, iteration, *index = map(int, line.split())
            found[iteration][int(path.name[5:])].append((epoch, index))
    until = {rank: committed_until(out, rank) for rank in {rank for parts in found.values() for rank in parts}}
    return [
        {rank: steps for rank, steps in found[iteration].items() if number < until[rank]}
        for number, iteration in enumerate(sorted(found))
    ]


def committed_until(out: Path, rank: int) -> float:
    """The round in which this worker was lost, as events count rounds."""
    if f"worker-{rank}" not in [event["who"] for event in of(out, "lost")]:
        return float("inf")
    formed = [event["details"] for event in of(out, "reformed")]
    return next((each["step"] for each in formed if rank not in each["ranks"] and each["step"] >= 0), float("inf"))


def require_each_sample_once(out: Path, *, epochs: int, samples: int = 96) -> None:
    counted: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for each in rounds_of(out):
        for epoch, index in (step for steps in each.values() for step in steps):
            counted[epoch].update(index)
    assert all(each == Counter(range(samples)) for each in counted.values()), counted


class Worker:
    """A model with an optimizer of its own, as the script makes them."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(96, 8, generator=generator)
        self.labels = torch.randint(0, 3, (96,), generator=generator)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)

    def train(self, steps: list[Step]) -> None:
        for _, index in steps:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.inputs[index]), self.labels[index]).backward()
            self.optimizer.step()
            self.scheduler.step()


def replayed(out: Path, *, outer: Outer, optimizer: str = "momentum") -> nn.Module:
    workers = {rank: Worker(optimizer) for rank in range(10)}
    shared = Worker(optimizer).model
    update = outer.optimizer(list(shared.parameters()))
    entered = {event["details"]["step"]: event["details"]["joined"] for event in of(out, "reformed")}
    for number, parts in enumerate(rounds_of(out)):
        before = copy.deepcopy(workers[min(parts)].optimizer.state_dict()["state"])
        totals = [sum(len(index) for _, index in each) for each in zip(*parts.values(), strict=True)]
        for parameter in shared.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank, steps in parts.items():
            workers[rank].model.load_state_dict(shared.state_dict())
            workers[rank].train(steps)
            share = sum(len(index) / total for (_, index), total in zip(steps, totals, strict=True)) / len(totals)
            for mean, own in zip(shared.parameters(), workers[rank].model.parameters(), strict=True):
                mean.grad += share * (mean.detach() - own.detach())
        update.step()
        for rank in entered.get(number, ()):  # who comes in this round has what one had at its beginning
            state = workers[rank].optimizer.state_dict()
            workers[rank].optimizer.load_state_dict({**state, "state": before})
            workers[rank].scheduler.load_state_dict(workers[min(parts)].scheduler.state_dict())
            for group, given in zip(
                workers[rank].optimizer.param_groups, workers[min(parts)].optimizer.param_groups, strict=True
            ):
                group["lr"] = given["lr"]
    return shared


def require_replayed(out: Path, *, strategy: str, epochs: int = 3, optimizer: str = "momentum") -> None:
    require_each_sample_once(out, epochs=epochs)
    saved = load_file(out / "model.safetensors")
    expected = replayed(out, outer=OUTER[strategy], optimizer=optimizer).state_dict()
    torch.testing.assert_close(saved, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_worker_dies_within_a_round(tmp_path: Path, ray_here: None) -> None:
    out = trained(tmp_path, "--fail", "1:5:kill", strategy="local-sgd:every=4", elastic="1:3")
    (lost,), (reformed,) = of(out, "lost"), of(out, "reformed")
    assert (lost["who"], lost["details"]["why"]) == ("worker-1", "its process ended")
    assert (reformed["details"]["ranks"], reformed["details"]["step"]) == ([0, 2], 1)
    require_replayed(out, strategy="local-sgd", epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_workers_die_at_every_place_of_an_exchange(tmp_path: Path, ray_here: None, strategy: str) -> None:
    """Before it has given its part; after that; when it has the result; while others regroup, of whom one dies."""
    faults = [f"4:1:{EXCHANGE}.take", f"3:2:{EXCHANGE}.start", f"1:4:{EXCHANGE}.wait", f"0:6:{EXCHANGE}.join"]
    given = [word for fault in faults for word in ("--fail-at", fault)]
    out = trained(tmp_path, *given, "--epochs", 3, workers=5, strategy=f"{strategy}:every=2", elastic="1:5")
    assert sorted(event["who"] for event in of(out, "lost")) == [f"worker-{rank}" for rank in (0, 1, 3, 4)]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [2]
    require_replayed(out, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [("--fail", "1:5:stop"), ("--fail-at", f"0:6:{EXCHANGE}.wait")], ids=["stopped", "the last exchange"]
)
def test_whoever_is_silent_or_dies_at_the_end(tmp_path: Path, ray_here: None, fault: tuple[str, str]) -> None:
    """A pass of 8 batches has rounds of 3, 3 and 2; what the dead had of the last one is dealt before the pass ends."""
    out = trained(tmp_path, *fault, "--epochs", 2, strategy="local-sgd:every=3", elastic="1:3")
    assert [event["who"] for event in of(out, "lost")] == [f"worker-{fault[1][0]}"]
    require_replayed(out, strategy="local-sgd", epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "lost", "entered"),
    [
        (("--fail", "0:11:kill"), ["worker-0"], [2]),
        (("--fail-giving", 0), ["worker-0"], [2]),
        (("--fail-at", f"2:1:{EXCHANGE}.wait"), ["worker-2"], [2]),
        (("--fail-to-join", "2:taking"), [], []),
    ],
    ids=["the giver when it has given", "the giver meanwhile", "the joiner in its exchange", "the joiner before"],
)
def test_who_gives_or_joins_dies(tmp_path: Path, ray_here: None, fault, lost: list[str], entered: list[int]) -> None:
    with meanwhile(tmp_path, {2: 3}):
        out = trained(tmp_path, *fault, *held(2), "--epochs", 3, workers=2, strategy="diloco:every=3", elastic="1:3")
    assert [event["who"] for event in of(out, "lost")] == lost
    assert joined(out) == entered
    require_replayed(out, strategy="diloco")


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path, ray_here: None) -> None:
    """From where two of its rounds are left, in the middle of a pass: with the shared model, the outer optimizer's
    state and each worker's own, of those two who were left of three."""
    out = trained(tmp_path, "--fail", "2:5:kill", strategy="diloco:every=3", elastic="1:3", max_steps=4)
    given = ["--log", str(out.parent / "log"), "--epochs", "2"]
    paceline.run(SCRIPT, workers=2, arguments=given, resume=out, strategy="diloco:every=3", elastic="1:3")
    require_replayed(out, strategy="diloco", epochs=2)


def exchanges_of(out: Path, *, every: int, fragments: int, workers: int) -> list[Exchange]:
    """Each round has one a fragment; events count them, and say which one a worker joined in or was lost before."""
    rounds: dict[int, dict[int, list[list[int]]]] = defaultdict(lambda: defaultdict(list))
    for path in (out.parent / "log").glob("rank-*"):
        for line in path.read_text().splitlines():
            _, iteration, *index = map(int, line.split())
            rounds[iteration][int(path.name[5:])].append(index)
    since = dict.fromkeys(range(workers), 0)
    since |= {rank: each["details"]["step"] for each in of(out, "reformed") for rank in each["details"]["joined"]}
    ends = [-(-every * (fragment + 1) // fragments) for fragment in range(-1, fragments)]
    found = []
    for place, iteration in enumerate(sorted(rounds)):
        for fragment in range(fragments):
            number = place * fragments + fragment
            there = [rank for rank, first in since.items() if first <= number < committed_until(out, rank)]
            parts = {rank: rounds[iteration][rank][ends[fragment] : ends[fragment + 1]] for rank in there}
            before = min(found[-1].parts) if found else 0
            found.append(Exchange(parts, {rank: before for rank in there if since[rank] == number}))
    return found


def as_replica(optimizer: str) -> Replica:
    made = Worker(optimizer)
    return Replica(made.model, made.optimizer, made.inputs, made.labels, made.scheduler)


def require_replayed_exchanges(
    out: Path, strategy: str, *, workers: int, epochs: int, optimizer: str = "momentum", within: float = 1e-6
) -> None:
    """With moments, fragments and delays: each sample counts once a pass. `workers`: at the start."""
    rounds = strategy_of(strategy)
    replay = Replay(lambda: as_replica(optimizer), rounds)
    exchanges = exchanges_of(out, every=rounds.every, fragments=rounds.fragments, workers=workers)
    counted = Counter(i for one in exchanges for parts in one.parts.values() for part in parts for i in part)
    assert counted == Counter(dict.fromkeys(range(96), epochs))
    for one in exchanges:
        replay.exchange(one)
    saved = load_file(out / "model.safetensors")
    for (name, _), own in zip(Worker(optimizer).model.named_parameters(), replay.shared, strict=True):
        torch.testing.assert_close(saved[name], own.detach(), rtol=1e-4, atol=within)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("local-sgd:every=4:momentum_every=1", "momentum"),
        ("des-loc:every=2:momentum_every=1:variance_every=2", "adamw"),
        ("diloco:every=4:fragments=2", "momentum"),
        ("diloco:every=4:delay=2:alpha=0.5", "momentum"),
    ],
)
def test_one_joins_and_another_dies_with_moments_fragments_and_a_delay(
    tmp_path: Path, ray_here: None, strategy: str, optimizer: str
) -> None:
    given = ["--epochs", 3, *held(2), "--optimizer", optimizer, "--fail", "1:18:kill"]
    with meanwhile(tmp_path, {2: 3}):
        out = trained(tmp_path, *given, workers=2, strategy=strategy, elastic="1:3")
    assert (joined(out), [event["who"] for event in of(out, "lost")]) == ([2], ["worker-1"])
    require_replayed_exchanges(out, strategy, workers=2, epochs=3, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "last"),
    [
        ("local-sgd:every=2:momentum_every=1", "3:2:paceline.strategies.joined_states:JoinedStates.average", 3),
        ("local-sgd:every=2:momentum_every=1", "1:3:paceline.strategies.joined_states:JoinedStates.take_up", 1),
        ("diloco:every=2:fragments=2", f"0:3:{EXCHANGE}.wait", 0),
        ("diloco:every=4:delay=2:alpha=0.5", f"2:7:{EXCHANGE}.is_under_way", 2),
    ],
    ids=[
        "before moments are averaged",
        "with moments that nobody has taken up",
        "between fragments",
        "while its part is on its way",
    ],
)
def test_one_dies_in_an_exchange_of_several_parts(
    tmp_path: Path, ray_here: None, strategy: str, fault: str, last: int
) -> None:
    out = trained(tmp_path, "--fail-at", fault, "--epochs", 2, workers=4, strategy=strategy, elastic="1:4")
    assert [event["who"] for event in of(out, "lost")] == [f"worker-{last}"]
    require_replayed_exchanges(out, strategy, workers=4, epochs=2)


@pytest.mark.slow
def test_one_joins_within_a_round_and_another_leaves(tmp_path: Path, ray_here: None) -> None:
    given = ["--epochs", 3, *held(2, 6), "--optimizer", "adamw"]
    with meanwhile(tmp_path, {2: 3, 6: 2}):
        out = trained(tmp_path, *given, workers=2, strategy="diloco:every=3", elastic="1:3")
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    require_replayed(out, strategy="diloco", optimizer="adamw")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gossip", "local-sgd:every=1"])
def test_one_dies_before_and_one_when_a_codec_is_chosen(tmp_path: Path, ray_here: None, strategy: str) -> None:
    """Those who are left choose alike, by their own clocks, once: otherwise they would wait for one another for ever.
    The first death has them begin to measure anew."""
    options = ":codec=auto:codec.among=bf16:codec.after=4:codec_scope=all"
    given = ["--fail", "1:3:kill", "--fail-at", "3:6:paceline.strategies.choosing:Choosing.step_ended", "--epochs", 3]
    out = trained(tmp_path, *given, workers=4, strategy=f"{strategy}{options}", elastic="1:4")
    assert [event["who"] for event in of(out, "lost")] == ["worker-1", "worker-3"]
    require_each_sample_once(out, epochs=3)
    told = [event["details"]["codec"] for event in of(out, "tuned") if "codec" in event["details"]]
    assert len(told) == 1
    assert told[0].partition(":")[0] in ("none", "bf16")
    assert all(tensor.isfinite().all() for tensor in load_file(out / "model.safetensors").values())
