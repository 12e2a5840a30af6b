"""What losses are divided by on each rank, as their graphs tell before a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.buckets import when_gradient_is_ready
from paceline.training.divisors import Divisors

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

SIZE, NUM_SAMPLES, NUM_CLASSES = 2, 6, 3
WEIGHT = torch.tensor([1.0, 2.0, 4.0])
IGNORED = torch.tensor([[0, 1, -100, 2, 1, 0], [-100, 1, -100, 2, 1, 0]])

Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]


def batch(rank: int, num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(rank))
    return x, torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2]])[rank][:num_samples]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def mask(y: Tensor) -> Tensor:
    return (y == 2).float()


class Pass:
    """One rank's backward pass."""

    def __init__(self, rank: int) -> None:
        self.watch = Divisors(is_first=rank == 0, num_samples=lambda: self.num_samples)
        self.rank, self.num_samples = rank, 0

    def run(self, loss: Loss, *, num_samples: int = NUM_SAMPLES, reaches_model: bool = True) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(4, NUM_CLASSES)
        watched = model if reaches_model else nn.Linear(4, NUM_CLASSES)
        hooks = [when_gradient_is_ready(parameter, self.take, 0) for parameter in watched.parameters()]
        x, y = batch(self.rank, num_samples)
        self.num_samples = len(x)
        self.watch.begin()
        loss(model, x, y, self.rank).backward()
        self.watch.close()
        for hook in hooks:
            hook.remove()
        return self.watch.said()

    def take(self, _: int) -> None:
        self.watch.take()


def require_told(loss: Loss, says: str | None, **settings: Any) -> None:
    ranks = [Pass(rank) for rank in range(SIZE)]
    everyone = [one.run(loss, **settings) for one in ranks]
    with pytest.warns(UserWarning, match=says) if says else nullcontext():
        ranks[0].watch.compare(everyone)
    for one in ranks:  # another rank says nothing, and nobody says it twice
        one.watch.compare(everyone)


TOLD: dict[str, tuple[Loss, str]] = {
    "a mask": (lambda m, x, y, _: (losses(m, x, y) * mask(y)).sum() / mask(y).sum(), "2 on rank 0, 3 on rank 1"),
    "a picked part": (lambda m, x, y, _: losses(m, x, y)[y == 2].mean(), "2 on rank 0, 3 on rank 1"),
    "weights": (lambda m, x, y, _: (WEIGHT[y] * losses(m, x, y)).sum() / WEIGHT[y].sum(), "14 on rank 0, 17 on rank 1"),
    "without NaN": (lambda m, x, y, _: losses(m, x, y).where(y != 2, torch.nan).nanmean(), "own batch weighs"),
    "a dot product": (lambda m, x, y, _: torch.dot(mask(y), losses(m, x, y)) / mask(y).sum(), "own batch weighs"),
    "two means": (
        lambda m, x, y, _: (losses(m, x, y) * mask(y)).mean() / mask(y).mean() + 0.1 * m.weight.square().sum(),
        "2 on rank 0, 3 on rank 1",
    ),
    "scaled": (lambda m, x, y, _: 1024 * ((losses(m, x, y) * mask(y)).sum() / mask(y).sum()), "2 on rank 0, 3 on rank"),
    "a number": (lambda m, x, y, _: losses(m, x, y).sum() / max(1, int((y == 2).sum())), "2 on rank 0, 3 on rank 1"),
    "labels left out": (lambda m, x, y, rank: F.cross_entropy(m(x), IGNORED[rank]), "5 on rank 0, 4 on rank 1"),
    "class weights": (lambda m, x, y, _: 0.5 * F.cross_entropy(m(x), y, WEIGHT), r"the weights of the classes .*14 on"),
    "smoothed": (lambda m, x, y, _: F.cross_entropy(m(x), y, WEIGHT, label_smoothing=0.1), "the weights of the class"),
    "both": (
        lambda m, x, y, _: F.cross_entropy(m(x), y, WEIGHT, ignore_index=1),
        "the weights of the classes without ignore_index",
    ),
    "a class left out": (
        lambda m, x, y, _: F.cross_entropy(m(x), y, ignore_index=1),
        r"the number of samples without ignore_index.*\[\(labels != ignore_index\)\.sum\(\), len\(x\)\]",
    ),
    "classes by themselves": (
        lambda m, x, y, _: torch.stack([losses(m, x, y)[y == c].mean() for c in range(NUM_CLASSES)]).mean(),
        "6 on rank 0, 3 on rank 1",
    ),
    "its own loss": (
        lambda m, x, y, _: losses(m, x, y).mean() / losses(m, x, y).detach().mean(),
        "each worker.s own batch weighs",
    ),
}


def of_positives(output: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output[:, 0], (y == 2).float(), pos_weight=weight)


