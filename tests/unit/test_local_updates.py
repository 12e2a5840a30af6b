"""Local updates without an engine: published numbers, and what each variant is when another's part is taken out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from paceline.errors import NonFiniteGradient, UsageError
from paceline.outer import Average, Momentum, Nesterov, OfTorch, dealt_out
from paceline.schedule import Rounds
from paceline.strategies import build, name_of, settings_of
from paceline.strategies.base import Synchronizer
from paceline.strategies.local_updates import LocalUpdates
from tests.unit.local_rounds import (
    Quadratic,
    flat,
    network,
    problem,
    run_alone,
    shared,
    shared_after,
    train,
    with_adam,
    with_sgd,
)

EXACT = {"rtol": 0.0, "atol": 0.0}


# --- published numbers ------------------------------------------------------------------------------------------------


def test_local_sgd_ends_beside_the_optimum() -> None:
    """f_i = a_i (x - b_i)^2 / 2: who is through with its own in a round pulls less than its gradient does.

    With H steps of rate r a worker comes to b_i + (x - b_i) (1 - r a_i)^H; the mean's fixed point follows.
    """
    a, b, rate, every = (1.0, 2.0, 4.0), (1.0, 0.0, -2.0), 0.1, 5
    pulls = [1 - (1 - rate * each) ** every for each in a]
    fixed = sum(pull * own for pull, own in zip(pulls, b, strict=True)) / sum(pulls)
    assert fixed == pytest.approx(-0.716028, abs=5e-7)

    def script(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> float:
        for _ in range(13 * every):
            optimizer.zero_grad()
            (a[rank] * (model.x - b[rank]) ** 2 / 2).sum().backward()
            synchronizer.step(optimizer.step, pause_at=0)
        assert synchronizer.iteration == 13
        return float(model.x.detach())

    def build() -> tuple[nn.Module, Optimizer]:
        model = Quadratic()
        return model, SGD(model.parameters(), lr=rate)

    found = run_alone(LocalUpdates(every=every), 3, script, build=build)
    assert found == pytest.approx([-0.716028] * 3, abs=1e-6)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize(
    ("delay", "alpha", "outer", "live"),
    [
        (0, 0.0, [(-11, -35), (-23, -47)], None),
        (0, 0.5, [(-11, -29), (-23, -35)], [(-8, -24.5), (-17, -32)]),
        (0, 1.0, [(-11, -23), (-23, -23)], None),
        (1, 0.0, [(-7, -27), (-19, -39)], None),
        (1, 0.5, [(-7, -25), (-19, -31)], [(-6, -21.5), (-15, -29)]),
        (1, 1.0, [(-7, -23), (-19, -23)], None),
    ],
)
def test_fragments_go_as_in_torchft(
    delay: int, alpha: float, outer: list[tuple[float, float]], live: list[tuple[float, float]] | None
) -> None:
    """The fixtures of torchft's tests of DiLoCo: a gradient of 2, an inner rate of 1, an outer one of 2."""
    strategy = LocalUpdates(every=6, fragments=2, delay=delay, alpha=alpha, outer=Momentum(lr=2.0, momentum=0.0))

    def script(
        rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer
    ) -> dict[int, tuple[Tensor, Tensor]]:
        found = {}
        for step in range(1, 13):
            for layer in model.layers:
                layer.grad = torch.full((1,), 2.0)
            synchronizer.step(optimizer.step, pause_at=0)
            assert synchronizer.iteration == step // 6
            found[step] = (shared(synchronizer), flat(model))
        return found

    def build() -> tuple[nn.Module, Optimizer]:
        model = TwoLayers()
        return model, SGD(model.parameters(), lr=1.0)

    for found in run_alone(strategy, 2, script, build=build):
        for layer, steps in enumerate(((3, 9), (6, 12))):
            assert tuple(float(found[step][0][layer]) for step in steps) == outer[layer]
            if live is not None:
                assert tuple(float(found[step][1][layer]) for step in steps) == live[layer]


