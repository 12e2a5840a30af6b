"""Federated averaging without a session: closed forms, recursions, and what each method is without its part."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.aggregate import Aggregator, Contribution, Validation
from paceline.attacks import SentAttack, parse
from paceline.codec.base import TensorCodec
from paceline.codec.quantised import QSGD
from paceline.codec.sparse import RandomK
from paceline.comm.base import Collective
from paceline.errors import NonFiniteGradient, UsageError
from paceline.layout import TensorSpec
from paceline.membership import Membership
from paceline.outer import FedAdagrad, FedAdam, FedYogi, Outer
from paceline.pieces import read
from paceline.privacy import Accountant, Central, Local, Privacy
from paceline.roster import Roster
from paceline.secure import Quantiser
from paceline.seeding import derive
from paceline.strategies import build, name_of, settings_of
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.federated import Federated, remembering
from paceline.strategies.federated.guard import Guard
from paceline.strategies.federated.joining import Joining
from paceline.strategies.federated.kept import Kept
from paceline.strategies.federated.private import private_names
from paceline.strategies.federated.uploading import Upload
from paceline.strategies.hostility import under_attack
from paceline.strategies.replica import describe
from tests.unit.virtual_world import VirtualWorld


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def held_out(model: nn.Module) -> dict[str, float]:
    """What a server's own samples say, whose optimum is 12."""
    loss = (float(next(model.parameters()).detach()) - 12) ** 2 / 2
    return {"loss": loss, "accuracy": 1 - loss / 100}


class Player:
    """A script's loop over passes, without a session: clients are (a, b, number of steps) of a (x - b)^2 / 2."""

    def __init__(
        self,
        collective: Collective,
        strategy: Strategy,
        clients: Sequence[tuple[float, float, int]],
        *,
        sizes: Sequence[int] | None = None,
        attacks: Sequence[str] = (),
        momentum: float = 0.0,
        told: list[Mapping[str, Any]] | None = None,
    ) -> None:
        participation = strategy.participation()
        assert participation is not None
        rank, size = collective.rank, collective.size
        num_steps = [steps for _, _, steps in clients]
        self._roster = Roster(
            participation, sizes=sizes or num_steps, num_batches=num_steps, rank=rank, size=size, seed=0
        )
        self.model = Quadratic()
        self._optimizer: Optimizer = SGD(self.model.parameters(), lr=0.1, momentum=momentum)
        device = torch.device("cpu")
        context = Context(rank, Membership.first(size), rank, size, device, collective, roster=self._roster)
        context = under_attack(parse(attacks), context, strategy.traits)
        if told is not None:
            events, is_first = told, rank == 0
            tell = lambda name, details: events.append({"name": name, **details}) if is_first else None  # noqa: E731
            context = replace(context, evaluate=held_out, tell=tell)
        self.synchronizer: Synchronizer = strategy.bind(context, describe(self.model, self._optimizer))
        self._clients, self._number = clients, 0

        self.synchronizer.start()

    def go_to(self, num_rounds: int) -> float:
        """Play until so many rounds are over; the server's parameter."""
        while True:
            outcome = self.synchronizer.end_turn()
            while not outcome.admitted and outcome.iteration < num_rounds:
                outcome = self.synchronizer.wait_for_admission(pause_at=0)
            if outcome.iteration == num_rounds:
                return self.parameter()
            self.synchronizer.begin_turn()
            a, b, num_steps = self._clients[self._roster.turn(self._number).client]
            self._number += 1
            for _ in range(num_steps):
                self._optimizer.zero_grad()
                (a * (self.model.x - b) ** 2 / 2).sum().backward()
                self.synchronizer.step(self._optimizer.step, pause_at=0)

    def parameter(self) -> float:
        with self.synchronizer.global_model() as model:
            return float(next(model.parameters()).detach())


