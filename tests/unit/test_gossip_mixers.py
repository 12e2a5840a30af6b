"""What mixers do to models, against closed forms: no engine, no network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import networkx
import pytest
import torch
from torch import Tensor

from paceline.layout import TensorSpec, by_group
from paceline.strategies.gossip.averaging import Averaging
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.gossip.push_sum import PushSum
from paceline.strategies.gossip.quasi_global import moved_on
from paceline.strategies.gossip.relay import Relay, require_tree
from paceline.strategies.gossip.running_sums import RunningSums
from paceline.topology import (
    BaseK,
    Chain,
    Everybody,
    Exponential,
    Graph,
    OnePeerExponential,
    RandomPairs,
    Ring,
    Star,
    Topology,
    Torus,
    Tree,
)

LAYOUT = by_group([TensorSpec("x", (1,), torch.float64)])
LEARNING_RATE = 0.1
UNEVEN = Graph(networkx.DiGraph([*((rank, (rank + 1) % 8) for rank in range(8)), (0, 2), (0, 4), (3, 7), (5, 1)]))
"""Some send to more than others, and no link goes both ways."""


def world(kind: Callable[..., Mixer], topology: Topology, values: Sequence[float]) -> list[Mixer]:
    mixers = []
    for rank, value in enumerate(values):
        own = Parcel(LAYOUT)
        own.values[0][0] = value
        mixers.append(kind(topology, own, rank=rank, size=len(values)))
    return mixers


def exchange(mixers: list[Mixer], step: int) -> int:
    """Everything that is sent arrives; returns how many parcels that were."""
    sent = [(rank, to, p.buffer.clone()) for rank, m in enumerate(mixers) for to, p in m.outgoing(step).items()]
    places = [mixer.incoming(step) for mixer in mixers]
    assert sorted((sender, to) for sender, to, _ in sent) == sorted(
        (sender, to) for to, place in enumerate(places) for sender in place
    )
    for sender, to, buffer in sent:
        places[to][sender].buffer.copy_(buffer)
    for mixer in mixers:
        mixer.mix(step)
    return len(sent)


def values_of(mixers: list[Mixer]) -> Tensor:
    return torch.stack([mixer.own.values[0][0] for mixer in mixers])


def distance(values: Tensor) -> float:
    return float((values - values.mean()).norm())


# --- averaging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Ring(), Chain(), Star(), Torus(), Exponential(), Everybody()], ids=repr)
@pytest.mark.parametrize("size", [8, 16, pytest.param(32, marks=pytest.mark.slow)])
def test_the_distance_to_the_mean_shrinks_by_the_contraction(topology: Topology, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    mixers = world(Averaging, topology, values)
    first = before = distance(values_of(mixers))
    step = 0
    while before > 1e-6 * first:
        exchange(mixers, step)
        after = distance(values_of(mixers))
        assert after <= topology.contraction(size) * before * 1.00001 + 1e-12
        before, step = after, step + 1
    assert float(values_of(mixers).mean()) == pytest.approx(sum(values) / size, abs=1e-12)


@pytest.mark.parametrize("topology", [OnePeerExponential(), BaseK(), BaseK(2)], ids=repr)
def test_a_period_of_exchanges_takes_all_to_the_mean(topology: Topology) -> None:
    mixers = world(Averaging, topology, range(16))
    num_sent = [exchange(mixers, step) for step in range(topology.period(16))]
    assert float((values_of(mixers) - 7.5).abs().max()) < 1e-12
    assert max(num_sent) <= 16 * topology.num_sent(16)[1]


def largest_bias(kind: Callable[..., Mixer], topology: Topology, size: int, order: str, num_steps: int) -> float:
    """Of workers that each minimise (x - b)^2 / 2, with b from -1 to 1: how far they are from the mean of b."""
    wanted = torch.linspace(-1, 1, size, dtype=torch.float64)
    mixers = world(kind, topology, [0.0] * size)
    for step in range(num_steps):
        gradients = values_of(mixers) - wanted
        if order == "awc":
            exchange(mixers, step)
        for mixer, gradient in zip(mixers, gradients, strict=True):
            mixer.own.values[0][0] -= LEARNING_RATE * gradient
        if order == "atc":
            exchange(mixers, step)
    return float((values_of(mixers) - wanted.mean()).abs().max())


@pytest.mark.parametrize(
    ("size", "order", "expected"), [(8, "atc", 0.2200), (16, "atc", 0.4597), (8, "awc", 0.2514), (16, "awc", 0.4680)]
)
def test_what_averaging_with_neighbours_is_off_the_optimum(size: int, order: str, expected: float) -> None:
    assert largest_bias(Averaging, Ring(), size, order, 1000) == pytest.approx(expected, abs=5e-5)


# --- push-sum --------------------------------------------------------------------------------------------------------


def test_push_sum_finds_the_mean_where_plain_sums_do_not() -> None:
    mixers = world(PushSum, UNEVEN, range(8))
    for step in range(50):
        exchange(mixers, step)
        weights = torch.tensor([mixer.weight for mixer in mixers], dtype=torch.float64)
        assert float(weights.sum()) == pytest.approx(8, abs=1e-12)
        assert float((values_of(mixers) * weights - 3.5).abs().max()) > 1.5
    assert float((values_of(mixers) - 3.5).abs().max()) < 1e-7


def test_a_step_of_push_sum_is_one_of_its_sum() -> None:
    """x / w after a step is (x - g) / w."""
    mixers = world(PushSum, UNEVEN, range(8))
    for step in range(3):
        exchange(mixers, step)
    for mixer in mixers:
        before = float(mixer.own.values[0][0])
        mixer.update(lambda own=mixer.own.values[0]: own.sub_(0.25))
        assert mixer.weight != 1
        assert float(mixer.own.values[0][0]) == pytest.approx(before - 0.25 / mixer.weight)


def test_where_all_send_as_much_as_they_get_weights_stay_one() -> None:
    mixers, plain = world(PushSum, Exponential(), range(8)), world(Averaging, Exponential(), range(8))
    for step in range(5):
        exchange(mixers, step)
        exchange(plain, step)
    assert {mixer.weight for mixer in mixers} == {1.0}
    torch.testing.assert_close(values_of(mixers), values_of(plain))


# --- relay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num_steps"), [(8, 135), (16, 345)])
def test_relayed_models_take_all_to_the_optimum(size: int, num_steps: int) -> None:
    assert largest_bias(Relay, Chain(), size, "atc", num_steps) < 1e-9


def test_a_relayed_mean_counts_each_model_once_older_the_farther_away() -> None:
    """Along a chain of four, by hand: who is d hops away counts with its value of d - 1 steps ago."""
    mixers = world(Relay, Chain(), [0.0] * 4)
    history = []
    for step in range(6):
        for rank, mixer in enumerate(mixers):
            mixer.own.values[0][0] = 10.0**rank * (step + 1)
        history.append(values_of(mixers).clone())
        exchange(mixers, step)
        for rank, mixed in enumerate(values_of(mixers).tolist()):
            ages = [max(0, abs(rank - other) - 1) for other in range(4)]
            heard = [history[step - age][other] for other, age in enumerate(ages) if age <= step]
            assert mixed == pytest.approx(float(sum(heard)) / len(heard))


@pytest.mark.parametrize("topology", [Chain(), Star(), Tree(), Tree(3)], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_trees_are_trees(topology: Topology, size: int) -> None:
    require_tree(topology, size)


@pytest.mark.parametrize(
    "topology",
    [
        Ring(),
        OnePeerExponential(),
        RandomPairs(),
        UNEVEN,
        Graph(networkx.from_edgelist([(0, 1), (1, 2), (2, 0), *zip(range(3, 7), range(4, 8), strict=True)])),
    ],
    ids=["ring", "one-peer", "random-pairs", "uneven", "a cycle and a chain"],
)
def test_others_are_none(topology: Topology) -> None:
    with pytest.raises(ValueError, match="is no tree of 8 workers"):
        require_tree(topology, 8)


# --- quasi-global momentum -------------------------------------------------------------------------------------------


def test_quasi_global_momentum_averages_what_gradients_would_have_moved_the_model() -> None:
    momentum, before, after = torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.5])
    assert moved_on(momentum, before, after, lr=0.5, factor=0.9).tolist() == pytest.approx([0.9 * 1 + 0.1 * 1])


# --- lost messages ---------------------------------------------------------------------------------------------------


def exchange_with_losses(mixers: list[Mixer], step: int, draws: random.Random, *, loss: float) -> None:
    sent = [(rank, to, p.buffer.clone()) for rank, m in enumerate(mixers) for to, p in m.outgoing(step).items()]
    places = [mixer.incoming(step) for mixer in mixers]
    lost: list[set[int]] = [set() for _ in mixers]
    for sender, to, buffer in sent:
        if draws.random() < loss:
            lost[to].add(sender)
        else:
            places[to][sender].buffer.copy_(buffer)
    for mixer, missing in zip(mixers, lost, strict=True):
        mixer.mix(step, missing)


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("topology", [UNEVEN, OnePeerExponential(), Star()], ids=lambda drawn: type(drawn).__name__)
def test_running_sums_find_the_mean_though_messages_are_lost(topology: Topology, loss: float) -> None:
    mixers, draws = world(RunningSums, topology, [float(rank) for rank in range(8)]), random.Random(1)
    for step in range(50 if loss == 0 else 120):
        exchange_with_losses(mixers, step, draws, loss=loss)
    assert float((values_of(mixers) - 3.5).abs().max()) < 1e-7


def test_running_sums_without_losses_are_push_sum() -> None:
    numbers = [float(rank) for rank in range(8)]
    plain, summed = world(PushSum, UNEVEN, numbers), world(RunningSums, UNEVEN, numbers)
    for step in range(50):
        exchange(plain, step)
        exchange(summed, step)
        torch.testing.assert_close(values_of(summed), values_of(plain), rtol=1e-12, atol=1e-12)


def test_plain_push_sum_loses_the_mean_with_the_messages() -> None:
    mixers, draws = world(PushSum, UNEVEN, [float(rank) for rank in range(8)]), random.Random(1)
    for step in range(50):
        exchange_with_losses(mixers, step, draws, loss=0.1)
    assert sum(mixer.weight for mixer in mixers if isinstance(mixer, PushSum)) < 2.0
    assert float((values_of(mixers) - 3.5).abs().min()) > 0.01
    assert PushSum.missing_messages
    assert not RunningSums.missing_messages


def test_averages_and_relayed_sums_go_on_with_what_they_have() -> None:
    """Nobody hears from worker 2: its neighbours leave it out, and those behind it as far as they came through it."""
    means = world(Averaging, Ring(), [0.0, 3.0, 6.0, 9.0])
    relays = world(Relay, Chain(), [0.0, 3.0, 6.0, 9.0])
    for step in range(4):
        for mixers in (means, relays):
            sent = [(rank, to, p.buffer.clone()) for rank, m in enumerate(mixers) for to, p in m.outgoing(step).items()]
            for sender, to, buffer in sent:
                mixers[to].incoming(step)[sender].buffer.copy_(buffer)
            for mixer in mixers:
                mixer.mix(step, {2} & set(mixer.incoming(step)))
            if step == 0:
                assert float(values_of(means)[1]) == pytest.approx((0 + 3) / 2)
        for mixer, value in zip(relays, [0.0, 3.0, 6.0, 9.0], strict=True):
            mixer.own.values[0][0] = value if step < 3 else mixer.own.values[0][0]
    assert values_of(relays).tolist() == [1.5, 1.5, 4.5, 9.0]
