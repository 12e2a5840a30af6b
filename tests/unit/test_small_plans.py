"""All-reduces of small tensors over shared memory, of one rank beside what others have put there."""

import gc
import weakref

import numpy as np
import pytest
import torch

from paceline.comm.base import ReduceOp
from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.plans import _SmallPlan
from paceline.comm.signature import Signature


def plan_of(others: torch.Tensor, op: ReduceOp = "mean") -> _SmallPlan:
    signature = Signature("all_reduce", others.dtype, others.numel(), op)
    return _SmallPlan([[torch.zeros_like(others), others]], 0, signature, Reduction(op, others.dtype), op)


@pytest.mark.parametrize("own", [1.4e-45, 3e38, float("inf")])
def test_what_the_script_has_numpy_do_is_not_ours(own: float) -> None:
    """Nor does the script get to see another setting."""
    tensor = torch.tensor([own])
    step = plan_of(tensor.clone(), "sum" if own == 3e38 else "mean").step(tensor, is_watched=True)
    assert step.load is not None
    assert step.exchange is not None
    with np.errstate(all="raise"):
        step.load(0)
        found = step.exchange(0)
        assert np.geterr()["under"] == "raise"
    assert (found is not None) == (own != 1.4e-45)


def test_a_plan_that_nobody_has_is_gone_at_once() -> None:
    """It holds all ranks' staging, which its collective lets go of as it closes."""
    gc.disable()
    try:
        plan = plan_of(torch.ones(3))
        plan.step(torch.ones(3), is_watched=False)
        left = weakref.ref(plan)
        del plan
        assert left() is None
    finally:
        gc.enable()
