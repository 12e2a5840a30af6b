"""Gradients that lie in a flat buffer, during backward."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.buckets import GradientBuckets, OutOfTurn
from paceline.errors import UsageError
from paceline.layout import NUM_FLAGS, TensorSpec, by_group, in_buckets

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Script:
    """A model with its buckets, and what they announced."""

    def __init__(self, model: nn.Module, *, bucket_bytes: int = 100) -> None:
        self.model = model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.names = list(named)
        specs = [TensorSpec(n, tuple(p.shape), p.dtype) for n, p in named.items()]
        layout = in_buckets(specs, bucket_bytes=bucket_bytes)
        self.announced: list[int | str] = []
        self.buckets = GradientBuckets(
            self.parameters,
            layout,
            torch.zeros(layout.num_bytes, dtype=torch.uint8),
            on_bucket=self.announced.append,
            on_backward_end=lambda: self.announced.append("end"),
        )

    @property
    def whole_pass(self) -> list[int | str]:
        return [*range(len(self.buckets.buckets)), "end"]

    def are_views(self) -> bool:
        return all(p.grad is view for p, view in zip(self.parameters, self.buckets.views, strict=True))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).sum().backward()


def reference(*inputs: Tensor) -> list[Tensor]:
    """Gradients of a model without buckets, summed over the inputs."""
    model = mlp()
    for x in inputs:
        backward(model, x)
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_gradients(script: Script, expected: Sequence[Tensor]) -> None:
    assert script.are_views()
    for view, value in zip(script.buckets.views, expected, strict=True):
        torch.testing.assert_close(view, value, rtol=1e-6, atol=1e-7)


X = torch.linspace(-1, 1, 6).view(2, 3)


def clear_to_none(script: Script) -> None:
    script.model.zero_grad(set_to_none=True)


def clear_to_zero(script: Script) -> None:
    script.model.zero_grad(set_to_none=False)


def clear_by_hand(script: Script) -> None:
    for parameter in script.parameters:
        parameter.grad = None


def clear_to_a_tensor_of_its_own(script: Script) -> None:
    for parameter in script.parameters:
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("clear", [clear_to_none, clear_to_zero, clear_by_hand, clear_to_a_tensor_of_its_own])
def test_gradients_are_views_however_they_were_cleared(clear: Callable[[Script], None]) -> None:
    script = Script(mlp())
    for scale in (1.0, 2.0, 3.0):
        clear(script)
        backward(script.model, X * scale)
        assert_gradients(script, reference(X * scale))
        # The buckets hold them too: what is sent is what the optimizer sees.
        assert script.buckets.buckets[0].flat.data_ptr() == script.parameters[-1].grad.data_ptr()
    assert script.announced == script.whole_pass * 3


KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "its data": lambda gradient: gradient.data,
    "a part": lambda gradient: gradient[:1],
}


@pytest.mark.parametrize("how", KEEP)
def test_gradients_that_a_script_has_kept_stay_what_they_were(how: str) -> None:
    script = Script(mlp())
    kept, expected = [], []
    for scale in (1, 2, 3):
        clear_to_none(script)
        backward(script.model, scale * X)
        assert_gradients(script, reference(scale * X))
        kept += [KEEP[how](parameter.grad) for parameter in script.parameters]
        expected += map(KEEP[how], reference(scale * X))
    for gradient, before in zip(kept, expected, strict=True):
        torch.testing.assert_close(gradient, before, rtol=1e-6, atol=1e-7)
    assert script.buckets.buckets[0].flat.data_ptr() == script.parameters[-1].grad.data_ptr()


def test_a_kept_gradient_moves_where_torch_cannot_swap_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.buckets._swap", None)
    test_gradients_that_a_script_has_kept_stay_what_they_were("itself")


def test_a_gradient_can_be_detached_in_place() -> None:
    """As old scripts zero gradients."""
    script = Script(mlp())
    for _ in range(2):
        backward(script.model, X)
        assert_gradients(script, reference(X))
        for parameter in script.parameters:
            parameter.grad.detach_()
            parameter.grad.zero_()


def test_what_shares_a_kept_gradients_memory_goes_on_sharing_it() -> None:
    script = Script(mlp())
    backward(script.model, X)
    kept, part = script.parameters[0].grad.detach(), script.parameters[0].grad[0]
    array = script.parameters[1].grad.numpy()
    clear_to_none(script)
    backward(script.model, 2 * X)
    kept.zero_()
    assert not part.any()
    assert_gradients(script, reference(2 * X))
    del script
    gc.collect()
    assert np.isfinite(array).all()  # which shows the next gradients, and stays memory


def test_gradients_that_nobody_keeps_do_not_move() -> None:
    script = Script(mlp())
    for _ in range(3):
        storages = [view.untyped_storage()._cdata for view in script.buckets.views]
        clear_to_none(script)
        backward(script.model, X)
        assert [view.untyped_storage()._cdata for view in script.buckets.views] == storages


def test_gradients_accumulate_over_two_backward_passes() -> None:
    script = Script(mlp())
    backward(script.model, X)
    backward(script.model, 2 * X)
    assert_gradients(script, reference(X, 2 * X))
    assert script.announced == script.whole_pass * 2


def test_without_synchronizing_nothing_is_announced_and_gradients_accumulate() -> None:
    script = Script(mlp())
    script.buckets.is_synchronizing = False
    backward(script.model, X)
    backward(script.model, 3 * X)
    assert script.announced == []
    script.buckets.is_synchronizing = True
    backward(script.model, 2 * X)
    assert_gradients(script, reference(X, 3 * X, 2 * X))
    assert script.announced == script.whole_pass


def test_gradients_are_final_when_their_bucket_is_announced() -> None:
    script = Script(mlp())
    expected = reference(X)
    seen: list[bool] = []

    def look(bucket: int) -> None:
        slots = script.buckets.layout.segments[bucket].slots
        seen.append(all(torch.allclose(script.buckets.views[slot.index], expected[slot.index]) for slot in slots))

    script.buckets._on_bucket = look
    backward(script.model, X)
    assert seen == [True] * len(script.buckets.buckets)


def test_buckets_are_announced_during_backward() -> None:
    """The first bucket leaves before the first layer's gradient is computed."""
    script = Script(mlp())
    order: list[str] = []
    script.buckets._on_bucket = lambda bucket: order.append(f"bucket {bucket}")
    script.parameters[0].register_hook(lambda gradient: order.append("first layer"))
    backward(script.model, X)
    assert order.index("bucket 0") < order.index("first layer")


