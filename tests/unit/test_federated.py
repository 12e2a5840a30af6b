"""Federated averaging without a session: closed forms, recursions, and what each method is without its part."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.codec.base import TensorCodec
from paceline.codec.quantised import QSGD
from paceline.codec.sparse import RandomK
from paceline.comm.base import Collective
from paceline.errors import NonFiniteGradient, UsageError
from paceline.outer import FedAdagrad, FedAdam, FedYogi, Outer
from paceline.strategies import build, name_of, settings_of
from paceline.strategies.federated import Federated
from paceline.strategies.federated.kept import Kept
from paceline.strategies.federated.private import private_names
from paceline.strategies.federated.uploading import Upload
from tests.unit.federated_rounds import CURVED, EVERYBODY, SPREAD, UNEVEN, Player, after
from tests.unit.virtual_world import VirtualWorld

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