def after(
    strategy: Strategy,
    clients: Sequence[tuple[float, float, int]],
    *,
    rounds: int,
    workers: int = 2,
    attacks: Sequence[str] = (),
    told: list[Mapping[str, Any]] | None = None,
) -> float:
    found = VirtualWorld(workers).run(
        lambda collective: Player(collective, strategy, clients, attacks=attacks, told=told).go_to(rounds)
    )
    assert len(set(map(repr, found))) == 1
    return float(found[0])


EVERYBODY = {"clients": 3, "fraction": 1.0, "weights": "equal"}
CURVED = [(1.0, 1.0, 5), (2.0, 0.0, 5), (4.0, -2.0, 5)]
UNEVEN = [(1.0, 1.0, 1), (1.0, 0.0, 3), (1.0, -2.0, 10)]

# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "clients", "rounds", "fixed_point"),
    [
        ("fed-avg", CURVED, 60, -0.716028),
        ("scaffold", CURVED, 14, -1.0),
        ("fed-avg", UNEVEN, 60, -1.176384),
        ("fed-nova", UNEVEN, 24, -0.118467),
    ],
)
def test_a_quadratic_ends_where_theory_says(
    name: str, clients: list[tuple[float, float, int]], rounds: int, fixed_point: float, workers: int
) -> None:
    """With f_i(x) = a_i (x - b_i)^2 / 2 a client's K steps of rate r take (1 - (1 - r a_i)^K) of the way to b_i.

    FedAvg ends where these pulls balance; SCAFFOLD at the optimum, sum a b / sum a; FedNova, whose clients count by
    their mean step, where the pulls divided by K do.
    """
    pulls = [1 - (1 - 0.1 * a) ** num_steps for a, _, num_steps in clients]
    if name == "fed-nova":
        pulls = [pull / num_steps for pull, (_, _, num_steps) in zip(pulls, clients, strict=True)]
    if name == "scaffold":
        pulls = [a for a, _, _ in clients]
    balance = math.fsum(pull * b for pull, (_, b, _) in zip(pulls, clients, strict=True)) / math.fsum(pulls)
    assert balance == pytest.approx(fixed_point, abs=5e-7)
    found = after(build(name, EVERYBODY), clients, rounds=rounds, workers=workers)
    assert found == pytest.approx(fixed_point, abs=1e-6)


def test_scaffold_with_some_of_the_clients_reaches_the_optimum() -> None:
    """Controls of clients that do not take part stay, and the mean control moves by the part that did."""
    strategy = build("scaffold", {**EVERYBODY, "fraction": 0.67})
    assert after(strategy, CURVED, rounds=150) == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        (FedAdam(), (0.099005, 0.134605, 0.187840)),
        (FedYogi(), (0.099005, 0.134464, 0.187246)),
        (FedAdagrad(), (0.099900, 0.055219, 0.077021)),
    ],
)
def test_adaptive_servers_follow_their_recursion(outer: Outer, expected: tuple[float, ...]) -> None:
    """Reddi et al., ICLR 2021, algorithm 2: m = 0, v = tau^2, betas .9 and .99, a rate of .1; changes 1, -.5, .25."""
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = outer.optimizer([x])
    found = []
    for change in (1.0, -0.5, 0.25):
        x.grad = torch.full_like(x, -change)
        optimizer.step()
        found.append(float(x.detach()))
    assert found == pytest.approx(expected, abs=5e-7)


# --- what a method is without its part --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fed-prox", {"correction.mu": "0"}),
        ("fed-avgm", {"outer.momentum": "0"}),
    ],
)
def test_a_method_without_its_part_is_federated_averaging_bit_for_bit(name: str, options: dict[str, str]) -> None:
    plain = after(build("fed-avg", EVERYBODY), UNEVEN, rounds=5)
    assert after(build(name, {**EVERYBODY, **options}), UNEVEN, rounds=5) == plain
    for more in ({"correction.mu": "1"}, {"outer.momentum": "0.5"}):
        if more.keys() <= options.keys():
            assert after(build(name, {**EVERYBODY, **more}), UNEVEN, rounds=5) != plain


