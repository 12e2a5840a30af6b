"""Gradients in buckets of which a script keeps the tensors, or what shares their memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.bucket_script import Script, X, assert_gradients, backward, clear_to_none, mlp, reference

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
    monkeypatch.setattr("paceline.gradient_views._swap", None)
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
