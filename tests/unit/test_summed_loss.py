"""Losses that are sums over their batch are noticed, whatever thread goes backward."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.training import summed_loss
from paceline.training.nodes import MOST_NODES, is_of_data
from paceline.training.summed_loss import SummedLoss
from paceline.training.sums import multiplied_sum_among, sum_among, terms_in
from paceline.training.terms import Terms, pass_of
from tests.unit.looked_at import NUM_SAMPLES, SQUARE, squares, weighted_by_itself


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
    output = InAnotherThread.apply(model(torch.ones(NUM_SAMPLES, 3)), watch._take)
    labels = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    try:
        nn.functional.cross_entropy(output, labels, reduction=reduction).backward()
    finally:
        watch.close()
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


@pytest.mark.parametrize(("depth", "are_apart"), [(0, True), (MOST_NODES, False)])
def test_as_many_terms_as_samples_are_refused_only_if_cut_out_of_the_batch(depth: int, are_apart: bool) -> None:
    """An ensemble's terms share nothing; those of heads may share a trunk that nobody has looked down to."""
    models = [trunk(depth) for _ in range(4)]
    labels = torch.zeros(40, dtype=torch.int64)
    loss = torch.zeros(())
    for model in models:  # 4 samples of 10 tokens
        loss = loss + nn.functional.cross_entropy(model(torch.ones(40, 3)), labels)
    terms = Terms()
    terms.add_pass(pass_of([loss.grad_fn]))
    assert not terms.are_one_a_sample(4)
    assert terms.are_apart(4) == are_apart


def test_losses_of_a_sample_each_may_be_stacked() -> None:
    model, terms = nn.Linear(3, 3), Terms()
    labels = torch.zeros(1, dtype=torch.int64)
    losses = [nn.functional.cross_entropy(model(torch.ones(1, 3)), labels) for _ in range(4)]
    terms.add_pass(pass_of([torch.stack(losses).sum().grad_fn]))
    assert terms.are_apart(4)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def sum_of_parts(parts: Iterable[Tensor]) -> Tensor:
    return torch.as_tensor(sum(squares(part).sum() for part in parts))


def sum_of_numbers(numbers: Iterable[Tensor]) -> Tensor:
    return torch.as_tensor(sum(numbers))


def of_two_lengths(output: Tensor) -> Tensor:
    """One number is added to vectors of two lengths."""
    number, losses = output.mean(), squares(output).mean(1)
    return ((losses[:5] + number).sum() + (losses[5:] + number).sum()) / NUM_SAMPLES


