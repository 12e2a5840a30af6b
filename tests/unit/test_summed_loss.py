"""The loss of a backward pass that runs in a thread of its own, as on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.training.summed_loss import SummedLoss

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