def test_momentum_counts_in_the_path_length() -> None:
    """Equal clients with momentum: a path of ten steps is worth the sum of all gradients' weights."""
    momentum, steps = 0.5, 10
    worth = sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))

    def work(collective: Collective) -> float:
        player = Player(collective, build("fed-nova", {"clients": 1, "fraction": 1.0}), [(1.0, 1.0, steps)])
        player.go_to(1)
        synchronizer: Any = player.synchronizer
        synchronizer.begin_turn()
        playing = synchronizer._playing
        playing.num_steps = steps
        synchronizer.replica.optimizer.param_groups[0]["momentum"] = momentum
        return float(synchronizer._path_length(playing))

    assert VirtualWorld(1).run(work) == [pytest.approx(worth)]


# --- who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "by-size", "poisson", "cyclic", "first", "buffered"])
def test_the_number_of_workers_changes_nothing(sampler: str) -> None:
    """Also where rounds have fewer clients than there are workers, or none."""
    clients = [(1.0, float(number), 1 + number % 4) for number in range(12)]
    strategy = build("fed-avg", {"clients": 12, "fraction": 0.2, "sampler": sampler})
    found = [after(strategy, clients, rounds=20, workers=workers) for workers in (1, 2, 5)]
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-12)


@pytest.mark.parametrize(("weights", "is_biased"), [("equal", False), ("samples", True)])
def test_clients_drawn_by_size_count_alike(weights: str, is_biased: bool) -> None:
    """Li et al., ICLR 2020, scheme I: the weighted mean in expectation. Weighted once more, it is not."""
    clients, sizes = [(1.0, 1.0, 1), (1.0, 0.0, 1), (1.0, -2.0, 1)], (1, 1, 4)
    wanted = sum(b * size for (_, b, _), size in zip(clients, sizes, strict=True)) / sum(sizes)
    strategy = build("fed-avg", {"clients": 3, "fraction": 1.0, "sampler": "by-size", "weights": weights})

    def mean_of_tail(collective: Collective) -> float:
        player = Player(collective, strategy, clients, sizes=sizes)
        return sum(player.go_to(number) for number in range(100, 2100)) / 2000

    found = VirtualWorld(1).run(mean_of_tail)[0]
    assert (abs(found - wanted) > 0.1) == is_biased


# --- attacks and defences ---------------------------------------------------------------------------------------------

SPREAD = [(1.0, number**1.7, 1) for number in range(9)]


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
        rows = [0.1 * (x - b) for _, b, _ in SPREAD]
        hostile = {index for index in range(9) for attack in names if attack.is_hostile(index, size=9)}
        honest = torch.stack([row for index, row in enumerate(rows) if index not in hostile])
        for attack in names:
            assert isinstance(attack, SentAttack)
            for index in hostile:
                generator = torch.Generator().manual_seed(derive(0, "attack", index, number))
                if attack.is_hostile(index, size=9):
                    rows[index] = attack.sent(rows[index], honest, size=9, generator=generator)
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
    hostile = {index for index in range(9) for attack in names if attack.is_hostile(index, size=9)}
    for number in range(3):
        rows = [0.1 * (x - b) for _, b, _ in SPREAD]
        honest = torch.stack([row for index, row in enumerate(rows) if index not in hostile])
        for attack in names:
            assert isinstance(attack, SentAttack)
            for index in hostile:
                generator = torch.Generator().manual_seed(derive(0, "attack", index, number))
                if attack.is_hostile(index, size=9):
                    rows[index] = attack.sent(rows[index], honest, size=9, generator=generator)
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
    assert names_out <= hostile, "nobody honest is lost"
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


# --- privacy ----------------------------------------------------------------------------------------------------------