NOT_TOLD: dict[str, Loss] = {
    "a mean": lambda m, x, y, _: losses(m, x, y).mean(),
    "a mean of one of torch's losses": lambda m, x, y, _: F.mse_loss(m(x), F.one_hot(y, NUM_CLASSES).float()),
    "by the batch": lambda m, x, y, _: losses(m, x, y).sum() / len(x),
    "by a constant": lambda m, x, y, _: losses(m, x, y).mean() / 4,
    "by all ranks' number": lambda m, x, y, _: (losses(m, x, y) * mask(y)).sum() / torch.tensor(5.0) * 12 / len(x),
    "by a factor that makes up for it": lambda m, x, y, rank: (
        F.cross_entropy(m(x), IGNORED[rank]) * ((IGNORED[rank] >= 0).sum() * SIZE / 9)
    ),
    "class weights that a factor makes up for": lambda m, x, y, _: (
        F.cross_entropy(m(x), y, WEIGHT) * (WEIGHT[y].sum() * SIZE / 31) + 0.1 * m(x).square().mean()
    ),
    "mixed up": lambda m, x, y, rank: (
        (0.3 + rank / 2) * losses(m, x, y).mean() + (0.7 - rank / 2) * losses(m, x, y.flip(0)).mean()
    ),
    "a temperature": lambda m, x, y, _: F.cross_entropy(m(x) / m.weight.norm(), y),
    "normalised inside": lambda m, x, y, _: F.cross_entropy(
        F.softmax(F.layer_norm(m(x) / m(x).norm(), (NUM_CLASSES,)), dim=1), y
    ),
    "a similarity": lambda m, x, y, _: -F.cosine_similarity(m(x), F.one_hot(y, NUM_CLASSES).float()).mean(),
    "a mask a sample": lambda m, x, y, rank: (
        (m(x) * (x[:, :3] > 0)).sum(1) / (x[:, :3] > 0).sum(1).clamp(min=1)
    ).mean(),
    "a weight of positives": lambda m, x, y, _: of_positives(m(x), y, torch.tensor(3.0)),
    "a penalty": lambda m, x, y, _: losses(m, x, y).mean() + 0.1 * m.weight.square().sum(),
    "smoothed": lambda m, x, y, _: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "a label left out on every rank": lambda m, x, y, _: F.cross_entropy(m(x), IGNORED[0]),
    "by what has a gradient": lambda m, x, y, _: m(x).sum() / m(x).square().sum(),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_divisor_of_a_ranks_own_is_told(name: str) -> None:
    loss, says = TOLD[name]
    require_told(loss, rf"^the loss at test_divisors\.py:\d+ is divided by .*{says}")


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y, _: losses(m, x, y).mean() * (1 + y.float().mean()),
        lambda m, x, y, rank: losses(m, x, y).mean() + (0.1 + rank) * m(x).square().mean(),
        lambda m, x, y, _: of_positives(m(x), y, (y < 2).sum() / (y == 2).sum()),
    ],
)
def test_a_factor_of_a_ranks_own_is_told(loss: Loss) -> None:
    require_told(loss, r"^the loss at test_divisors\.py:\d+ is multiplied by .* on rank 0, .* on rank 1")


@pytest.mark.parametrize("name", NOT_TOLD)
def test_others_are_not(name: str) -> None:
    require_told(NOT_TOLD[name], None)


def test_passes_that_reach_no_parameter_of_the_model_do_not_count() -> None:
    require_told(TOLD["a mask"][0], None, reaches_model=False)


def in_two_passes(first: Loss, second: Loss) -> Loss:
    def loss(model: nn.Module, x: Tensor, y: Tensor, rank: int) -> Tensor:
        first(model, x, y, rank).backward()
        return second(model, x, y, rank)

    return loss


def test_the_pass_that_is_told_of_is_the_one_that_is_placed() -> None:
    line = in_two_passes.__code__.co_firstlineno + 2
    two = in_two_passes(TOLD["a mask"][0], NOT_TOLD["a mean"])
    require_told(two, rf"loss at test_divisors\.py:{line} is divided by what .*2 on rank 0, 3 on rank 1")
    two = in_two_passes(TOLD["a mask"][0], TOLD["class weights"][0])
    require_told(two, rf"loss at test_divisors\.py:{line} is divided by what .*2 on rank 0, 3 on rank 1")


def test_what_is_told_outlasts_the_next_look() -> None:
    ranks = [Pass(0), Pass(1)]
    everyone = [one.run(TOLD["a mask"][0]) for one in ranks]
    ranks[0].watch.begin()
    with pytest.warns(UserWarning, match=r"test_divisors\.py:\d+"):
        ranks[0].watch.compare(everyone)
    ranks[0].watch.close()


def test_losses_may_come_one_by_one() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor, rank: int) -> Tensor:
        torch.autograd.backward(each for each in losses(model, x, y))
        assert all(parameter.grad is not None for parameter in model.parameters())
        return losses(model, x, y).mean()

    require_told(loss, None)


def test_what_an_earlier_pass_has_freed_may_be_left_out() -> None:
    passes = Pass(0)

    def loss(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        side = nn.Parameter(torch.ones(3)).sum() / torch.tensor(3.0)
        side.backward()
        (losses(model, x, y).mean() + side).backward(inputs=list(model.parameters()))
        return losses(model, x, y).mean()

    assert [[values[0], values[2]] for values in passes.run(loss)] == 2 * [[NUM_SAMPLES, NUM_SAMPLES]]


def test_only_as_many_samples_are_compared() -> None:
    ranks = [Pass(0), Pass(1)]
    everyone = [one.run(NOT_TOLD["a mean"], num_samples=6 - one.rank) for one in ranks]
    ranks[0].watch.compare(everyone)
    assert everyone == [[[6, 1.0, 6.0]], [[5, 1.0, 5.0]]]


def test_what_a_checkpoint_unpacks_once_is_left_to_it() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor, rank: int) -> Any:
        return checkpoint(TOLD["labels left out"][0], model, x, y, rank, use_reentrant=False)

    require_told(loss, None)


def test_class_weights_inside_a_checkpoint_are_told() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor, rank: int) -> Any:
        return checkpoint(TOLD["class weights"][0], model, x, y, rank, use_reentrant=False)

    require_told(loss, "the weights of the classes of each worker's own batch")


def test_backward_is_torchs_own_again_when_nobody_looks() -> None:
    own = torch.autograd.backward
    watches = [Divisors(is_first=True, num_samples=lambda: 1) for _ in range(2)]
    for watch in watches:
        watch.begin()
    assert torch.autograd.backward is not own
    for watch in watches:
        watch.close()
    assert torch.autograd.backward is own
