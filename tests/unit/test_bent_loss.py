"""Losses that are no linear function of what single samples lose are noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.training.bent import bent_among
from paceline.training.sums import terms_in
from tests.unit.looked_at import NUM_SAMPLES, SQUARE, squares, weighted_by_itself

GROUPS = torch.tensor([0, 1, 0, 1, 1])


def by_class(output: Tensor) -> Tensor:
    """Of five."""
    return squares(output)[:, :5].mean(0)


def put_among_others(output: Tensor) -> Tensor:
    one, other = torch.zeros(8), torch.zeros(8)
    one[1:6] = by_class(output)
    other[torch.arange(5)] = by_class(output)
    return one.mean() + other.mean()


def by_group(output: Tensor) -> list[Tensor]:
    losses = squares(output).mean(1)
    return [losses[:3].mean(), losses[3:].mean()]


BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "a quotient of sums": lambda output: 1 - 2 * output.sum() / (output.square().sum() + 1),
    "a root of a mean": lambda output: squares(output).mean().sqrt(),
    "a root of one of torch's losses": lambda output: nn.functional.mse_loss(output, SQUARE.detach()).sqrt(),
    "a logarithm of a mean": lambda output: output.mean() - output.exp().mean().log(),
    "a norm of all": lambda output: 0.1 * output.norm() + squares(output).mean(),
    "the largest": lambda output: squares(output).mean(1).topk(2).values.mean(),
    "the median": lambda output: squares(output).mean(1).median(),
    "a deviation over the batch": lambda output: squares(output).mean() + (1 - output[:, :3].std(0)).relu().mean(),
    "similarities": lambda output: nn.functional.cross_entropy(output @ output.t(), torch.arange(NUM_SAMPLES)),
    "similarities of two views": lambda output: similarities(torch.cat([output, output.sin()])),
    "similarities by einsum": lambda output: torch.einsum("ac,bc->ab", output, output).logsumexp(1).mean(),
    "similarities by cosine": lambda output: (
        nn.functional.cosine_similarity(output[:, None], output.sin()[None], dim=2).logsumexp(1).mean()
    ),
    "a quotient for each class": lambda output: (output[:, :3].sum(0) / (output[:, :3].square().sum(0) + 1)).mean(),
    "less the mean of each class": lambda output: (output[:, :3] - output[:, :3].mean(0)).exp().mean(),
    "pairs": lambda output: (1 - output[:, 0][:, None] + output[:, 0]).relu().mean(),
    "a covariance": lambda output: torch.cov(output[:, :3].t()).square().sum(),
    "products of features": lambda output: (output[:, :3].t() @ output.sin()[:, :3]).square().sum(),
    "sums up to each": lambda output: output[:, 0].exp().cumsum(0).log().mean(),
    "sums up to each, in a column": lambda output: output[:, :1].logcumsumexp(0).mean(),
    "less than the largest": lambda output: (output.mean() - squares(output).mean(1).max()).relu(),
    "weights by what others lose": weighted_by_itself,
    "the largest of groups' means": lambda output: torch.stack(by_group(output)).max(),
    "the larger of two means": lambda output: torch.maximum(*by_group(output)),
    "a smooth maximum of groups' means": lambda output: torch.stack(by_group(output)).logsumexp(0),
    "similarities with two of each": lambda output: nn.functional.cross_entropy(
        output @ torch.cat([output, output.sin()]).t(), torch.arange(NUM_SAMPLES)
    ),
    "a product of means": lambda output: squares(output).mean() * output.abs().mean(),
}
STRAIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "quotients of each sample": lambda output: (output.sum(1) / output.square().sum(1)).mean(),
    "a norm of each sample": lambda output: output.norm(dim=1).mean(),
    "a learned weight": lambda output: squares(output).mean() * torch.exp(-SCALE) + SCALE,
    "divided by a learned scale": lambda output: squares(output).mean() / SCALE.square() + SCALE.square().log(),
    "divided by its own value": lambda output: squares(output).mean() / output.detach().norm(),
    "the largest of each sample": lambda output: output.max(1).values.mean() + output.std(1).mean(),
    "means of means": lambda output: (output.square().mean(0) * torch.arange(8.0)).sum(),
    "a norm of weights": lambda output: squares(output).mean() + 0.1 * SQUARE[:3].norm(),
    "as many classes, by computed weights": lambda output: nn.functional.cross_entropy(
        output.tanh() @ nn.functional.normalize(SQUARE).t(), torch.arange(NUM_SAMPLES)
    ),
    "as many classes, by a weight's direction": lambda output: nn.utils.parametrizations.spectral_norm(
        nn.Linear(NUM_SAMPLES, NUM_SAMPLES, bias=False)
    )(output.tanh()).mean(),
    "learned weights of classes": lambda output: (squares(output).mean(0) * torch.exp(-SQUARE[0])).sum(),
    "some classes": lambda output: squares(output).mean(0)[1:].sum() + squares(output).mean(0)[torch.tensor([0])].sum(),
    "some classes, by a mask": lambda output: by_class(output).masked_select(torch.arange(5) > 2).mean(),
    "classes in another order": lambda output: by_class(output).flip(0).roll(1).take(torch.tensor([3, 0])).mean(),
    "classes in groups": lambda output: torch.zeros(2).index_add(0, GROUPS, by_class(output)).mean(),
    "classes in groups, scattered": lambda output: torch.zeros(2).scatter_add(0, GROUPS, by_class(output)).mean(),
    "classes among others": lambda output: nn.functional.pad(by_class(output), (0, 3)).mean(),
    "classes put among others": put_among_others,
    "classes without a dimension": lambda output: squares(output)[:, :5].mean(0, keepdim=True).squeeze((0,)).mean(),
    "pairs of classes": lambda output: (output[:, :, None] - output[:, None]).relu().mean(),
    "products of each sample": lambda output: (output[:, :3, None] @ output[:, None, :3]).square().mean(),
    "sums up to each class": lambda output: output.exp().cumsum(1).log().mean(),
    "a mean of products": lambda output: (output[:, :3].t() @ output.sin()[:, :3]).mean() / NUM_SAMPLES,
    "products with computed weights": lambda output: (
        nn.functional.linear(output[:, :3], nn.Linear(2, 6)(torch.ones(1, 2)).reshape(2, 3)).relu().mean()
    ),
    "the best of two for each sample": lambda output: (
        sum(torch.stack([row.square().mean(), row.abs().mean()]).min() for row in output) / NUM_SAMPLES
    ),
    "the larger of two norms of weights": lambda output: (
        squares(output).mean() + torch.maximum(SQUARE[:3].norm(), SQUARE[3:].norm())
    ),
    "less the largest": lambda output: nn.functional.cross_entropy(output - output.max(), torch.arange(NUM_SAMPLES)),
}
SCALE = nn.Parameter(torch.ones(()))


def similarities(rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))


def bent(loss: Callable[[Tensor], Tensor]) -> str | None:
    output = nn.Linear(3, NUM_SAMPLES)(torch.ones(NUM_SAMPLES, 3))
    return bent_among(terms_in(loss(output), NUM_SAMPLES, 2), NUM_SAMPLES)


@pytest.mark.parametrize("loss", BENT.values(), ids=BENT)
def test_functions_of_means_that_are_not_linear_are_noticed(loss: Callable[[Tensor], Tensor]) -> None:
    assert bent(loss) is not None


@pytest.mark.parametrize("loss", STRAIGHT.values(), ids=STRAIGHT)
def test_what_is_of_each_sample_or_of_parameters_is_linear(loss: Callable[[Tensor], Tensor]) -> None:
    assert bent(loss) is None