# --- what one variant is when a part is taken out --------------------------------------------------------------------


def test_slow_momentum_of_none_is_local_sgd() -> None:
    found = shared_after(build("slowmo", {"every": 4, "outer.momentum": "0"}))
    torch.testing.assert_close(found, shared_after(build("local-sgd", {"every": 4})), rtol=1e-6, atol=1e-7)
    slow = shared_after(build("slowmo", {"every": 4}))
    assert float((slow - found).abs().max()) > 1e-3


def test_a_round_is_worked_out_by_hand() -> None:
    """DiLoCo with Adam inside: a plain loop over all workers' models."""
    size, every, num_rounds = 3, 4, 6
    torch.manual_seed(0)
    start = flat(network())
    workers = [with_adam() for _ in range(size)]
    outer, velocity = start.clone(), torch.zeros_like(start)
    for number in range(num_rounds):
        for rank, (model, optimizer) in enumerate(workers):
            nn.utils.vector_to_parameters(outer.clone(), model.parameters())
            for step in range(number * every, (number + 1) * every):
                x, y = problem(rank, step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        change = outer - torch.stack([flat(model) for model, _ in workers]).mean(0)
        velocity = 0.9 * velocity + change
        outer = outer - 0.7 * (change + 0.9 * velocity)
    found = shared_after(build("diloco", {"every": every}), build=with_adam)
    torch.testing.assert_close(found, outer, rtol=1e-4, atol=1e-5)


def test_fragments_that_are_exchanged_together_are_the_whole() -> None:
    """In a round of one step all are, and the outer step knows nothing of fragments."""
    whole, parts = (shared_after(LocalUpdates(every=3, outer=Nesterov(), fragments=number)) for number in (1, 3))
    assert not torch.equal(whole, parts), "rounds of more steps have them one after the other"
    whole, parts = (
        shared_after(LocalUpdates(every=3, post_local_from=24, outer=Nesterov(), fragments=number)) for number in (1, 3)
    )
    torch.testing.assert_close(parts, whole, **EXACT)


def test_one_fragment_without_delay_and_alpha_is_diloco() -> None:
    """Its algorithm 1 as it is printed, with torch's own SGD as the outer optimizer, to the bit: two workers' changes
    have one sum, whoever adds them."""
    every, num_rounds = 4, 6
    torch.manual_seed(0)
    start, workers = network(), [with_adam() for _ in range(2)]
    outer = SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(num_rounds):
        for rank, (model, optimizer) in enumerate(workers):
            model.load_state_dict(start.state_dict())
            for step in range(number * every, (number + 1) * every):
                x, y = problem(rank, step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        for shared_one, *own in zip(start.parameters(), *(model.parameters() for model, _ in workers), strict=True):
            shared_one.grad = (sum(shared_one.detach() - each.detach() for each in own) / 2).clone()  # type: ignore[union-attr]
        outer.step()
    for name, options in (
        ("diloco", {}),
        ("local-sgd", {"fragments": 1, "delay": 0, "alpha": 0.0, "outer": "nesterov"}),
    ):
        found = shared_after(build(name, {"every": every, **options}), size=2, build=with_adam)
        torch.testing.assert_close(found, flat(start), **EXACT)


@pytest.mark.parametrize("outer", [OfTorch("Adagrad", 0.1), OfTorch("NAdam", 0.01), Nesterov()])
def test_any_optimizer_may_be_the_outer_one(outer: Any) -> None:
    """Its steps are those of torch, with the mean change in the place of a gradient."""

    def script(rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer) -> Tensor:
        twin = nn.Parameter(flat(model))
        optimizer_of_twin = outer.optimizer([twin])
        for _ in range(3):
            before = flat(model)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            changed = before
            for _ in range(2):
                synchronizer.step(optimizer.step, pause_at=0)
                changed = changed - 0.1
            twin.grad = before - changed
            optimizer_of_twin.step()
        torch.testing.assert_close(shared(synchronizer), twin.detach(), rtol=1e-4, atol=1e-5)
        return shared(synchronizer)

    def build() -> tuple[nn.Module, Optimizer]:
        model = network()
        return model, SGD(model.parameters(), lr=0.1)

    steps = run_alone(LocalUpdates(every=2, outer=outer), 2, script, build=build)
    assert torch.equal(*steps)


def test_changes_count_by_their_samples() -> None:
    """A worker whose batches are three times as large counts three times."""

    def script(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> Tensor:
        synchronizer.set_weight(1.5 if rank else 0.5)
        for _ in range(2):
            model.x.grad = torch.full_like(model.x, float(rank))
            synchronizer.step(optimizer.step, pause_at=0)
        return model.x.detach().clone()

    def build() -> tuple[nn.Module, Optimizer]:
        model = Quadratic()
        return model, SGD(model.parameters(), lr=1.0)

    assert [float(x) for x in run_alone(LocalUpdates(every=2), 2, script, build=build)] == [-1.5, -1.5]


# --- not finite -------------------------------------------------------------------------------------------------------


def overflow(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> float:
    """Every gradient is finite; the last rank's parameter is not after its steps."""
    for _ in range(4):
        model.x.grad = torch.full_like(model.x, 1e308 if rank else 1.0)
        synchronizer.step(optimizer.step, pause_at=0)
    return float(model.x.detach())


def steep() -> tuple[nn.Module, Optimizer]:
    model = Quadratic()
    return model, SGD(model.parameters(), lr=1.0)


def test_a_change_that_is_not_finite() -> None:
    with pytest.raises(Exception, match=f"{NonFiniteGradient.__name__}.*parameter 'x' on rank 1"):
        run_alone(LocalUpdates(every=4), 2, overflow, build=steep)
    assert run_alone(LocalUpdates(every=4, nonfinite="skip"), 2, overflow, build=steep) == [-2.0, -2.0]
    assert all(map(math.isinf, run_alone(LocalUpdates(every=4, nonfinite="allow"), 2, overflow, build=steep)))


def overflow_once(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> float:
    """A round in which the last rank's change is not finite, and one in which it is."""
    for step in range(8):
        model.x.grad = torch.full_like(model.x, (1e308 if step < 4 else 3.0) if rank else 1.0)
        synchronizer.step(optimizer.step, pause_at=0)
    return float(model.x.detach())


def test_whoever_was_left_out_mixes_again_in_the_next_round() -> None:
    """By hand: shared -2 and then -10.5, of which and of its own -7 and -14 each worker takes a half."""
    strategy = LocalUpdates(every=4, alpha=0.5, nonfinite="skip")
    assert run_alone(strategy, 2, overflow_once, build=steep) == [-8.75, -12.25]


# --- state ------------------------------------------------------------------------------------------------------------


def test_what_all_workers_have_alike_is_told_from_what_each_has() -> None:
    def script(rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer) -> dict[str, set[str]]:
        train(rank, synchronizer, model, optimizer, num_steps=8)
        own = synchronizer.own_state()
        return {
            fate: {name.split(".")[0] for name, state in own.items() if state.fate == fate}
            for fate in ("same", "average", "reset")
        }

    whole = {"same": {"outer"}, "average": {"optimizer"}, "reset": {"weights"}}
    assert run_alone(build("diloco", {"every": 4}), 2, script, build=with_sgd) == [whole] * 2
    parts = {**whole, "average": {"optimizer", "parameters"}}
    assert run_alone(build("diloco", {"every": 4, "fragments": 2}), 2, script, build=with_sgd) == [parts] * 2


# --- schedule and fragments -------------------------------------------------------------------------------------------


rounds = st.builds(
    lambda every, fragments, delay, single, warmup: Rounds(
        every=every,
        fragments=1 + fragments % every,
        delay=delay % (every // (1 + fragments % every)),
        single=single,
        warmup=warmup,
    ),
    *(st.integers(low, high) for low, high in ((1, 12), (0, 11), (0, 11), (0, 5), (0, 6))),
)


@given(schedule=rounds)
def test_every_fragment_leaves_and_is_joined_once_a_round(schedule: Rounds) -> None:
    num_rounds = schedule.single + schedule.warmup + 3
    lengths = []
    for number in range(num_rounds):
        first, last = schedule.num_steps(number), schedule.num_steps(number + 1)
        lengths.append(last - first)
        steps = range(first + 1, last + 1)
        left, joined = ({f: step for step in steps for f in at(step)} for at in (schedule.leaving, schedule.due))
        everything = Counter(range(schedule.fragments))
        assert Counter(f for step in steps for f in schedule.leaving(step)) == everything
        assert Counter(f for step in steps for f in schedule.due(step)) == everything
        assert joined[schedule.fragments - 1] == last
        assert all(0 <= joined[f] - left[f] <= schedule.delay for f in everything)
        assert all(joined[f] - left[f] == schedule.delay for f in everything if lengths[-1] == schedule.every)
        assert [schedule.num_rounds(step) for step in steps] == [number] * (len(steps) - 1) + [number + 1]
    growing = lengths[schedule.single : schedule.single + schedule.warmup]
    assert lengths[: schedule.single] == [1] * schedule.single
    assert growing == sorted(growing)
    assert set(lengths[schedule.single + schedule.warmup :]) == {schedule.every}


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), number=st.integers(1, 8))
def test_fragments_are_about_as_large(sizes: list[int], number: int) -> None:
    """No two differ by more than a tensor."""
    number = min(number, len(sizes))
    totals = Counter(dict.fromkeys(range(number), 0))
    for size, fragment in zip(sizes, dealt_out(sizes, number), strict=True):
        totals[fragment] += size
    assert len(totals) == number
    assert min(totals.values()) > 0
    assert max(totals.values()) - min(totals.values()) <= max(sizes)


# --- names, and what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local-sgd", {}),
        ("local-sgd", {"outer": "torch", "outer.kind": "Adagrad", "outer.lr": "0.1"}),
        ("post-local", {"post_local_from": "30"}),
        ("slowmo", {"outer.momentum": "0.7"}),
        ("diloco", {}),
        ("diloco", {"outer.lr": "0.5", "fragments": "4", "alpha": "0.5", "delay": "5"}),
    ],
)
def test_a_strategy_has_the_name_that_says_most_of_it(name: str, options: dict[str, str]) -> None:
    strategy = build(name, options)
    assert name_of(strategy) == name
    assert build(name, settings_of(strategy)) == strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"every": 4, "fragments": 5}, "fragments must be at most every, 4"),
        ({"every": 8, "fragments": 2, "delay": 4}, "delay must be below the 4 steps from one fragment to the next"),
        ({"post_local_from": -1}, "post_local_from must be at least 0"),
        ({"every": 1, "warmup": 3}, "warmup has no effect with every=1"),
        ({"every": 1, "post_local_from": 3}, "post_local_from has no effect with every=1"),
        ({"alpha": 1.5}, "alpha must be 0 to 1"),
        ({"alpha": 1.0}, "alpha=1 with outer=average has no effect"),
        ({"outer": Nesterov(momentum=-1.0)}, "outer=nesterov:momentum=-1"),
        ({"outer": OfTorch("LBFGS", 0.1)}, "unknown optimizer of torch.optim 'LBFGS'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LocalUpdates(**options)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(Exception, match="fragments must be at most 6, one a trained tensor of the model, not 7"):
        run_alone(LocalUpdates(fragments=7), 1, train, build=with_sgd)
    assert LocalUpdates().outer == Average()


def test_what_an_exchange_takes_is_counted_in_one_place_whoever_it_is_among() -> None:
    """Accounts hold these objects from when the script is prepared."""

    def script(rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer) -> None:
        before = synchronizer.timings
        synchronizer.rejoin(synchronizer.context)
        assert all(one is other for one, other in zip(before, synchronizer.timings, strict=True))

    run_alone(LocalUpdates(every=2), 2, script, build=with_adam)
