"""Moments of the inner optimizers with periods of their own: against a plain loop, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer, RMSprop

from paceline.errors import NonFiniteGradient, UsageError
from paceline.strategies import build, name_of
from paceline.strategies.base import Synchronizer
from paceline.strategies.local_updates import LocalUpdates
from tests.unit.local_rounds import (
    Quadratic,
    flat,
    network,
    problem,
    run_alone,
    shared,
    train,
    with_adam,
    with_sgd,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


def states_of(model: nn.Module, optimizer: Optimizer, name: str) -> Tensor:
    return torch.cat([optimizer.state[parameter][name].flatten() for parameter in model.parameters()])


def by_hand(size: int, every: int, num_rounds: int, periods: dict[str, int]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """A plain loop over all workers' models and moments."""
    torch.manual_seed(0)
    start = flat(network())
    workers = [with_adam() for _ in range(size)]
    for model, _ in workers:
        nn.utils.vector_to_parameters(start.clone(), model.parameters())
    for number in range(num_rounds):
        for rank, (model, optimizer) in enumerate(workers):
            for step in range(number * every, (number + 1) * every):
                x, y = problem(rank, step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        mean = torch.stack([flat(model) for model, _ in workers]).mean(0)
        for model, _ in workers:
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        for name, period in periods.items():
            if period and (number + 1) % period == 0:
                for index, _ in enumerate(workers[0][0].parameters()):
                    own = [o.state[list(m.parameters())[index]][name] for m, o in workers]
                    joined = torch.stack(own).mean(0)
                    for each in own:
                        each.copy_(joined)
    return flat(workers[0][0]), [{name: states_of(*worker, name) for name in MOMENTS} for worker in workers]


@pytest.mark.parametrize(("momentum_every", "variance_every"), [(1, 1), (1, 3), (2, 3), (0, 2), (3, 0)])
def test_each_moment_has_its_own_period(momentum_every: int, variance_every: int) -> None:
    """Five rounds, after which some are the same on all workers and others are not."""
    size, every, num_rounds = 3, 2, 5

    def script(rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer) -> Any:
        train(rank, synchronizer, model, optimizer, num_steps=every * num_rounds)
        return shared(synchronizer), {name: states_of(model, optimizer, name).clone() for name in MOMENTS}

    options = {"momentum_every": momentum_every, "variance_every": variance_every}
    found = run_alone(LocalUpdates(every=every, **options), size, script, build=with_adam)
    wanted, states = by_hand(size, every, num_rounds, dict(zip(MOMENTS, options.values(), strict=True)))
    for (parameters, own), expected in zip(found, states, strict=True):
        torch.testing.assert_close(parameters, wanted, rtol=1e-4, atol=1e-6)
        for name in MOMENTS:
            torch.testing.assert_close(own[name], expected[name], rtol=1e-4, atol=1e-7)
    for name, period in zip(MOMENTS, options.values(), strict=True):
        is_same = all(torch.equal(found[0][1][name], own[name]) for _, own in found)
        assert is_same == (period == 1)  # 5 rounds end none of the longer periods


def test_they_move_as_often_as_asked() -> None:
    """Beside 12 rounds' changes: one of two moments every second round, the other every third."""

    def moved(**options: int) -> list[int]:
        def script(rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer) -> int:
            train(rank, synchronizer, model, optimizer, num_steps=24)
            return synchronizer.context.collective.timing.moved_bytes

        return run_alone(LocalUpdates(every=2, **options), 2, script, build=with_adam)

    alone, first, both = moved(), moved(momentum_every=2), moved(momentum_every=2, variance_every=3)
    num_bytes = 4 * sum(parameter.numel() for parameter in network().parameters())  # 2 (n - 1) / n times the model
    for before, after, num_averages in ((alone, first, 6), (first, both, 4)):
        for more in (now - then for then, now in zip(before, after, strict=True)):
            assert 0 <= more - num_averages * num_bytes <= num_averages * 32  # names are told each time


def test_momentum_of_sgd_is_a_moment() -> None:
    def script(rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer) -> Tensor:
        train(rank, synchronizer, model, optimizer)
        return states_of(model, optimizer, "momentum_buffer")

    first, *others = run_alone(LocalUpdates(every=2, momentum_every=1), 3, script, build=with_sgd)
    assert all(torch.equal(first, other) for other in others)


def without_moments() -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, SGD(model.parameters(), lr=0.1)


def without_momentum() -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, RMSprop(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("options", "optimizer", "said"),
    [
        ({"momentum_every": 3}, without_moments, "momentum_every=3 averages exp_avg or momentum_buffer, and SGD keeps"),
        ({"momentum_every": 3}, without_momentum, "RMSprop keeps none, as it is set; leave momentum_every out"),
        ({"variance_every": 3}, with_sgd, "variance_every=3 averages .*, and SGD keeps none"),
    ],
)
def test_a_moment_that_is_not_kept_is_named_after_the_first_step(options: Any, optimizer: Any, said: str) -> None:
    with pytest.raises(Exception, match=f"{UsageError.__name__}.*{said}"):
        run_alone(LocalUpdates(every=50, **options), 2, train, build=optimizer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum_every": -1}, "momentum_every must be at least 0"),
        ({"variance_every": 2, "aggregate": "median"}, "variance_every takes means, against which aggregate=median"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build("local-sgd", options)


def explode(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> tuple[float, float]:
    """The last rank's second moment is infinite after its step, and its parameter is not."""
    model.x.grad = torch.full_like(model.x, 1e200 if rank else 1.0)
    synchronizer.step(optimizer.step, pause_at=0)
    return float(model.x.detach()), float(optimizer.state[model.x]["exp_avg_sq"])


def gentle() -> tuple[nn.Module, Optimizer]:
    model = Quadratic()
    return model, Adam(model.parameters(), lr=1.0)


def test_a_mean_moment_that_is_not_finite() -> None:
    options = {"every": 1, "variance_every": 1}
    with pytest.raises(Exception, match=f"{NonFiniteGradient.__name__}.*states 'exp_avg_sq' is not finite"):
        run_alone(LocalUpdates(**options), 2, explode, build=gentle)
    (_, kept), (_, exploded) = run_alone(LocalUpdates(nonfinite="skip", **options), 2, explode, build=gentle)
    assert kept == pytest.approx(1e-3)
    assert exploded == float("inf")
    assert [v for _, v in run_alone(LocalUpdates(nonfinite="allow", **options), 2, explode, build=gentle)] == [
        float("inf")
    ] * 2


def test_a_worker_that_left_out_all_its_steps_counts_as_none() -> None:
    def script(rank: int, synchronizer: Synchronizer, model: Any, optimizer: Optimizer) -> float | None:
        model.x.grad = torch.full_like(model.x, float("nan") if rank else 1.0)
        synchronizer.step(optimizer.step, pause_at=0)
        return None if rank else float(optimizer.state[model.x]["exp_avg"])

    strategy = LocalUpdates(every=1, momentum_every=1, nonfinite="skip")
    assert run_alone(strategy, 2, script, build=gentle) == [pytest.approx(0.05), None]


def test_the_name() -> None:
    assert name_of(build("des-loc")) == "des-loc"
    assert name_of(LocalUpdates(momentum_every=2)) == "des-loc"
