"""A worker's clock moves on as its model computes: forward when it is called, backward gradient by gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from paceline.engines.virtual.cluster import Compute
from paceline.engines.virtual.compute import ComputeTimes, StepCost
from paceline.engines.virtual.flops import ForwardCount
from paceline.engines.virtual.process import Process
from paceline.errors import UsageError
from paceline.strategies.base import Replica


class ForwardListener(Protocol):
    """Who has to know what a worker is at."""

    def begin_forward(self, until_s: float | None) -> None: ...

    def end_forward(self) -> None: ...


@final
class Pace:
    """Takes virtual time for what a prepared model computes.

    The backward pass takes its time in parts, one when each parameter's gradient is ready, so that a bucket is full
    when the layers whose gradients it holds would be done.

    Args:
        compute: how long that is, and what part of it each gradient takes.
        before_step: called when a step's computing begins; may raise to end the worker.
        on_forward: told that a forward pass begins, and when it will end if that is known; and that it has ended.
    """

    def __init__(
        self,
        process: Process,
        times: ComputeTimes,
        cost: StepCost,
        *,
        compute: Compute,
        before_step: Callable[[], None],
        on_forward: ForwardListener | None = None,
    ) -> None:
        self._process, self._times, self._cost = process, times, cost
        self._compute, self._before_step, self._on_forward = compute, before_step, on_forward
        self._replica: Replica | None = None
        self._count: ForwardCount | None = None
        self._given_shares: list[float] = []
        self._shares: list[float] = []
        self._flop_per_sample = 0.0
        self._forward_s: float | None = None  # of the forward pass under way, once it is known
        self._backward_s: float | None = None  # of a backward pass through what was computed last
        self._left_s = 0.0  # of the backward pass under way
        self._in_backward = False

    def watch(self, replica: Replica) -> None:
        """Be told of what this model computes; before anyone else is, so that the clock is right when they are.

        Raises:
            UsageError: the cluster was measured with another model.
        """
        self._given_shares = list(self._compute.shares_of(len(replica.parameters)))
        self._replica = replica
        replica.model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        replica.model.register_forward_hook(self._end_forward, with_kwargs=True)
        for index, parameter in enumerate(replica.parameters):
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))

    def _begin_forward(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        self._before_step()
        if self._shares:  # then it is known what this pass takes
            self._forward_s = self._draw(_num_samples((*inputs, *named.values())))
        elif self._replica is not None:
            self._count = ForwardCount(model, self._replica.parameters)
        if self._on_forward is not None:
            forward_s = self._forward_s
            self._on_forward.begin_forward(None if forward_s is None else self._process.now_s + forward_s)

    def _end_forward(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], output: object) -> None:
        num_samples = _num_samples((*inputs, *named.values()))
        if self._count is not None:
            self._count.end(output)
            self._shares = self._given_shares or self._count.shares()
            self._flop_per_sample = self._count.flop / num_samples
            self._count = None
        forward_s = self._forward_s if self._forward_s is not None else self._draw(num_samples)
        self._forward_s = None
        self._process.advance(forward_s)
        if self._on_forward is not None:
            self._on_forward.end_forward()

    def _draw(self, num_samples: int) -> float:
        """How long the passes take; returns what of it is the forward pass."""
        mean_s = self._cost.seconds(num_samples=num_samples, forward_flop=self._flop_per_sample * num_samples)
        if not torch.is_grad_enabled():
            return mean_s * (1 - self._compute.backward_share)
        step_s = self._times.draw(mean_s)
        self._backward_s = step_s * self._compute.backward_share
        return step_s - self._backward_s

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            if not self._in_backward:
                self._begin_backward()
            part_s = min(self._left_s, self._backward_time_s() * self._shares[index])
            self._left_s -= part_s
            self._process.advance(part_s)

        return on_gradient

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._left_s = self._backward_time_s()
        # Called before those that are asked for after this: gradients are exchanged when all of them are computed.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._process.advance(self._left_s)
        self._left_s = 0.0

    def _backward_time_s(self) -> float:
        """
        Raises:
            UsageError: the prepared model was never called itself.
        """
        if self._backward_s is None:
            raise UsageError(
                "the virtual engine takes time when the prepared model is called, and the script computes gradients "
                "without calling it; call model(...) rather than its parts"
            )
        return self._backward_s


def _num_samples(inputs: Sequence[Any]) -> int:
    """Of a batch: the first dimension of the first tensor."""
    for value in inputs:
        if isinstance(value, Tensor) and value.dim():
            return max(1, value.shape[0])
    return 1
