"""Handles of Horovod's operations, as scripts hold them."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, cast

import pytest
import torch

from paceline.horovod.channel import Channel
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.operation import Operation
from paceline.horovod.requests import ALLREDUCE, Request
from paceline.horovod.torch.operations import poll, synchronize


class Waiting:
    """In the place of a channel: waiting ends an operation, or does not."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def wait(self, operation: Operation) -> None:
        if self.error is not None:
            operation.is_over = isinstance(self.error, Exception)
            raise self.error
        operation.is_over = True

    def poll(self, operation: Operation) -> bool:
        return operation.is_over


def handle_of(tensor: torch.Tensor, error: BaseException | None = None) -> Operation:
    operation = Operation(Request(ALLREDUCE, "sum"), (tensor,), (tensor,))
    operation.channel = cast(Channel, Waiting(error))
    return operation


@pytest.mark.parametrize("what", [7, None, "sum"])
def test_what_is_no_handle_has_no_result_and_cannot_be_polled(what: Any) -> None:
    assert synchronize(what) is None
    with pytest.raises(ValueError, match="is no handle"):
        poll(what)


def test_a_handle_has_one_result() -> None:
    tensor = torch.ones(2)
    handle = handle_of(tensor)
    assert not poll(handle)
    assert synchronize(handle) is tensor
    assert synchronize(handle) is None
    with pytest.raises(ValueError, match="'sum' has been waited for"):
        poll(handle)
    assert "sum" in repr(handle)
    assert weakref.ref(handle)() is handle


def test_a_handle_that_failed_lets_go_of_its_tensors() -> None:
    tensor = torch.ones(2)
    handle = handle_of(tensor, HorovodInternalError("a rank is gone"))
    with pytest.raises(HorovodInternalError, match="a rank is gone"):
        synchronize(handle)
    assert (handle.tensors, handle.outputs, handle.result) == ((), (), ())


def test_an_operation_that_goes_on_after_an_interrupt_keeps_its_tensors() -> None:
    tensor = torch.ones(2)
    handle = handle_of(tensor, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        synchronize(handle)
    assert handle.tensors == (tensor,)


def test_one_of_two_threads_gets_the_result_wherever_the_other_comes_between() -> None:
    """The other one is let in before each of the interpreter's instructions in turn."""
    for moment in range(1000):
        tensor = torch.ones(2)
        handle, others = handle_of(tensor), list[Any]()
        result = _interrupted(handle, moment, lambda handle=handle, others=others: others.append(synchronize(handle)))
        if not others:
            break
        assert [each is tensor for each in (result, *others)].count(True) == 1, f"before instruction {moment}"
        assert [each is None for each in (result, *others)].count(True) == 1
    assert moment > 20


def _interrupted(handle: Operation, moment: int, other: Any) -> Any:
    """What `synchronize` returns, if another call happens before so many of its instructions."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code is not synchronize.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == moment:
                other()
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return synchronize(handle)
    finally:
        sys.settrace(before)
