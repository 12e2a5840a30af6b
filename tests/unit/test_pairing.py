"""Pairs that take the mean of their models, in any order in which messages may come: no engine, no network."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.layout import TensorSpec, by_group
from paceline.strategies.gossip.allowance import dealt
from paceline.strategies.gossip.pairing import Pairing, askers
from paceline.strategies.gossip.parcel import Parcel
from paceline.topology import Chain, Everybody, Exponential, Hypercube, OnePeerExponential, Ring, Star, Topology, Tree

LAYOUT = by_group([TensorSpec("x", (3,), torch.float64)])


@pytest.mark.parametrize("topology", [Ring(), Chain(), Star(), Tree(), Hypercube()], ids=str)
def test_each_link_joins_one_who_asks_with_one_who_answers(topology: Topology) -> None:
    asks = askers(topology, 8)
    assert asks[0]
    for rank in range(8):
        assert all(asks[other] != asks[rank] for other in topology.neighbours(0, rank, 8).sends_to)


@pytest.mark.parametrize(
    ("topology", "size", "reason"),
    [
        (Ring(), 5, "5 workers do not fall into those who ask and those who answer"),
        (Everybody(), 4, "4 workers do not fall into those who ask"),
        (Exponential(), 8, "links change or go one way"),
        (OnePeerExponential(), 8, "links change or go one way"),
    ],
    ids=str,
)
def test_other_topologies_are_refused(topology: Topology, size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        askers(topology, size)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [(10, [1, 3], [3, 7]), (2, [5, 1, 1], [1, 1, 0]), (7, [10, 1, 1], [5, 1, 1]), (2**62, [1, 1], [2**61, 2**61])],
)
def test_shares_add_up_and_everybody_has_one(total: int, weights: list[int], shares: list[int]) -> None:
    assert dealt(total, weights) == shares
    assert sum(shares) == total


def test_models_keep_their_mean_and_nothing_is_applied_twice_or_lost() -> None:
    """Messages wait for as long as chance wants, gradients are applied meanwhile, and some workers stop early."""
    size, draws = 6, random.Random(0)
    workers = [Pairing(Parcel(LAYOUT), rank=rank, size=size) for rank in range(size)]
    asks, topology, total = askers(Ring(), size), Ring(), 600
    for rank, (worker, left) in enumerate(zip(workers, dealt(total, [1] * size), strict=True)):
        worker.model.values[0].fill_(float(rank))
        worker.left, worker.is_in = left, True
    on_its_way: list[tuple[int, int, torch.Tensor]] = []
    applied = 0
    for _ in range(20_000):
        rank = draws.randrange(size)
        worker = workers[rank]
        if on_its_way and draws.random() < 0.5:
            sender, receiver, message = on_its_way.pop(draws.randrange(len(on_its_way)))
            on_its_way += [(receiver, to, answer) for to, answer in workers[receiver].receive(sender, message)]
        elif worker.asked is None and worker.left and worker.is_in:
            worker.left -= 1
            worker.counts[rank] += 1
            applied += 1
            worker.model.values[0].add_(1.0)
            worker.is_in = not (rank == 3 and applied > 300)
            if asks[rank]:
                other = draws.choice(sorted(topology.neighbours(0, rank, size).sends_to))
                on_its_way.append((rank, other, worker.ask(other)))
        assert sum(worker.counts) <= applied
    while on_its_way:
        sender, receiver, message = on_its_way.pop()
        on_its_way += [(receiver, to, answer) for to, answer in workers[receiver].receive(sender, message)]
    assert applied + sum(worker.left for worker in workers) == total
    assert applied > 500
    mean = torch.stack([worker.model.values[0] for worker in workers]).mean()
    assert float(mean) == pytest.approx(2.5 + applied / size, rel=1e-12)


def test_word_to_stop_goes_from_one_to_the_next() -> None:
    first, second, third = (Pairing(Parcel(LAYOUT), rank=rank, size=3) for rank in range(3))
    second.stop = True
    ((to, answer),) = second.receive(0, first.ask(1))
    assert (to, first.receive(1, answer), first.stop) == (0, [], True)
    assert second.receive(2, third.ask(1))
    assert not third.stop
