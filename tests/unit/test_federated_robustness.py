"""Attacks on federated rounds, and their defences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.aggregate import Aggregator, Contribution, Validation
from paceline.attacks import Attack, SentAttack, parse
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.layout import TensorSpec
from paceline.membership import Membership
from paceline.pieces import read
from paceline.seeding import derive
from paceline.strategies import build
from paceline.strategies.base import Context
from paceline.strategies.federated import remembering
from paceline.strategies.federated.joining import Joining
from tests.unit.federated_rounds import EVERYBODY, SPREAD, after
from tests.unit.virtual_world import VirtualWorld


def hostile_among(attacks: Sequence[Attack]) -> set[int]:
    """Of nine clients."""
    return {index for index in range(9) for attack in attacks if attack.is_hostile(index, size=9)}


def sent(x: Tensor, attacks: Sequence[Attack], number: int) -> list[Tensor]:
    """What nine clients send in this round from x: one step of rate 0.1, or what an attack makes of it."""
    rows = [0.1 * (x - b) for _, b, _ in SPREAD]
    hostile = hostile_among(attacks)
    honest = torch.stack([row for index, row in enumerate(rows) if index not in hostile])
    for attack in attacks:
        assert isinstance(attack, SentAttack)
        for index in hostile_among([attack]):
            generator = torch.Generator().manual_seed(derive(0, "attack", index, number))
            rows[index] = attack.sent(rows[index], honest, size=9, generator=generator)
    return rows


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("aggregate", "attacks"),
    [
        ("mean", ("sign-flip:workers=2",)),
        ("mean", ("model-replacement:workers=3",)),
        ("median", ("ipm:workers=2:strength=50",)),
        ("trimmed-mean:byzantine=2", ("alie:workers=2",)),
        ("krum:byzantine=2", ("gauss:workers=2:sigma=100",)),
        ("bulyan:byzantine=1", ("min-max",)),
        ("clip:norm=0.3:then=geometric-median:nu=0.001", ("min-sum:workers=2", "model-replacement")),
        ("fl-trust", ()),
    ],
)
def test_a_round_is_what_the_aggregator_makes_of_what_clients_send(
    aggregate: str, attacks: tuple[str, ...], workers: int
) -> None:
    """The last clients are hostile; who plays them changes nothing. One step of rate r takes r (b - x) off."""
    joins: Aggregator = read(Aggregator, aggregate)  # type: ignore[type-abstract]
    x, names = torch.zeros(1, dtype=torch.float64), parse(attacks)
    for number in range(3):
        rows = sent(x, names, number)
        given = [Contribution(index, 1.0, "gradient", [row]) for index, row in enumerate(rows)]
        x = x - joins.aggregate(given, [torch.zeros_like(x)])[0]
    strategy = build("fed-avg", {"clients": 9, "fraction": 1.0, "aggregate": aggregate})
    found = after(strategy, SPREAD, rounds=3, workers=workers, attacks=attacks)
    assert found == pytest.approx(float(x), rel=1e-12)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("reject", "aggregate", "attacks"),
    [
        ("validation:margin=0.5", "mean", ("sign-flip:workers=2",)),
        ("validation:share=1:margin=4", "mean", ("gauss:workers=3:sigma=100",)),
        ("validation:metric=accuracy:margin=0.008", "median", ("sign-flip", "gauss:workers=2:sigma=30")),
        ("validation:margin=0.5", "mean", ()),
    ],
)
def test_those_who_make_the_model_worse_are_left_out_and_named(
    reject: str, aggregate: str, attacks: tuple[str, ...], workers: int
) -> None:
    """A loop that judges each change by what held-out samples say of the model with a share of it alone."""
    validation: Validation = read(Validation, reject)
    joins: Aggregator = read(Aggregator, aggregate)  # type: ignore[type-abstract]
    x, names, left_out = torch.zeros(1, dtype=torch.float64), parse(attacks), []
    for number in range(3):
        rows = sent(x, names, number)
        before = (float(x) - 12) ** 2 / 2
        worse = [(float(x - validation.share * row) - 12) ** 2 / 2 - before for row in rows]
        unit = 1 / 100 if validation.metric == "accuracy" else 1
        out = [index for index in range(9) if worse[index] * unit > validation.margin]
        left_out += [(number + 1, f"client {index}") for index in out]
        given = [Contribution(index, 1.0, "gradient", [row]) for index, row in enumerate(rows) if index not in out]
        x = x - joins.aggregate(given, [torch.zeros_like(x)])[0]
    told: list[Mapping[str, Any]] = []
    strategy = build("fed-avg", {"clients": 9, "fraction": 1.0, "reject": reject, "aggregate": aggregate})
    found = after(strategy, SPREAD, rounds=3, workers=workers, attacks=attacks, told=told)
    assert found == pytest.approx(float(x), rel=1e-12)
    assert [(event["round"], who) for event in told for who in event["with"]] == left_out
    assert {event["name"] for event in told} <= {"rejected"}
    names_out = {int(who.removeprefix("client ")) for _, who in left_out}
    assert names_out <= hostile_among(names), "nobody honest is lost"
    assert bool(names_out) == bool(attacks)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_fools_gold_goes_by_what_the_clients_of_a_round_have_sent_so_far(workers: int) -> None:
    """A written recursion over sums, in rounds of four of six clients, of which two send nearly the same."""
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(7, dtype=torch.float64, generator=generator)
    rounds = []
    for number in range(5):
        drawn = [(number + place) % 6 for place in range(4)]
        rows = torch.randn(4, 7, dtype=torch.float64, generator=generator)
        rounds.append([(who, row * 0.1 + common if who < 2 else row) for who, row in zip(drawn, rows, strict=True)])
    aggregator: Aggregator = read(Aggregator, "fools-gold")  # type: ignore[type-abstract]

    def work(collective: Collective) -> list[Tensor]:
        device, rank = torch.device("cpu"), collective.rank
        context = Context(rank, Membership.first(workers), rank, workers, device, collective)
        joining = Joining(context, [TensorSpec("x", (7,), torch.float64)], aggregator, num_changes=1)
        found = []
        for number, given in enumerate(rounds):
            for who, row in given:
                if who % workers == rank:
                    joining.add(Contribution(who, 1.0, "gradient", [row]))
            found.append(joining.join(round_number=number, leaves=False).gradients[0].clone())
            joining.clear()
        return found

    sums, expected = dict[int, Tensor](), []
    for given in rounds:
        for who, row in given:
            sums[who] = sums.get(who, torch.zeros_like(row)) + row
        given = sorted(given, key=lambda pair: pair[0])
        rows = torch.stack([row for _, row in given])
        history = torch.stack([sums[who] for who, _ in given])
        units = history / history.norm(dim=1, keepdim=True)
        alike = (units @ units.T).fill_diagonal_(0)
        most = alike.max(dim=1).values
        for i, j in itertools.permutations(range(4), 2):
            if most[i] < most[j]:
                alike[i, j] *= most[i] / most[j]
        trust = (1 - alike.max(dim=1).values).clamp(0, 1)
        trust = (trust / trust.max()).clamp(max=0.99)
        weights = (trust.logit() + 0.5).clamp(0, 1)
        expected.append(weights @ rows / weights.sum())
    for found in VirtualWorld(workers).run(work):
        torch.testing.assert_close(torch.stack(found), torch.stack(expected))


def test_a_round_of_which_nobody_is_left_changes_nothing() -> None:
    clients, told = [(1.0, -3.0, 1)] * 3, list[Mapping[str, Any]]()
    strategy = build("fed-avg", {**EVERYBODY, "reject": "validation"})
    assert after(strategy, clients, rounds=2, told=told) == 0.0
    assert [len(event["with"]) for event in told] == [3, 3]


def test_hostile_clients_that_are_alone_in_a_round_go_by_what_they_have_computed() -> None:
    """With one client a round, all of them hostile but the first: minus its own is what a sign flip sends."""
    strategy = build("fed-avg", {"clients": 4, "fraction": 0.25, "sampler": "cyclic"})
    clients = [(1.0, 0.0, 1), *[(1.0, 1.0, 1)] * 3]
    x, orders = 0.0, [strategy.participation().sampler.draw(n, sizes=(1,) * 4, fraction=0.25, seed=0) for n in range(4)]  # type: ignore[union-attr]
    for (client,) in orders:
        x -= 0.1 * (x - 0.0) if client == 0 else -0.1 * (x - 1.0)
    assert after(strategy, clients, rounds=4, attacks=("sign-flip:workers=3",)) == pytest.approx(x, rel=1e-12)
    unchanged = after(strategy, clients, rounds=4)
    assert after(strategy, clients, rounds=4, attacks=("alie:workers=2",)) == pytest.approx(unchanged, rel=1e-12)


def test_whoever_replaces_the_model_goes_by_those_of_its_round() -> None:
    """Two of six clients are hostile, and a round has two: what one sends counts twice where it is alone."""
    options = {"clients": 6, "fraction": 0.34, "sampler": "cyclic", "weights": "equal"}
    strategy, clients = build("fed-avg", options), [(0.0, 0.0, 1)] * 4 + [(1.0, 1.0, 1)] * 2
    participation = strategy.participation()
    assert participation is not None
    x, numbers = 0.0, set()
    for number in range(9):
        drawn = participation.sampler.draw(number, sizes=(1,) * 6, fraction=0.34, seed=0)
        num_hostile = sum(client >= 4 for client in drawn)
        numbers.add(num_hostile)
        x -= 0.1 * (x - 1) if num_hostile else 0.0
    assert numbers == {0, 1, 2}
    assert after(strategy, clients, rounds=9, attacks=("model-replacement:workers=2",)) == pytest.approx(x, rel=1e-12)


def test_a_server_that_hides_changes_clips_hostile_ones_too() -> None:
    """Noise of its own says nothing of what a client does that does not clip."""
    clients = [(1.0, 0.0, 1), (1.0, 1.0, 1), (1.0, 1.0, 1)]
    options = {"clients": 3, "fraction": 1.0, "privacy.noise": "1e-9", "privacy.clip": "0.5"}
    attacks = ("ipm:strength=1000",)
    central = after(build("dp-fed-avg", options), clients, rounds=1, attacks=attacks)
    assert central == pytest.approx((0.1 - 0.5) / 3, abs=1e-6)
    local = {"clients": 3, "fraction": 1.0, "privacy": "local:noise=1e-9:clip=0.5"}
    unclipped = after(build("fed-avg", local), clients, rounds=1, attacks=attacks)
    assert unclipped == pytest.approx((0.1 - 50.0) / 3, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scaffold", {"aggregate": "median"}, "control variates are differences to the mean client's direction"),
        ("fed-nova", {"aggregate": "median"}, "their numbers of steps would scale the joint"),
        ("scaffold", {"reject": "validation"}, "reject=validation: control variates are differences to the mean"),
        ("fed-nova", {"reject": "validation"}, "numbers of steps of those who are left would scale the joint"),
        ("fed-bn", {"reject": "validation"}, "no model with a client's private layers to judge"),
        ("dp-fed-avg", {"reject": "validation"}, "who is left out tells of them"),
        ("fed-avg", {"reject": "validation", "secure": "masks"}, "judges single changes, and knows their sum alone"),
        ("fed-avg", {"reject": "validation:share=0"}, "share must be above 0 and at most 1, not 0"),
        ("fed-avg", {"reject": "validation:margin=-1"}, "margin must be at least 0 and finite, not -1"),
        ("fed-prox", {"correction.mu": "-1"}, "correction proximal: mu must be at least 0 and finite, not -1"),
        ("fed-avg", {"aggregate": "trimmed-mean"}, "needs byzantine, as in trimmed-mean:byzantine="),
        ("fed-avg", {"aggregate": "krum:byzantine=8"}, "needs 11 contributions, and there are 10; a client gives one"),
    ],
)
def test_aggregators_that_have_no_meaning_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(name, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "krum:byzantine=1", "sampler": "poisson"}, "round .*needs 4 contributions.*sampler=uniform"),
        ({"aggregate": "fl-trust", "sampler": "cyclic"}, "trusted=0 has sent nothing.*draw more clients"),
    ],
)
def test_a_round_that_cannot_be_joined_says_so(options: dict[str, Any], message: str) -> None:
    strategy = build("fed-avg", {"clients": 9, "fraction": 0.5, **options})
    with pytest.raises(Exception, match=message):
        after(strategy, SPREAD, rounds=20)


def test_a_memory_too_large_for_checkpoints_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine clients' sums of one parameter, 8 bytes each."""
    strategy = build("fed-avg", {"clients": 9, "fraction": 0.5, "aggregate": "fools-gold"})
    monkeypatch.setattr(remembering, "_MOST_BYTES", 72)
    after(strategy, SPREAD, rounds=1)
    monkeypatch.setattr(remembering, "_MOST_BYTES", 71)
    with pytest.raises(Exception, match=r"a sum for each of 9 clients.*lower clients, or use another aggregate"):
        after(strategy, SPREAD, rounds=1)
