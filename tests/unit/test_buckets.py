"""Gradients that lie in a flat buffer, during backward."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.buckets import Computed, GradientBuckets, is_own_hook
from paceline.errors import UsageError
from paceline.layout import TensorSpec, by_group
from tests.unit.bucket_script import (
    DTYPES,
    Branches,
    Script,
    X,
    assert_gradients,
    backward,
    clear_to_none,
    mlp,
    reference,
)


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


def test_most_gradients_are_only_counted() -> None:
    """Three buckets of four: the first gradient begins the pass, and two fill a bucket that leaves before its end."""
    script = Script(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(12))), bucket_bytes=4 * 4 * 4 * 4)
    taken: list[int] = []
    take = script.buckets.take
    script.buckets.take = lambda index: (taken.append(index), take(index))  # type: ignore[method-assign, assignment]
    for _ in range(2):
        taken.clear()
        backward(script.model, torch.ones(1, 4))
        assert taken == [11, 8, 4]
    assert script.announced == [0, 1, 2, "end"] * 2


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


def test_sparse_gradients_are_what_dense_ones_would_be() -> None:
    """Rows that come twice, and a second pass before the step, add up."""
    table = nn.Embedding(10, 3)
    script = Script(nn.Embedding(10, 3, sparse=True, _weight=table.weight.detach().clone()))
    for keys in (torch.tensor([1, 2, 1]), torch.tensor([2, 9])):
        for model in (script.model, table):
            model(keys).square().sum().backward()
    assert script.model.weight.grad is script.buckets.views[0]
    assert torch.equal(script.model.weight.grad, table.weight.grad)


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


def test_what_tells_that_gradients_were_computed_keeps_no_model_alive_once_it_is_closed() -> None:
    model = nn.Linear(2, 1)
    computed = Computed([*model.parameters()])
    assert not computed
    for hook in (model.bias._post_accumulate_grad_hooks or {}).values():
        assert is_own_hook(hook)
    model(torch.ones(1, 2)).sum().backward()
    assert computed
    computed.clear()
    assert not computed
    model(torch.ones(1, 2)).sum().backward()
    assert computed
    computed.close()
    model(torch.ones(1, 2)).sum().backward()
    assert not computed, "nothing is heard from here on"
    weight = weakref.ref(model.weight)
    del model, hook
    gc.collect()
    assert weight() is None