def nested(output: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch's own: it is new
        return sum_of_parts((torch.nested.as_nested_tensor([output[:5], output[5:]]) * 2).unbind()) / NUM_SAMPLES


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of all": lambda output: squares(output).sum(),
    "behind a cast": lambda output: squares(output).sum().double(),
    "behind a squeeze": lambda output: squares(output).mean(1).sum(0, keepdim=True).squeeze(),
    "of what is no NaN": lambda output: squares(output).nansum(),
    "of sums": lambda output: squares(output).sum(1).sum(0),
    "along both": lambda output: -squares(output).sum((0, 1)),
    "of a flat view": lambda output: squares(output).flatten().sum(),
    "of a column": lambda output: squares(output).mean(1, keepdim=True).sum(),
    "and another": lambda output: squares(output).sum() + output.abs().sum(0).sum(),
    "and a weighted one": lambda output: squares(output).sum() - 0.5 * output.abs().sum(),
    "of losses of three tokens each": lambda output: nn.functional.cross_entropy(
        output.repeat(3, 1), torch.zeros(3 * NUM_SAMPLES, dtype=torch.int64), reduction="none"
    ).sum(),
    "by Python": lambda output: torch.as_tensor(sum(squares(output).mean(1))),
    "by einsum": lambda output: torch.einsum("i,i->", squares(output).mean(1), ONES),
    "of products by einsum": lambda output: torch.einsum("ij,ij->", output, output),
    "by vdot": lambda output: torch.vdot(squares(output).mean(1), ONES),
    "by dot, weighted": lambda output: torch.dot(torch.arange(1.0, 1.0 + NUM_SAMPLES), squares(output).mean(1)),
    "by tensordot": lambda output: torch.tensordot(squares(output).mean(1), ONES, 1),
    "a trace": lambda output: (output @ output.t()).trace(),
    "of a diagonal": lambda output: (output @ output.t()).diagonal().sum(),
    "a squared norm": lambda output: (output - 1).norm() ** 2,
    "a squared norm of torch.linalg": lambda output: torch.linalg.vector_norm(output).square(),
    "a squared distance": lambda output: torch.dist(output, torch.ones(NUM_SAMPLES, NUM_SAMPLES)) ** 2,
    "a squared distance from outputs": lambda output: torch.dist(torch.ones(NUM_SAMPLES, NUM_SAMPLES), output) ** 2,
    "of squares by a product": lambda output: (output - 1).flatten() @ (output - 1).flatten(),
    "the last of cumulated ones": lambda output: squares(output).mean(1).cumsum(0)[-1],
    "by a product with ones": lambda output: torch.mm(ONES[None], squares(output).mean(1, keepdim=True))[0, 0],
    "of halves": lambda output: (squares(output) / 2).sum(),
    "of halves, multiplied": lambda output: (0.5 * squares(output)).sum(),
    "of a function of the script's own": lambda output: Doubled.apply(squares(output)).sum(),
    "of quotients": lambda output: (squares(output)[:, 0] / output[:, 1].exp() + output[:, 1]).sum(),
    "weighted": lambda output: (squares(output).mean(1) * torch.linspace(0.5, 1.5, NUM_SAMPLES)).sum(),
    "of real and made ones, split": lambda output: torch.sub(*(part.sum() for part in output.repeat(2, 1).chunk(2))),
    "with a penalty on each": lambda output: (squares(output).mean(1) + SQUARE.norm()).sum(),
    "beside a penalty": lambda output: squares(output).sum() + 0.1 * SQUARE.square().sum(),
    "of losses of single samples, stacked": lambda output: torch.stack(
        [squares(row[:2]).mean() for row in output]
    ).sum(),
    "of losses of single samples, joined": lambda output: torch.cat(
        [squares(row[:2]).mean(0, keepdim=True) for row in output.unbind()]
    ).sum(),
    "of some": lambda output: (squares(output).mean(1) * (torch.arange(NUM_SAMPLES) == 3)).sum(),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "divided before": lambda output: (squares(output) / len(output)).sum(),
    "divided": lambda output: squares(output).sum() / len(output),
    "of means over the batch": lambda output: squares(output).mean(0).sum(),
    "of means over the batch, from the end": lambda output: squares(output).mean(-2).sum(0),
    "of as many losses": lambda output: torch.stack([squares(output).mean() for _ in range(NUM_SAMPLES)]).sum(),
    "beside a mean": lambda output: squares(output).mean() + output.abs().mean(0).sum(),
    "of as many weights, beside what is divided": lambda output: squares(output).sum() / 3 + SQUARE.square().sum(),
    "multiplied by one over the number": lambda output: (squares(output).mean(1) * (1 / NUM_SAMPLES)).sum(),
    "of each element, multiplied so": lambda output: (squares(output) * (1 / NUM_SAMPLES)).sum(),
    "weights that add up to one": lambda output: (squares(output).mean(1) * WEIGHTS).sum(),
    "weights that add up to one, by dot": lambda output: squares(output).mean(1) @ WEIGHTS,
    "weights of elements that add up to one": lambda output: (squares(output) * WEIGHTS[:, None] / 8).sum(),
    "a mean by einsum": lambda output: torch.einsum("ij,ij->", output, output) / NUM_SAMPLES,
    "a mean by einsum, multiplied": lambda output: torch.einsum("i,i->", squares(output).mean(1), ONES / NUM_SAMPLES),
    "a mean of a trace": lambda output: (output @ output.t()).trace() / NUM_SAMPLES,
    "of a temperature and the number": lambda output: (squares(output) / 0.1 / NUM_SAMPLES).sum(),
    "the sum of a part": lambda output: squares(output)[0].sum() + squares(output)[:2].mean(),
    "a norm": lambda output: output.norm() / NUM_SAMPLES**0.5,
    "covariances": lambda output: ((output.t() @ output) / NUM_SAMPLES).fill_diagonal_(0).square().mean(),
    "a penalty alone": lambda output: output.mean() + SQUARE.norm() ** 2,
    "multiplied": lambda output: squares(output).sum() * 0.1,
    "a mean as often as samples": lambda output: squares(output).mean().expand(NUM_SAMPLES).sum(),
    "nothing": lambda output: output[:, :0].sum() + squares(output).mean(),
    "behind a function of the script's own": lambda output: Doubled.apply(squares(output).mean()),
    "of as many weights, beside a mean": lambda output: squares(output).mean() + SQUARE.square().sum(),
    "of as many weights, beside a scaled mean": lambda output: 0.5 * squares(output).mean() + SQUARE.square().sum(),
    "of torch's, of weights": lambda output: (
        squares(output).mean() + nn.functional.mse_loss(SQUARE, SQUARE.detach() - 1, reduction="sum")
    ),
    "parts of two lengths": lambda output: sum_of_parts(output.split([5, 3])) / NUM_SAMPLES,
    "parts of two widths": lambda output: sum_of_parts(output.split([2, 6], 1)) / NUM_SAMPLES,
    "one number in vectors of two lengths": of_two_lengths,
    "nested parts": nested,
    "means along no dimension that is named": lambda output: squares(output).mean(dim=None).expand(8, 8).sum(),
    "as many losses, joined": lambda output: torch.cat([squares(output).mean().view(1) for _ in range(8)]).sum(),
    "as many losses, by hstack": lambda output: torch.hstack([squares(output).mean() for _ in range(8)]).sum(),
    "weights that have a gradient": weighted_by_itself,
    "as many tasks' means, by Python": lambda output: sum_of_numbers(squares(output).mean(0)),
    "as many tasks' means, with a weight for each": lambda output: sum_of_numbers(
        (2 + place) * mean for place, mean in enumerate(squares(output).mean(0))
    ),
    "as many tasks' means, weighted before": lambda output: torch.stack(
        list(2 * (squares(output).mean(0) * torch.arange(1.0, 9.0)))
    ).sum(),
}
ONES, WEIGHTS = torch.ones(NUM_SAMPLES), torch.arange(float(NUM_SAMPLES)).softmax(0)


