"""What a federated round hides: under noise, and under masks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.privacy import Accountant, Central, Local, Privacy
from paceline.roster import Roster
from paceline.secure import Quantiser
from paceline.seeding import derive
from paceline.strategies import build
from paceline.strategies.federated.guard import Guard
from tests.unit.federated_rounds import SPREAD, Player, after
from tests.unit.virtual_world import VirtualWorld

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


def guard(privacy: Privacy, *, clients: int = 100, fraction: float = 0.4, sampler: str = "poisson") -> Guard:
    options = {"clients": clients, "fraction": fraction, "sampler": sampler, "privacy": "local"}
    participation = build("fed-avg", options).participation()
    assert participation is not None
    sizes = (1,) * clients
    return Guard(privacy, Roster(participation, sizes=sizes, num_batches=sizes, rank=0, ranks=[0], seed=0), seed=0)


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


@pytest.mark.parametrize(
    ("privacy", "given"),
    [(Central(noise=3.0), {}), (Local(noise=2.0), {}), (Central(noise=2.0), {"fraction": 0.2}), (None, {})],
    ids=["noise", "whose", "fraction", "none"],
)
def test_rounds_that_cost_something_else_are_not_counted_with_others(
    privacy: Privacy | None, given: dict[str, Any]
) -> None:
    before = guard(privacy, **given).own_state() if privacy is not None else {}
    with pytest.raises(UsageError, match=r"epsilon of all rounds cannot be told.* privacy=central:noise=2"):
        guard(Central(noise=2.0)).restore({name: each.tensor for name, each in before.items()})


def test_turns_that_another_sampler_drew_are_not_counted_as_this_ones() -> None:
    """With noise of its own the client with most turns has spent most. The sum's noise costs the same whoever took part
    in it; checkpoints of older versions do not say who drew."""
    own = {name: each.tensor for name, each in guard(Local(noise=2.0)).own_state().items()}
    guard(Local(noise=2.0)).restore(own)
    with pytest.raises(UsageError, match="other sampler"):
        guard(Local(noise=2.0), sampler="cyclic").restore(own)
    older = {**own, "privacy.terms": own["privacy.terms"][:4]}
    guard(Local(noise=2.0), sampler="cyclic").restore(older)


def test_a_clip_that_follows_norms_goes_on_and_another_one_is_as_it_is_given() -> None:
    own = {name: each.tensor for name, each in guard(Central(noise=2.0, clip=3.0)).own_state().items()}
    for quantile, clip in ((0.5, 3.0), (None, 1.0)):
        goes_on = guard(Central(noise=2.0, clip=1.0, quantile=quantile))
        goes_on.restore(own)
        assert float(goes_on.own_state()["privacy.clip"].tensor) == clip


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