PRIVATE = {"clients": 9, "fraction": 0.1, "privacy.clip": "0.5", "privacy.noise": "0.8"}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_private_round_is_clipped_changes_and_noise_over_the_expected_number(workers: int) -> None:
    """McMahan et al., ICLR 2018, algorithm 1; also in rounds of nobody, which have their noise."""
    x, num_empty = 0.0, 0
    strategy = build("dp-fed-avg", PRIVATE)
    participation = strategy.participation()
    assert participation is not None
    for number in range(40):
        drawn = participation.sampler.draw(number, sizes=(1,) * 9, fraction=0.1, seed=0)
        num_empty += not drawn
        noise = torch.randn(1, dtype=torch.float64, generator=seeded("server", number))
        total = sum(max(-0.5, min(0.5, 0.1 * (x - SPREAD[client][1]))) for client in drawn)
        x -= (total + 0.8 * 0.5 * float(noise)) / (0.1 * 9)
    assert num_empty > 0
    assert after(strategy, SPREAD, rounds=40, workers=workers) == pytest.approx(x, rel=1e-9)


def seeded(*of: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(0, "privacy", *of))


def test_with_noise_of_its_own_each_client_hides_from_the_server() -> None:
    rows = []
    for client, (_, b, _) in enumerate(SPREAD):
        noise = torch.randn(1, dtype=torch.float64, generator=seeded("client", 0, client))
        rows.append(max(-0.5, min(0.5, -0.1 * b)) + 0.3 * 0.5 * float(noise))
    options = {"clients": 9, "fraction": 1.0, "privacy": "local:noise=0.3:clip=0.5"}
    assert after(build("fed-avg", options), SPREAD, rounds=1) == pytest.approx(-sum(rows) / 9, rel=1e-9)


def guard(privacy: Privacy, *, clients: int = 100, fraction: float = 0.4) -> Guard:
    participation = build("dp-fed-avg", {"clients": clients, "fraction": fraction}).participation()
    assert participation is not None
    sizes = (1,) * clients
    return Guard(privacy, Roster(participation, sizes=sizes, num_batches=sizes, rank=0, size=1, seed=0), seed=0)


def test_noise_has_its_deviation() -> None:
    zeros = [torch.zeros(40_000), torch.zeros(1, dtype=torch.float64)]
    (joined,) = guard(Central(noise=1.5, clip=2.0)).inward(zeros, num_changes=1, num_summed=38, round_number=0)
    assert float(joined.std()) == pytest.approx(1.5 * 2.0 / 40, rel=0.02)
    *sent, _ = guard(Local(noise=1.5, clip=2.0)).outward([torch.zeros(40_000)], client=1, round_number=0)
    assert float(sent[0].std()) == pytest.approx(1.5 * 2.0, rel=0.02)


def test_a_clip_follows_the_median_of_norms() -> None:
    """Andrew et al., NeurIPS 2021: of norms 1 to 100, half are within 50. Changes take the more noise for it."""
    adaptive, norms = guard(Central(noise=0.5, quantile=0.5), fraction=1.0), range(1, 101)
    for number in range(120):
        bits = [adaptive.outward([torch.tensor([float(norm)])], client=0, round_number=number)[1] for norm in norms]
        mean = torch.stack(bits).mean(dim=0)
        adaptive.inward([torch.zeros(1), mean], num_changes=1, num_summed=100, round_number=number)
    assert float(adaptive.own_state()["privacy.clip"].tensor) == pytest.approx(50, rel=0.15)
    found = Central(noise=0.5, quantile=0.5).on_sum(num_expected=100)
    assert found.multiplier**-2 + (2 * found.count_deviation) ** -2 == pytest.approx(0.5**-2)


def test_what_rounds_cost_is_the_accountants_figure() -> None:
    many = guard(Central(noise=1.1), clients=1000, fraction=0.004)
    assert many.epsilon(15_000) == pytest.approx(2.503, abs=1e-3)
    assert many.epsilon(0) == 0
    own = Local(noise=4.0)
    turns = Counter(client for number in range(6) for client in guard(own)._roster.drawn(number))
    accountant = Accountant()
    accountant.spend(noise_multiplier=2.0, sample_rate=1.0, steps=max(turns.values()))
    assert guard(own).epsilon(6) == accountant.epsilon(delta=1e-5)
    looking_ahead = guard(Local(noise=4.0, epsilon=1e6))
    assert not looking_ahead.is_spent(9)
    assert looking_ahead.epsilon(6) == accountant.epsilon(delta=1e-5)
    assert looking_ahead.epsilon(0) == 0