def look_at(loss: Callable[[Tensor], Tensor]) -> None:
    """There are as many classes as samples."""
    model = nn.Linear(3, NUM_SAMPLES)
    watch = SummedLoss(list(model.parameters()), rank=1, size=2, num_samples=lambda: NUM_SAMPLES)
    try:
        loss(model(torch.ones(NUM_SAMPLES, 3))).backward()
    finally:
        watch.close()


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_sums_of_the_scripts_own_are_noticed(loss: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UsageError, match=r"rank 1: the loss is a sum over the batch"):
        look_at(loss)


@pytest.mark.parametrize("loss", OTHERS.values(), ids=OTHERS)
def test_what_a_script_has_divided_or_averaged_is_no_sum(loss: Callable[[Tensor], Tensor]) -> None:
    look_at(loss)


@pytest.mark.parametrize("num_samples", [6, 7])
def test_a_mean_by_numbers_of_few_digits_is_no_sum(num_samples: int) -> None:
    losses = squares(nn.Linear(3, 2)(torch.ones(num_samples, 3))).mean(1).bfloat16()
    part = torch.tensor(1 / num_samples, dtype=torch.bfloat16)
    for loss in ((losses * part.expand(num_samples)).sum(), (losses * part).sum()):
        assert sum_among(terms_in(loss, num_samples, 2), num_samples) is None


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.bias


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "without bias": lambda: nn.Linear(3, 3, bias=False),
    "by hand": Squeezed,
    "normalised at first": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),
    "deep": lambda: trunk(MOST_NODES),
    "bilinear": lambda: Twice(nn.Bilinear(3, 3, 3)),
}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x)


@pytest.mark.parametrize(
    ("name", "has_gradient"),
    [
        *((name, False) for name in MODELS),
        *((name, True) for name in MODELS if name != "by hand"),
        pytest.param("compiled", False, marks=pytest.mark.slow),
    ],
)
def test_what_a_model_makes_of_data_is_no_penalty(name: str, has_gradient: bool) -> None:
    model = MODELS[name]() if name in MODELS else torch.compile(nn.Linear(3, 3), backend="aot_eager")
    x = torch.ones(NUM_SAMPLES, 3, requires_grad=has_gradient)
    assert is_of_data(squares(model(x)).sum().grad_fn)
    for penalty in (sum(squares(each).sum() for each in model.parameters()), next(model.parameters()).norm()):
        assert not is_of_data(torch.as_tensor(penalty).grad_fn)


