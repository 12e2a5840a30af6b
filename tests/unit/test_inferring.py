"""A property of batches that their gradients tell, and one that is not there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.attacks.inferring import Inference, Ink, Pools, area_under_curve


def samples(*, mark: float, seed: int, count: int = 2000) -> Pools:
    """Noise whose labels know nothing of the mark: a bright pixel of every other sample."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 4
    held = torch.rand(count, generator=generator) < 0.5
    inputs[held, 0, 0, 0] += mark
    return Pools((inputs[held], labels[held]), (inputs[~held], labels[~held]))


def auc(*, mark: float) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(2)
    before = [parameter.clone() for parameter in model.parameters()]
    found = Inference(batches=150).auc(
        model, samples(mark=mark, seed=0), samples(mark=mark, seed=1), generator=generator
    )
    assert all(map(torch.equal, before, model.parameters()))
    return found


def test_a_planted_property_is_found() -> None:
    assert auc(mark=8.0) > 0.97


def test_one_that_is_not_there_is_a_guess() -> None:
    """With 150 batches of each kind the standard error of a guess is 0.033."""
    assert abs(auc(mark=0.0) - 0.5) < 0.12


def test_the_area_counts_pairs_in_the_right_order() -> None:
    scores, truths = torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([True, False, True, False])
    assert area_under_curve(scores, truths) == (1 + 1 + 1 + 0.5) / 4


def test_ink_is_of_no_class() -> None:
    labels: Tensor = torch.arange(400) % 4
    inputs = torch.rand(400, 1, 3, 3) + labels[:, None, None, None]
    held = Ink(most=0.75).held(inputs, labels)
    assert [int(held[labels == label].sum()) for label in range(4)] == [25] * 4
