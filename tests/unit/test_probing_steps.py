"""What a probe times of a script's steps."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import BudgetReached, UsageError
from paceline.nn import ShardedEmbedding
from paceline.probing.step_times import Apart, StepWatch, rows_told, sleeps_told
from paceline.server.tables.table import Table
from paceline.strategies.replica import describe


class Clock:
    """Moves on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def take(self, duration_s: float) -> None:
        self.now_s += duration_s


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.take(ctx.backward_s)
        return gradient, None, None


class Layer(nn.Module):
    """A scale whose gradient is there once its backward time is over."""

    def __init__(self, clock: Clock, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._clock, self._forward_s, self._backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        self._clock.take(self._forward_s)
        scaled: Tensor = _Timed.apply(x * self.weight, self._clock, self._backward_s)
        return scaled


def watched(watch: StepWatch, clock: Clock, *, num_steps: int, num_passes: int = 1, asleep_s: float = 0.0) -> None:
    """Steps of 0.5 s batch, 1 + 1 s forward, 2 + 0.5 s backward and 0.5 s optimizer: 3 s and 2.5 s."""
    model = nn.Sequential(Layer(clock, forward_s=1.0, backward_s=0.5), Layer(clock, forward_s=1.0, backward_s=2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: clock.take(0.5))
    watch.watch(describe(model, optimizer))
    for _ in range(num_steps):
        for _ in range(num_passes):
            clock.take(0.5 + asleep_s)
            watch.leave_out(asleep_s)
            model(torch.ones(1, requires_grad=True)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1))  # an evaluation takes time, and is no pass
            clock.take(-2.0)
        optimizer.step()


@pytest.mark.parametrize("asleep_s", [0.0, 100.0])
def test_a_step_is_divided_as_it_was_spent(asleep_s: float) -> None:
    clock = Clock()
    watch = StepWatch(num_steps=100, max_s=1e9, now_s=clock)
    watched(watch, clock, num_steps=8, asleep_s=asleep_s)
    report = watch.report("10.0.0.1")
    assert report.address == "10.0.0.1"
    assert report.steps_s == pytest.approx([5.5] * 5)  # of 8, one starts the watch and two warm up
    assert report.backward_share == pytest.approx(2.5 / 5.5)
    assert report.gradient_shares == pytest.approx((0.2, 0.8))  # the last layer's gradient comes first, after 2 s


def test_accumulated_passes_count_by_themselves() -> None:
    clock = Clock()
    watch = StepWatch(num_steps=100, max_s=1e9, now_s=clock)
    watched(watch, clock, num_steps=6, num_passes=4)
    report = watch.report("it")
    assert report.steps_s == pytest.approx([(4 * 5 + 0.5) / 4] * 3)
    assert report.backward_share == pytest.approx(10 / 20.5)


def test_enough_ends_the_script() -> None:
    by_count, by_time = (Clock(), Clock())
    watch = StepWatch(num_steps=7, max_s=1e9, now_s=by_count)
    with pytest.raises(BudgetReached):
        watched(watch, by_count, num_steps=100)
    assert by_count.now_s == pytest.approx(8 * 5.5)
    watch = StepWatch(num_steps=1000, max_s=20.0, now_s=by_time)
    with pytest.raises(BudgetReached):
        watched(watch, by_time, num_steps=100)
    assert by_time.now_s == pytest.approx(5.5 + 4 * 5.5)  # the first that ends 20 s after the watch began


def test_too_few_steps_are_refused() -> None:
    clock = Clock()
    watch = StepWatch(num_steps=100, max_s=1e9, now_s=clock)
    watched(watch, clock, num_steps=3)
    with pytest.raises(UsageError, match=r"took 2 training step\(s\), and probing needs at least 3; have it train"):
        watch.report("it")


def test_a_sleep_counts_for_as_long_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what it takes longer belongs to the step; and other threads' do not count."""
    clock = Clock()
    monkeypatch.setattr(time, "sleep", lambda duration_s: clock.take(1.5 * duration_s))
    told: list[float] = []
    with sleeps_told(told.append):
        time.sleep(2.0)
        other = threading.Thread(target=time.sleep, args=(7.0,))
        other.start()
        other.join()
    time.sleep(5.0)
    assert clock.now_s == pytest.approx(1.5 * (2.0 + 7.0 + 5.0))
    assert told == [2.0]


def test_what_servers_do_with_rows_is_told_once_each() -> None:
    """A script with a table is probed with its rows in its own process, where a server's work is no part of a step."""
    assert Apart().traits.holds_rows
    table, told, real = ShardedEmbedding(100, 4, optimizer="sgd", name="rows"), list[float](), Table.read
    with rows_told(told.append):
        table(torch.arange(5)).sum().backward()
        assert len(told) == 1
        table.update()  # which looks whether it can take the gradients first
    assert len(told) == 3
    assert min(told) > 0
    assert Table.read is real
