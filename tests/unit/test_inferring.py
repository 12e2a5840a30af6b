"""A property of batches that their gradients tell, and one that is not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.attacks import inferring
from paceline.attacks.inferring import Inference, Ink, Pools, Sketch, area_under_curve


def samples(*, mark: float, seed: int, count: int = 2000) -> Pools:
    """Noise whose labels know nothing of the mark: a bright pixel of every other sample."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 4
    held = torch.rand(count, generator=generator) < 0.5
    inputs[held, 0, 0, 0] += mark
    return Pools((inputs[held], labels[held]), (inputs[~held], labels[~held]))


def auc(*, mark: float, hidden: int = 32) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 4))
    generator = torch.Generator().manual_seed(2)
    before = [parameter.clone() for parameter in model.parameters()]
    found = Inference(batches=150).auc(
        model, samples(mark=mark, seed=0), samples(mark=mark, seed=1), generator=generator
    )
    assert all(map(torch.equal, before, model.parameters()))
    return found


def test_a_planted_property_is_found() -> None:
    assert auc(mark=8.0) > 0.97


def test_a_planted_property_is_found_in_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with 2,692 parameters, in 1,024 sums."""
    monkeypatch.setattr(inferring, "NUM_SUMS", 1024)
    assert auc(mark=8.0, hidden=128) > 0.9
    assert abs(auc(mark=0.0, hidden=128) - 0.5) < 0.12


def test_a_sketch_keeps_inner_products() -> None:
    """On the mean of 400 sketches to 0.05 of the vectors' lengths; of one with the variance that the paper says."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 500, dtype=torch.float64, generator=generator)
    first, second = first / first.norm(), (second + first) / (second + first).norm()
    sketches = [Sketch(500, generator=generator, num_sums=16) for _ in range(400)]
    found = torch.stack([sketch.of(first) @ sketch.of(second) for sketch in sketches])
    inner = first @ second
    assert abs(found.mean() - inner) < 0.05
    variance = (1 + inner**2 - 2 * (first**2 @ second**2)) / 16
    assert float(found.var()) == pytest.approx(float(variance), rel=0.3)
    assert Sketch(500, generator=generator, num_sums=500).of(first) is first


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
