"""Aggregators against naive versions, and what servers refuse."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from paceline import pieces
from paceline.aggregate import (
    MEAN,
    Aggregator,
    Contribution,
    ContributionKind,
    FLTrust,
    Krum,
    Median,
    MultiKrum,
    counted,
    gram_of,
)
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
    chosen = flat(joined(MultiKrum(num_hostile, num_chosen), given))
    expected = torch.stack([flat(given[sender].tensors) for sender in best[:num_chosen]]).mean(0)
    torch.testing.assert_close(chosen, expected, rtol=1e-5, atol=1e-5)


def test_krum_leaves_out_what_is_far_away_or_infinite() -> None:
    near = contributions(4)
    far = [each._replace(tensors=[tensor * 1e3 for tensor in each.tensors]) for each in contributions(1, 1)]
    infinite = [Contribution(5, 1.0, "gradient", [torch.full(s, torch.inf) for s in SHAPES])]
    chosen = flat(joined(MultiKrum(2, 1, then=Median()), [*far, *infinite, *near]))
    assert any(torch.equal(chosen, flat(each.tensors)) for each in near)


def test_krum_needs_neighbours() -> None:
    with pytest.raises(ValueError, match="byzantine=2 needs 5 contributions, and there are 4"):
        joined(Krum(2), contributions(4))


def test_grams_of_ranges_add_up_to_the_whole() -> None:
    given = contributions(5)
    parts = [[each._replace(tensors=each.tensors[i : i + 1]) for each in given] for i in range(len(SHAPES))]
    torch.testing.assert_close(sum(gram_of(part) for part in parts), gram_of(given))


# --- robust aggregators -----------------------------------------------------------------------------------------------

FIGURES = json.loads((Path(__file__).parent / "figures" / "robustness.json").read_text())
"""Of ByzFL 0.0.11, and of Flower 1.42.0 for those by Krum's scores, over eleven vectors."""
ROBUST = (
    "median",
    "trimmed-mean:byzantine=2",
    "krum:byzantine=2",
    "multi-krum:byzantine=2",
    "bulyan:byzantine=2",
    "geometric-median",
    "nearest:byzantine=2:then=trimmed-mean:byzantine=2",
    "nearest:byzantine=2:then=multi-krum:byzantine=2",
)
"""Those that two hostile ones of eleven cannot lead away."""
MOVING = (*ROBUST, "mean", "nearest:byzantine=1")
"""Those that go where all go; others are drawn to 0 or to a direction."""
ALL = (*MOVING, "centered-clipping:radius=2:iterations=3", "clip:norm=1:then=median", "fl-trust", "fools-gold")


def read(text: str) -> Aggregator:
    return pieces.read(Aggregator, text)  # type: ignore[type-abstract]


def of_rows(rows: Tensor, senders: list[int] | None = None) -> list[Contribution]:
    return [Contribution(s, 1.0, "gradient", [row]) for s, row in zip(senders or range(len(rows)), rows, strict=True)]


def of_vectors(aggregator: Aggregator, rows: Tensor, senders: list[int] | None = None) -> Tensor:
    (result,) = aggregator.aggregate(of_rows(rows.clone(), senders), [torch.full_like(rows[0], torch.nan)])
    return result.clone()


def drawn(n: int = 11, d: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("text", "figure"), [*FIGURES["aggregators"].items(), *FIGURES["flower"].items()])
def test_the_figures_of_others_come_out(text: str, figure: list[float]) -> None:
    result = of_vectors(read(text), torch.tensor(FIGURES["vectors"], dtype=torch.float64))
    torch.testing.assert_close(result.tolist(), figure, rtol=0, atol=1e-6)


@pytest.mark.parametrize("text", ALL)
def test_contributions_stay_as_they_are_and_ranges_join_as_the_whole(text: str) -> None:
    """Each range is joined with the sum of all ranges' Gram matrices, as servers or workers do who hold parts."""
    aggregator, given = read(text), contributions(11, seed=3)
    whole = joined(aggregator, given)  # looks that nothing changes
    parts = [[each._replace(tensors=each.tensors[i : i + 1]) for each in given] for i in range(len(SHAPES))]
    gram = sum(gram_of(part) for part in parts)
    assert isinstance(gram, Tensor)
    for tensor, part, shape in zip(whole, parts, SHAPES, strict=True):
        (own,) = aggregator.aggregate(part, [torch.zeros(shape)], gram=gram)
        torch.testing.assert_close(own, tensor)


# Two may tie, and the first is chosen: Bulyan's last are each other's nearest; Krum finds such pairs among mixtures.
TYING = ("bulyan:byzantine=2", "nearest:byzantine=2:then=multi-krum:byzantine=2")


@pytest.mark.parametrize("text", [text for text in ALL if text not in TYING])
@given(order=st.permutations(range(11)), seed=st.integers(0, 99))
def test_the_order_of_contributions_changes_nothing(text: str, order: list[int], seed: int) -> None:
    rows = drawn(seed=seed)
    torch.testing.assert_close(of_vectors(read(text), rows[order], order), of_vectors(read(text), rows))


