"""What a bucket says besides its gradients: which parameters have one, whether all are finite, whose turn it was."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from paceline.buckets import OutOfTurn
from paceline.layout import NUM_FLAGS
from tests.unit.bucket_script import DTYPES, Branches, Script, X, backward, mlp


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


def test_a_parameter_frozen_later_counts_as_unused() -> None:
    script = Script(mlp())
    script.model[0].weight.requires_grad_(False)
    backward(script.model, X)
    assert script.announced == script.whole_pass
    assert script.parameters[0].grad is None


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