class Branches(nn.Module):
    """Heads that are added up in an order that each call chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 7) for _ in range(6))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        total = torch.zeros(())
        for index in order:
            total = self.heads[index](x + total).tanh().sum()
        return total


@given(seed=st.integers(0, 2**32))
def test_the_order_of_buckets_does_not_depend_on_that_of_gradients(seed: int) -> None:
    script = Script(Branches(), bucket_bytes=1)
    order = list(range(6))
    random.Random(seed).shuffle(order)
    script.model(X, order).backward()
    assert script.announced == script.whole_pass
    assert script.are_views()


def test_a_bucket_without_any_gradient_is_announced_all_the_same() -> None:
    script = Script(Branches(), bucket_bytes=1)
    for order in ([0], [5], [2, 4]):
        script.announced.clear()
        script.model.zero_grad()
        script.model(X, order).backward()
        assert script.announced == script.whole_pass
        used = {2 * index + i for index in order for i in (0, 1)}
        assert [p.grad is not None for p in script.parameters] == [i in used for i in range(12)]


def test_flags_tell_which_parameters_have_gradients() -> None:
    script = Script(Branches(), bucket_bytes=10**6)
    script.model(X, [1, 3]).backward()
    buckets = script.buckets
    first, *_, last = sorted(view.data_ptr() for view in buckets.views)
    flat = buckets.buckets[0].flat
    assert first == flat.data_ptr() < last < flat.data_ptr() + flat.nbytes
    buckets.views[0].fill_(99.0)  # stale: the parameter has no gradient
    buckets.adopt(0)
    buckets.fill_flags(0, stop=True, nonfinite=False)
    assert buckets.views[0].eq(0).all(), "a parameter without a gradient gives zeros"
    assert buckets.read_flags(0) == (False, True)
    assert [p.grad is not None for p in script.parameters] == [i in (2, 3, 6, 7) for i in range(12)]
    # What another rank added: it had a gradient for parameter 0, and one that was not finite.
    tail = buckets.buckets[0].flat[-buckets.layout.segments[0].tail :]
    tail[0] = 0.5
    position = [slot.index for slot in buckets.layout.segments[0].slots].index(0)
    tail[NUM_FLAGS + position] = 0.5
    buckets.views[0].fill_(0.25)
    assert buckets.read_flags(0) == (True, True)
    assert script.parameters[0].grad is buckets.views[0]
    tail[NUM_FLAGS + position] = 0.0
    buckets.read_flags(0)
    assert script.parameters[0].grad is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("nonfinite", [False, True])
def test_tails_round_trip_in_every_dtype(dtype: torch.dtype, stop: bool, nonfinite: bool) -> None:
    script = Script(nn.Linear(3, 3).to(dtype))
    for index, parameter in enumerate(script.parameters):
        parameter.grad = torch.full_like(parameter, index + 1)
    script.buckets.adopt(0)
    script.buckets.fill_flags(0, stop=stop, nonfinite=nonfinite)
    assert script.buckets.read_flags(0) == (nonfinite, stop)
    assert [view.unique().tolist() for view in script.buckets.views] == [[1.0], [2.0]], "flags lie apart"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("turns", "differ"), [((2, 2, 2), False), ((1, 2, 3), True), ((1, 1, 2), True), ((-1, -1), False)]
)
def test_every_rank_finds_that_turns_differ(dtype: torch.dtype, turns: tuple[int, ...], differ: bool) -> None:
    """Also one whose own turn is the mean of all."""
    scripts = [Script(nn.Linear(3, 3).to(dtype), bucket_bytes=10**6) for _ in turns]
    for script in scripts:
        for parameter in script.parameters:
            parameter.grad = torch.zeros_like(parameter)
        script.buckets.adopt(0)
    flags = [script.buckets.buckets[0].flags for script in scripts]
    for script, turn in zip(scripts, turns, strict=True):
        script.buckets.fill_flags(0, stop=False, nonfinite=False, turn=turn)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    mean = torch.stack([each.to(wide) for each in flags]).mean(0)
    for script, each in zip(scripts, flags, strict=True):
        each.copy_(mean)
        with pytest.raises(OutOfTurn) if differ else nullcontext():
            script.buckets.read_flags(0)


def test_shared_parameters_are_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    torch.manual_seed(1)
    script, plain = Script(Tied()), Tied()
    plain.load_state_dict(script.model.state_dict())
    for _ in range(2):
        backward(script.model, X)
        backward(plain, X)
    assert len(script.parameters) == 1
    assert_gradients(script, [plain.first.weight.grad])
    assert script.announced == script.whole_pass * 2


def test_frozen_parameters_are_left_alone() -> None:
    model = mlp()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    script = Script(model)
    backward(model, X)
    expected = reference(X)
    assert_gradients(script, [expected[i] for i in (0, 1, 4, 5)])
    assert model[2].weight.grad is None
    assert script.announced == script.whole_pass


def test_a_parameter_frozen_later_counts_as_unused() -> None:
    script = Script(mlp())
    script.model[0].weight.requires_grad_(False)
    backward(script.model, X)
    assert script.announced == script.whole_pass
    assert script.parameters[0].grad is None


def test_mixed_dtypes_lie_in_buckets_of_their_own() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3).to(dtype) for dtype in DTYPES * 2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype)).tanh()
            return x.float()

    torch.manual_seed(2)
    script, plain = Script(Mixed(), bucket_bytes=40), Mixed()
    plain.load_state_dict(script.model.state_dict())
    for _ in range(2):
        script.model.zero_grad()
        plain.zero_grad()
        backward(script.model, X)
        backward(plain, X)
        assert script.are_views()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(script.parameters, plain.parameters(), strict=True))
    assert script.announced == script.whole_pass * 2


def test_only_on_bucket_or_only_on_backward_end() -> None:
    for only in ("on_bucket", "on_backward_end"):
        model = mlp()
        layout = by_group([TensorSpec(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()])
        calls: list[tuple[int, ...]] = []
        buckets = GradientBuckets(
            list(model.parameters()),
            layout,
            torch.zeros(layout.num_bytes, dtype=torch.uint8),
            **{only: lambda *arguments, calls=calls: calls.append(arguments)},
        )
        backward(model, X)
        backward(model, X)
        assert calls == ([(0,)] if only == "on_bucket" else [()]) * 2
        buckets.close()


def test_buckets_that_nobody_uses_are_freed_with_their_parameters() -> None:
    model = mlp()
    layout = by_group([TensorSpec(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()])
    buckets = GradientBuckets(list(model.parameters()), layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    backward(model, X)
    left = [weakref.ref(model), weakref.ref(buckets)]
    del model, buckets
    gc.collect()
    assert [each() for each in left] == [None, None]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_history_is_refused() -> None:
    script = Script(mlp())
    with pytest.raises(UsageError, match=r"gradient of '.*' has a history.*autograd\.grad\(\.\.\., create_graph=True"):
        script.model(X).pow(2).sum().backward(create_graph=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parameter_with_a_non_finite_gradient_is_named(bad: float, dtype: torch.dtype) -> None:
    script = Script(mlp().to(dtype), bucket_bytes=10**6)
    for index, parameter in enumerate(script.parameters):
        for other in script.parameters:
            other.grad = torch.ones_like(other)
        assert parameter.grad is not None
        parameter.grad.view(-1)[-1] = bad
        script.buckets.adopt(0)
        script.buckets.fill_flags(0, stop=True, nonfinite=True)
        assert script.buckets.find_nonfinite(0) == script.names[index]
    assert script.parameters[-1].grad is script.buckets.views[-1]


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float32, 3e38), (torch.float64, 1.7e308), (torch.float16, 65504.0)]
)
def test_a_sum_that_overflows_is_not_taken_for_a_non_finite_gradient(dtype: torch.dtype, large: float) -> None:
    script = Script(mlp().to(dtype), bucket_bytes=10**6)
    for parameter in script.parameters:
        parameter.grad = torch.full_like(parameter, large)
    script.buckets.adopt(0)
    script.buckets.fill_flags(0, stop=False, nonfinite=False)
    assert script.buckets.find_nonfinite(0) is None


def test_infinities_of_both_signs_do_not_cancel() -> None:
    script = Script(mlp(), bucket_bytes=10**6)
    for parameter in script.parameters:
        parameter.grad = torch.zeros_like(parameter)
    script.parameters[2].grad.view(-1)[:2] = torch.tensor([math.inf, -math.inf])
    script.buckets.adopt(0)
    script.buckets.fill_flags(0, stop=False, nonfinite=False)
    assert script.buckets.find_nonfinite(0) == "2.weight"


def test_a_sparse_gradient_is_refused_by_name() -> None:
    script = Script(nn.Embedding(10, 3, sparse=True))
    with pytest.raises(UsageError, match=r"'weight' has a sparse gradient.*sparse=False"):
        script.model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_activations_change_nothing(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.layers[4](checkpoint(self.layers[:4], x, use_reentrant=use_reentrant))

    script = Script(Checkpointed())
    for _ in range(2):
        script.model.zero_grad()
        backward(script.model, X)
        assert_gradients(script, reference(X))
    assert script.announced == script.whole_pass * 2


class Broken(torch.autograd.Function):
    """Its backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError


def test_a_backward_pass_after_a_failed_one_is_refused() -> None:
    script = Script(mlp())
    with pytest.raises(MemoryError):
        script.model[2:](Broken.apply(script.model[:2](X))).sum().backward()
    with pytest.raises(UsageError, match="or the one before it failed"):
        backward(script.model, X)


def test_flush_announces_what_no_backward_pass_did() -> None:
    script = Script(mlp())
    script.buckets.flush()
    assert script.announced == script.whole_pass[:-1]
    backward(script.model, X)
    assert script.announced == script.whole_pass[:-1] + script.whole_pass


def test_closing_takes_the_hooks_off() -> None:
    script = Script(mlp())
    script.buckets.close()
    backward(script.model, X)
    assert script.announced == []
    assert not any(p.grad is view for p, view in zip(script.parameters, script.buckets.views, strict=True))