def test_a_budget_that_allows_no_round_is_refused() -> None:
    with pytest.raises(UsageError, match=r"privacy.epsilon=0.1 allows no round: one costs \d"):
        guard(Central(noise=0.5, epsilon=0.1))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("dp-fed-avg", {"aggregate": "median"}, "may move the joint of this aggregate by more than its clipped"),
        ("scaffold", {"privacy": "central"}, "control variates leave the client without noise"),
        ("fed-nova", {"privacy": "local"}, "normalise=true divides changes after they are clipped"),
        ("fed-bn", {"privacy": "local"}, "the model that is saved holds private layers"),
        ("fed-avg", {"privacy": "central"}, "a client with many samples would count more than its clip"),
        ("dp-fed-avg", {"sampler": "uniform"}, "drawn each for itself; use sampler=poisson"),
        ("dp-fed-avg", {"sampler": "by-size", "fraction": "1"}, "drawn twice would count twice its clip"),
        ("dp-fed-avg", {"nonfinite": "allow"}, "lets changes through that nothing clips"),
        ("dp-fed-avg", {"privacy.noise": "0"}, "noise and clip must be above 0"),
        ("dp-fed-avg", {"privacy.epsilon": "0"}, "epsilon must be above 0, not 0"),
        ("dp-fed-avg", {"privacy.quantile": "1"}, "quantile must be between 0 and 1, not 1"),
    ],
)
def test_what_would_not_be_private_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build(name, options)


# --- secure aggregation -----------------------------------------------------------------------------------------------

MANY = [(1.0, float(client % 5) - 2.0, 1 + client % 3) for client in range(20)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("more", [{}, {"secure.neighbours": "6"}, {"weights": "equal", "sampler": "by-size"}])
def test_what_is_summed_under_masks_is_the_mean(more: dict[str, str], workers: int) -> None:
    """To half a level of 2^32 / 20 in each change; whoever plays the clients."""
    options = {"clients": 20, "fraction": 0.5, **{key: own for key, own in more.items() if key != "secure.neighbours"}}
    plain = after(build("fed-avg", options), MANY, rounds=4, workers=workers)
    masked = build("fed-avg", {**options, **more, "secure": "masks", "secure.clip": "2"})
    assert after(masked, MANY, rounds=4, workers=workers) == pytest.approx(plain, abs=1e-7)


def lossy(seed: int, lost: float) -> list[int | None]:
    draws = random.Random(derive(seed, "secure", "lost", 0))
    return [draws.randrange(4) if draws.random() < lost else None for _ in range(20)]


def test_those_whose_vectors_arrived_are_summed_whoever_drops_out() -> None:
    gone_at = lossy(0, 0.2)
    there = [client for client, stage in enumerate(gone_at) if stage in (None, 3)]
    assert len(there) < 20
    assert len({each for each in gone_at if each is not None}) > 1
    wanted = -sum(-0.1 * 1 * MANY[client][1] for client in there) / len(there)
    options = {"clients": 20, "fraction": 1.0, "weights": "equal", "secure": "masks", "secure.lost": "0.2"}
    ones = [(a, b, 1) for a, b, _ in MANY]
    assert after(build("fed-avg", {**options, "secure.threshold": "0.55"}), ones, rounds=1) == pytest.approx(wanted)


def test_below_the_threshold_a_round_is_refused_on_all_workers() -> None:
    options = {"clients": 20, "fraction": 1.0, "secure": "masks", "secure.lost": "0.9"}
    with pytest.raises(Exception, match=r"round 0: secure=masks gives no sum: \d+ clients are left .* and 14 must"):
        after(build("fed-avg", options), MANY, rounds=1, workers=3)


def test_rank_0_is_sent_no_vector_that_tells_anything() -> None:
    """All that a worker sends in a round, beside what it would have sent without masks."""
    sent: dict[str, list[bytes]] = {"masks": [], "none": []}
    encoded = Quantiser(2.0, 20).encode(torch.tensor([-0.1 * b for _, b, _ in MANY], dtype=torch.float64))
    plain = torch.tensor([-0.1 * b for _, b, _ in MANY], dtype=torch.float64)
    for name, more in (("masks", {"secure": "masks", "secure.clip": "2"}), ("none", {"aggregate": "median"})):

        def work(collective: Collective, name: str = name, more: dict[str, str] = more) -> float:
            for method in ("gather", "all_gather", "scatter"):
                real = getattr(collective, method)

                def told(given: Any, *, _real: Any = real, **how: Any) -> Any:
                    for tensor in [given] if isinstance(given, Tensor) else given or []:
                        sent[name].append(tensor.numpy().tobytes())
                    return _real(given, **how)

                setattr(collective, method, told)
            options = {"clients": 20, "fraction": 1.0, "weights": "equal", **more}
            ones = [(a, b, 1) for a, b, _ in MANY]
            return Player(collective, build("fed-avg", options), ones).go_to(1)

        VirtualWorld(2).run(work)
    tells = [each.tobytes() for each in encoded if each] + [each.numpy().tobytes() for each in plain if each]
    assert len(sent["masks"]) > 8
    assert not any(each in raw for raw in sent["masks"] for each in tells)
    assert any(each in raw for raw in sent["none"] for each in tells), "which is how it would be seen"


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fed-avg", {"aggregate": "krum:byzantine=1"}, "looks at single changes, and the server knows their sum alone"),
        ("fed-avg", {"aggregate": "median"}, "looks at single changes"),
        ("scaffold", {}, "controls would travel beside the sum"),
        ("fed-nova", {}, "numbers of steps would travel beside the sum"),
        ("fed-avg", {"fraction": 0.02}, r"2 client\(s\) a round do not hide one another; use 3 or more"),
        ("dp-fed-avg", {"privacy.quantile": "0.5"}, "needs a count beside the sum"),
        ("fed-avg", {"nonfinite": "allow"}, "lets values through that have no level"),
        ("fed-avg", {"secure.threshold": "0.5"}, "threshold above 0.5"),
        ("fed-avg", {"secure.neighbours": "3"}, "neighbours must be an even number, at least 2, not 3"),
    ],
)
def test_what_a_sum_does_not_tell_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build(name, {"secure": "masks", **options})