@pytest.mark.parametrize("text", MOVING)
@given(seed=st.integers(0, 99))
def test_what_moves_all_contributions_moves_their_joint(text: str, seed: int) -> None:
    rows, shift = drawn(seed=seed), drawn(1, seed=seed + 100)[0]
    moved = of_vectors(read(text), rows + shift)
    torch.testing.assert_close(moved, of_vectors(read(text), rows) + shift, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [1e6, -1e12, torch.inf, torch.nan])
@pytest.mark.parametrize("text", ROBUST)
def test_two_hostile_contributions_of_eleven_lead_nobody_away(text: str, poison: float) -> None:
    rows = drawn()
    rows[4:6] = poison
    honest = torch.cat([rows[:4], rows[6:]])
    distance = (of_vectors(read(text), rows) - honest.mean(0)).norm()
    assert distance <= (honest - honest.mean(0)).norm(dim=1).max()
    assert not (of_vectors(MEAN, rows) - honest.mean(0)).norm() <= 1e3


@pytest.mark.parametrize(
    ("text", "num", "why"),
    [
        ("trimmed-mean:byzantine=2", 4, "byzantine=2 needs 5 contributions, and there are 4"),
        ("bulyan:byzantine=2", 10, "byzantine=2 needs 11 contributions, and there are 10"),
        ("nearest:byzantine=1:then=krum:byzantine=1", 3, "byzantine=1 needs 4 contributions, and there are 3"),
        ("multi-krum:byzantine=1:chosen=9", 5, "chosen must be 1 to 5, not 9"),
        ("krum:byzantine=-1", 5, "byzantine must be at least 0, not -1"),
        ("fl-trust:trusted=7", 4, r"trusted=7 has sent nothing; those who have are \[0, 1, 2, 3\]"),
    ],
)
def test_too_few_contributions_are_refused(text: str, num: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of_vectors(read(text), drawn(num))


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_fools_gold_leaves_out_what_is_infinite_though_it_resembles_nobody(poison: float) -> None:
    rows = drawn()
    honest, rows[4] = torch.cat([rows[:4], rows[5:]]), poison
    torch.testing.assert_close(of_vectors(read("fools-gold"), rows), of_vectors(read("fools-gold"), honest))


def test_fl_trust_is_its_written_recursion() -> None:
    rows = drawn(seed=5)
    root, *others = rows
    trust = [max(0.0, float(root @ row / (root.norm() * row.norm()))) for row in others]
    expected = sum(t * row * root.norm() / row.norm() for t, row in zip(trust, others, strict=True)) / sum(trust)
    torch.testing.assert_close(of_vectors(read("fl-trust"), rows), expected)
    assert 0 < sum(t > 0 for t in trust) < len(others)


def test_fools_gold_is_its_written_recursion() -> None:
    rows = drawn(seed=2)
    rows[8:] = rows[8] + 0.05 * drawn(3, seed=9)  # three who want the same
    unit = rows / rows.norm(dim=1, keepdim=True)
    alike = (unit @ unit.T - torch.eye(11, dtype=torch.float64)).tolist()
    most = [max(row) for row in alike]
    pardoned = [
        [a * most[i] / most[j] if most[i] < most[j] else a for j, a in enumerate(row)] for i, row in enumerate(alike)
    ]
    trust = [min(1.0, max(0.0, 1 - max(row))) for row in pardoned]
    trust = [min(t / max(trust), 0.99) for t in trust]
    weights = [min(1.0, max(0.0, float(torch.tensor(t, dtype=torch.float64).logit()) + 0.5)) for t in trust]
    assert max(weights[8:]) == 0
    assert min(weights[:8]) > 0
    expected = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
    torch.testing.assert_close(of_vectors(read("fools-gold"), rows), expected)


def test_nobody_who_is_trusted_means_no_step() -> None:
    rows = torch.ones(3, 2)
    rows[1:] = -1
    assert of_vectors(read("fl-trust"), rows).tolist() == [0, 0]


# --- servers ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("aggregator", "weights", "given_to_it"),
    [
        (Median(), [1.0, 0.0, 0.5], [0, 2]),
        (Median(), [0.0, 0.0], [0, 1]),
        (Krum(byzantine=1), [1.0, 1.0, 0.0, 1.0, 1.0], [0, 1, 3, 4]),
        (Krum(byzantine=1), [1.0, 1.0, 0.0, 1.0], [0, 1, 2, 3]),
        (FLTrust(trusted=1), [1.0, 1.0, 0.0], [0, 1]),
        (FLTrust(trusted=1), [1.0, 0.0, 1.0], [0, 1, 2]),
    ],
    ids=["median", "nobody has any", "enough", "too few", "trusted", "the trusted one has none"],
)
def test_what_has_no_weight_is_left_out_where_the_rest_will_do(
    aggregator: Aggregator, weights: list[float], given_to_it: list[int]
) -> None:
    kept = counted(aggregator, contributions(len(weights), weights=weights))
    assert [each.sender for each in kept] == given_to_it
