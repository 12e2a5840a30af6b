"""The loss of a backward pass that runs in a thread of its own, as on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.training.summed_loss import SummedLoss
from paceline.training.terms import _MOST_NODES, Terms

NUM_SAMPLES = 8


class InAnotherThread(torch.autograd.Function):
    """Has its backward pass look from another thread, while the script's own waits in `backward`."""

    @staticmethod
    def forward(context: Any, x: Tensor, look: Any) -> Tensor:  # type: ignore[override]
        context.look = look
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        raised: list[UsageError] = []

        def look() -> None:
            try:
                context.look(0)
            except UsageError as error:
                raised.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        for error in raised:
            raise error
        return gradient, None


def train(*, reduction: str) -> None:
    model = nn.Linear(3, 2)
    watch = SummedLoss([], rank=1, size=2, num_samples=lambda: NUM_SAMPLES)
    output = InAnotherThread.apply(model(torch.ones(NUM_SAMPLES, 3)), watch._look)
    labels = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    nn.functional.cross_entropy(output, labels, reduction=reduction).backward()
    assert watch.has_looked


def test_a_sum_is_noticed_from_another_thread() -> None:
    with pytest.raises(UsageError, match=r"rank 1: the loss is a sum over the batch \(NllLoss with reduction='sum'\)"):
        train(reduction="sum")


def test_a_mean_is_not() -> None:
    train(reduction="mean")


@pytest.mark.parametrize("is_scaled", [True, False])
def test_sums_of_sums_are_looked_into_once(is_scaled: bool) -> None:
    """There are 2**30 ways down this graph."""
    factor = torch.ones((), requires_grad=True)
    watch = SummedLoss([factor], rank=0, size=2, num_samples=lambda: NUM_SAMPLES)
    loss = factor * 1.0
    for _ in range(30):
        loss = loss * factor + loss * factor if is_scaled else loss + loss
    loss.backward()
    watch.end_step()
    watch.close()


def trunk(depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), *(nn.Tanh() for _ in range(depth)))


@pytest.mark.parametrize(("depth", "are_apart"), [(0, True), (_MOST_NODES, False)])
def test_as_many_terms_as_samples_are_refused_only_if_cut_out_of_the_batch(depth: int, are_apart: bool) -> None:
    """An ensemble's terms share nothing; those of heads may share a trunk that nobody has looked down to."""
    models = [trunk(depth) for _ in range(4)]
    labels = torch.zeros(40, dtype=torch.int64)
    loss = torch.zeros(())
    for model in models:  # 4 samples of 10 tokens
        loss = loss + nn.functional.cross_entropy(model(torch.ones(40, 3)), labels)
    terms = Terms()
    terms.add_pass([loss.grad_fn])
    assert not terms.are_one_a_sample(4)
    assert terms.are_apart(4) == are_apart