def test_hostile_clients_who_know_all_cannot_be_behind_masks() -> None:
    with pytest.raises(Exception, match="hostile clients go by what honest ones send, which secure=masks hides"):
        after(
            build("fed-avg", {"clients": 20, "fraction": 1.0, "secure": "masks"}),
            MANY,
            rounds=1,
            attacks=("sign-flip",),
        )


def test_noise_and_masks_go_together() -> None:
    options = {"clients": 20, "fraction": 0.5, "privacy.noise": "0.5"}
    plain = after(build("dp-fed-avg", options), MANY, rounds=4)
    found = after(build("dp-fed-avg", {**options, "secure": "masks"}), MANY, rounds=4)
    assert found == pytest.approx(plain, abs=1e-6)


# --- coded changes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_the_server_joins_what_it_decodes(workers: int) -> None:
    """One element, of which fp16 keeps 11 bits; with what is left out kept by each client, nothing is lost for good."""
    plain = dict.fromkeys(range(9), 0.0)
    for feedback, kept in (("false", "fresh"), ("true", "kept")):
        x, left = 0.0, dict(plain)
        for _ in range(5):
            sent = {}
            for client, (_, b, _) in enumerate(SPREAD):
                whole = 0.1 * (x - b) + (left[client] if feedback == "true" else 0.0)
                sent[client] = float(torch.tensor(whole, dtype=torch.float64).to(torch.float32).to(torch.float16))
                left[client] = whole - sent[client]
            x -= sum(sent.values()) / 9
        options = {"clients": 9, "fraction": 1.0, "optimizer": kept, "codec": f"fp16:feedback={feedback}"}
        found = after(build("fed-avg", options), SPREAD, rounds=5, workers=workers)
        assert found == pytest.approx(x, rel=1e-9)
        assert found != pytest.approx(
            after(build("fed-avg", {"clients": 9, "fraction": 1.0}), SPREAD, rounds=5), rel=1e-6
        )