def test_a_penalty_may_go_backward_first() -> None:
    """It has as many rows as there are samples."""
    model = nn.Linear(5, NUM_SAMPLES)
    watch = SummedLoss(list(model.parameters()), rank=0, size=2, num_samples=lambda: NUM_SAMPLES)
    try:
        torch.as_tensor(sum(squares(each).sum() for each in model.parameters())).backward()
        with pytest.raises(UsageError, match=r"a sum over the batch \(sum\(\)\)"):
            squares(model(torch.ones(NUM_SAMPLES, 5))).sum().backward()
    finally:
        watch.close()


def test_a_look_that_fails_stops_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_loss, "SURPRISES", (Exception,))
    monkeypatch.setattr(summed_loss, "sum_among", lambda *_: 1 / 0)
    look_at(lambda output: squares(output).sum())


def test_what_goes_backward_is_not_kept() -> None:
    model = nn.Linear(3, 2)
    watch = SummedLoss(list(model.parameters()), rank=0, size=2, num_samples=lambda: NUM_SAMPLES)
    output = Doubled.apply(model(torch.ones(NUM_SAMPLES, 3)))
    node = weakref.ref(output.grad_fn)
    output.mean().backward(retain_graph=True)
    del output
    gc.collect()
    watch.close()
    assert node() is None


SCALED: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "torch's own": (lambda output: 0.5 * nn.functional.mse_loss(output, output.detach() + 1, reduction="sum"), 0.5),
    "torch's own by a scaler": (
        lambda output: 1024 * (nn.functional.mse_loss(output, output.detach(), reduction="sum") + output.mean()),
        1024,
    ),
    "a sum by a scaler": (lambda output: 1024 * squares(output).sum(), 1024),
    "a mean by a scaler": (lambda output: squares(output).sum() * (1 / NUM_SAMPLES) * 1024, None),
    "a mean of all batches by a scaler": (lambda output: squares(output).sum() * (2 / (2 * NUM_SAMPLES)) * 1024, None),
    "a sum beside a mean": (lambda output: output.mean() - 0.5 * (1 + output - output.exp()).sum(), 0.5),
    "a mean beside a small sum": (lambda output: output.mean() + 1e-3 * output.abs().sum(), None),
    "a penalty beside a mean": (lambda output: output.mean() + SQUARE.square().sum(), None),
    "a penalty by a scaler": (lambda _: 1024 * SQUARE.square().sum(), None),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_sums_are_told_and_means_are_not(name: str) -> None:
    loss, factor = SCALED[name]
    terms = terms_in(loss(nn.Linear(3, 2)(torch.ones(NUM_SAMPLES, 3))), NUM_SAMPLES, 2)
    assert multiplied_sum_among(terms, NUM_SAMPLES, 2) == factor


@pytest.mark.parametrize(("factor", "is_told"), [(0.5, True), (16.0, True), (2.0, False), (0.1, False)])
def test_sums_are_told_that_are_multiplied_by_too_much_for_a_mean(factor: float, is_told: bool) -> None:
    """Workers are two."""
    loss = factor * squares(nn.Linear(3, 2)(torch.ones(NUM_SAMPLES, 3))).sum()
    found = multiplied_sum_among(terms_in(loss, NUM_SAMPLES, 2), NUM_SAMPLES, 2)
    assert found == (factor if is_told else None)


@pytest.mark.parametrize(("given", "is_sum"), [(1.0, True), (0.5, True), (1 / NUM_SAMPLES, False)])
def test_sums_by_given_gradients(given: float, is_sum: bool) -> None:
    model = nn.Linear(3, NUM_SAMPLES)
    watch = SummedLoss(list(model.parameters()), rank=1, size=2, num_samples=lambda: NUM_SAMPLES)
    losses = squares(model(torch.ones(NUM_SAMPLES, 3))).mean(1)
    try:
        with pytest.raises(UsageError, match=r"backward\(ones\)") if is_sum else nullcontext():
            losses.backward(torch.full_like(losses, given))
    finally:
        watch.close()
