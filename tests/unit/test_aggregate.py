"""Aggregators against naive versions, and what servers refuse."""

from __future__ import annotations

import copy
import itertools
import statistics
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from paceline.aggregate import MEAN, Aggregator, Contribution, ContributionKind, Krum, Median, gram
from paceline.division import divide
from paceline.errors import UsageError
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.ranges import cut
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, ServerSpec

SHAPES = ((3, 2), (), (4,))


def contributions(
    n: int, seed: int = 0, *, weights: list[float] | None = None, kind: ContributionKind = "gradient"
) -> list[Contribution]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Contribution(
            sender, weights[sender] if weights else 1.0, kind, [torch.randn(s, generator=generator) for s in SHAPES]
        )
        for sender in range(n)
    ]


def joined(aggregator: Aggregator, given: list[Contribution]) -> list[Tensor]:
    untouched = copy.deepcopy(given)
    result = [tensor.clone() for tensor in aggregator.aggregate(given, [torch.full(s, torch.nan) for s in SHAPES])]
    for mine, before in zip(given, untouched, strict=True):
        torch.testing.assert_close(mine.tensors, before.tensors, rtol=0, atol=0, equal_nan=True)
    return result


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_mean_of_equal_weights_has_the_bits_of_a_plain_mean(n: int) -> None:
    given = contributions(n)
    for index, tensor in enumerate(joined(MEAN, given)):
        total = given[0].tensors[index].clone()
        for other in given[1:]:
            total.add_(other.tensors[index])
        divide(total, n)
        assert torch.equal(tensor, total)


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), kind=st.sampled_from(["gradient", "delta"]))
def test_the_mean_is_weighted(weights: list[float], kind: ContributionKind) -> None:
    given = contributions(len(weights), weights=weights, kind=kind)
    expected = sum(w * flat(c.tensors).double() for w, c in zip(weights, given, strict=True)) / sum(weights)
    sign = 1 if kind == "gradient" else -1
    torch.testing.assert_close(flat(joined(MEAN, given)).double(), sign * expected, rtol=1e-5, atol=1e-5)


@given(n=st.integers(1, 7), kind=st.sampled_from(["gradient", "delta"]))
def test_the_median_is_of_each_coordinate(n: int, kind: ContributionKind) -> None:
    given = contributions(n, seed=n, kind=kind)
    sign = 1 if kind == "gradient" else -1
    columns = zip(*(flat(c.tensors).tolist() for c in given), strict=True)
    expected = torch.tensor([sign * statistics.median(column) for column in columns])
    torch.testing.assert_close(flat(joined(Median(), given)), expected)


def krum_scores(given: list[Contribution], num_hostile: int) -> list[float]:
    vectors = [flat(c.tensors).double() for c in given]
    scores = []
    for one, mine in enumerate(vectors):
        squares = sorted(float((mine - other).square().sum()) for o, other in enumerate(vectors) if o != one)
        scores.append(sum(squares[: len(given) - num_hostile - 2]))
    return scores


@given(n=st.integers(4, 8), seed=st.integers(0, 1000), data=st.data())
def test_krum_chooses_whom_the_naive_version_does(n: int, seed: int, data: st.DataObject) -> None:
    num_hostile, num_chosen = data.draw(st.integers(0, n - 3)), data.draw(st.integers(1, n))
    given = contributions(n, seed)
    scores = krum_scores(given, num_hostile)
    best = sorted(range(n), key=scores.__getitem__)
    # The nearest two are as near to each other.
    assume(num_chosen == n or scores[best[num_chosen]] > scores[best[num_chosen - 1]] * (1 + 1e-9))
    chosen = flat(joined(Krum(num_hostile, num_chosen), given))
    expected = torch.stack([flat(given[sender].tensors) for sender in best[:num_chosen]]).mean(0)
    torch.testing.assert_close(chosen, expected, rtol=1e-5, atol=1e-5)


def test_krum_leaves_out_what_is_far_away_or_infinite() -> None:
    near = contributions(4)
    far = [each._replace(tensors=[tensor * 1e3 for tensor in each.tensors]) for each in contributions(1, 1)]
    infinite = [Contribution(5, 1.0, "gradient", [torch.full(s, torch.inf) for s in SHAPES])]
    chosen = flat(joined(Krum(2, then=Median()), [*far, *infinite, *near]))
    assert any(torch.equal(chosen, flat(each.tensors)) for each in near)


def test_krum_needs_neighbours() -> None:
    with pytest.raises(ValueError, match="cannot choose 1 of 4 with 2 hostile ones"):
        joined(Krum(2), contributions(4))


def test_grams_of_ranges_add_up_to_the_whole() -> None:
    given = contributions(5)
    parts = [[each._replace(tensors=each.tensors[i : i + 1]) for each in given] for i in range(len(SHAPES))]
    torch.testing.assert_close(sum(gram(part) for part in parts), gram(given))


LAYOUT = by_group([TensorSpec("weight", (64,), torch.float32), TensorSpec("bias", (8,), torch.float32)])


def configure(aggregator: Aggregator, rule: AdmissionRule, *, element_wise: bool = True, num_servers: int = 1) -> None:
    optimizer = OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), element_wise)
    pieces = cut(LAYOUT, num_servers=num_servers, whole_tensors=not element_wise, piece_bytes=64)[0]
    ServerCore(index=0, epoch=1).configure(ServerSpec(LAYOUT, pieces, optimizer, rule, None, aggregator))


def test_servers_refuse_what_has_no_meaning() -> None:
    members = Membership.first(5)
    for aggregator in (Median(), Krum(1)):
        with pytest.raises(UsageError, match="needs several contributions an update, and StaleSynchronous gives"):
            configure(aggregator, StaleSynchronous(members))
    for options in ({"element_wise": True}, {"element_wise": False, "num_servers": 2}):
        with pytest.raises(UsageError, match="Krum compares whole contributions"):
            configure(Krum(1), BulkSynchronous(members), **options)
    configure(Krum(1), BulkSynchronous(members), element_wise=False)
    for element_wise, num_servers in itertools.product((True, False), (1, 2)):
        configure(Median(), BulkSynchronous(members), element_wise=element_wise, num_servers=num_servers)