def test_what_a_client_sends_is_counted() -> None:
    def work(collective: Collective) -> dict[str, Any]:
        strategy = build("fed-avg", {"clients": 3, "fraction": 1.0, "codec": "fp16:feedback=false"})
        return dict(Player(collective, strategy, CURVED).synchronizer.facts)

    assert VirtualWorld(1).run(work) == [{"upload_bytes": 2, "uncoded_bytes": 8}]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"codec": "top-k"}, "adds what it leaves out to the client's next change, and clients keep no state"),
        ({"codec": "int8"}, r"int8:feedback=false or qsgd, or have them keep some with optimizer=kept"),
        ({"codec": "powersgd"}, "averages among workers half-way"),
        ({"codec": "sign"}, "is joined by a vote"),
        ({"codec": "auto"}, "is chosen by the time that steps take"),
        ({"codec": "qsgd", "privacy": "local"}, "may decode to more than privacy has clipped"),
        ({"codec": "top-k", "optimizer": "kept", "secure": "masks"}, "masked payloads have no sum; use random-k"),
    ],
)
def test_codecs_that_clients_cannot_use_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build("fed-avg", options)


def test_random_parts_go_under_masks() -> None:
    build("fed-avg", {"codec": "random-k", "secure": "masks"})


# --- refused, and left out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients must be at least 1"),
        ({"fraction": 0.0}, "fraction must be above 0"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1"),
        ({"weights": "size"}, "weights must be one of samples, equal"),
        ({"alternates": True}, "alternates=true has no effect without private"),
        ({"private_epochs": 3}, "private_epochs has no effect without alternates"),
        ({"outer": FedAdam(beta1=1.0)}, "outer=fed-adam:beta1=1: beta1 is out of range"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Federated(**options)


def test_scaffold_with_private_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="control variates are differences to the mean client's direction"):
        Federated(private="last", correction=build("scaffold").correction)  # type: ignore[attr-defined]


def test_a_client_whose_change_is_not_finite() -> None:
    """It is named, or left out, or let through."""
    clients = [(1.0, 1.0, 1), (1e308, 1e10, 3)]
    options = {"clients": 2, "fraction": 1.0, "weights": "equal"}
    with pytest.raises(Exception, match=NonFiniteGradient.__name__):
        after(build("fed-avg", options), clients, rounds=1)
    found = after(build("fed-avg", {**options, "nonfinite": "skip"}), clients, rounds=1)
    assert found == pytest.approx(0.1), "what the other client changed"
    assert not math.isfinite(after(build("fed-avg", {**options, "nonfinite": "allow"}), clients, rounds=1))


# --- what clients keep ------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", set()),
        ("norm", {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}),
        ("last", {"2.0.weight", "2.0.bias"}),
        ("2", {"2.0.weight", "2.0.bias"}),
        ("0.b*,2.0.bias", {"0.bias", "2.0.bias"}),
    ],
)
def test_private_layers_by_name(pattern: str, names: set[str]) -> None:
    assert private_names(layers(), pattern) == names


@pytest.mark.parametrize(("pattern", "message"), [("head", "no layer 'head'; it has 0.weight"), ("*", "leaves no")])
def test_private_layers_that_cannot_be(pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        private_names(layers(), pattern)


def test_what_clients_keep_lies_in_a_file() -> None:
    kept, found = Kept(), {}
    for number in range(50):
        client, length = number * 7 % 10, 1 + number % 3
        found[client] = torch.full((length,), float(number))
        kept.put(client, {"a": found[client], "b": torch.tensor(number)})
    assert sorted(kept) == sorted(found)
    assert all(torch.equal(kept[client]["a"], tensor) for client, tensor in found.items())
    assert kept[99] == {}
    kept.close()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fed-avg", {}),
        ("fed-avg", {"weights": "equal", "partition": "shards", "partition.per_client": "3"}),
        ("fed-avg", {"private": "head", "epochs": "5"}),
        ("dp-fed-avg", {"privacy.noise": "1.1"}),
        ("fed-prox", {"correction.mu": "0.1"}),
        ("fed-avgm", {"outer.momentum": "0.7"}),
        ("fed-adam", {}),
        ("fed-yogi", {"outer.tau": "0.01"}),
        ("fed-adagrad", {}),
        ("scaffold", {"sampler": "cyclic"}),
        ("fed-nova", {"optimizer": "kept"}),
        ("fed-bn", {}),
        ("fed-rep", {"private": "head", "private_epochs": "5"}),
        ("fed-buff", {"sampler.exponent": "1"}),
    ],
)
def test_a_strategy_has_the_name_that_says_most_of_it(name: str, options: dict[str, str]) -> None:
    strategy = build(name, options)
    assert name_of(strategy) == name
    assert build(name, settings_of(strategy)) == strategy
    assert replace(strategy) == strategy


def shapes_of(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(own.tensor.shape) for name, own in state.items() if isinstance(own.tensor, Tensor)}


def test_a_checkpoint_holds_the_controls_of_clients_that_have_trained() -> None:
    def work(collective: Collective) -> dict[str, tuple[int, ...]]:
        player = Player(collective, build("scaffold", {**EVERYBODY, "clients": 30, "fraction": 0.1}), CURVED * 10)
        player.go_to(1)
        return shapes_of(player.synchronizer.own_state())

    (found,) = VirtualWorld(1).run(work)
    assert sum(name.startswith("client.") for name in found) == 3
    assert found["shared_control.0"] == (1,)


def test_the_shared_control_is_the_mean_of_all_clients_own_and_is_taken_up_again() -> None:
    """Of all that there are, so that those who have not trained yet count with their 0."""

    def work(collective: Collective) -> tuple[list[float], float, float]:
        strategy = build("scaffold", {**EVERYBODY, "clients": 6, "fraction": 0.5})
        player = Player(collective, strategy, CURVED * 2)
        player.go_to(3)
        state = player.synchronizer.own_state()
        own = [float(each.tensor) for name, each in state.items() if name.endswith(".control.0")]
        again = Player(collective, strategy, CURVED * 2).synchronizer
        again.restore({}, {name: each.tensor for name, each in state.items()}, iteration=3)
        restored = again.own_state()
        return own, float(state["shared_control.0"].tensor), float(restored["shared_control.0"].tensor)

    ((own, shared, restored),) = VirtualWorld(1).run(work)
    assert len(own) >= 3
    assert shared == pytest.approx(sum(own) / 6, abs=1e-6)
    assert abs(shared) > 0.01
    assert restored == shared


def test_a_client_begins_with_a_fresh_optimizer_whoever_was_played_before() -> None:
    """One worker plays all three clients, whose momentum is their own; a plain loop says what comes of it."""

    def work(collective: Collective) -> float:
        strategy = build("fed-avg", {**EVERYBODY, "clients": 3})
        return Player(collective, strategy, CURVED, momentum=0.9).go_to(2)

    server = 0.0
    for _ in range(2):
        ends = []
        for a, b, num_steps in CURVED:
            x, velocity = server, 0.0
            for _ in range(num_steps):
                velocity = 0.9 * velocity + a * (x - b)
                x -= 0.1 * velocity
            ends.append(x)
        server = sum(ends) / 3
    assert VirtualWorld(1).run(work) == [pytest.approx(server, abs=1e-5)]


@pytest.mark.parametrize(("codec", "is_alike"), [(QSGD(), False), (RandomK(ratio=0.5), True)])
def test_clients_draw_for_themselves_unless_the_codec_is_linear(codec: TensorCodec, is_alike: bool) -> None:
    """The errors of many clients are to cancel; what is linear is summed as it was encoded, in the same places."""
    upload, change = Upload(codec, seed=3), torch.linspace(-1.0, 1.0, 600)
    first, second = (upload.passed([change], [], client=client, round_number=4)[0][0] for client in range(2))
    assert torch.equal(first, second) == is_alike
