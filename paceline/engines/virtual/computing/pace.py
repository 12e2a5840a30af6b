"""A worker's clock moves on as its model computes: forward when it is called, backward gradient by gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from paceline.cluster.description import Compute
from paceline.engines.virtual.computing.durations import ComputeTimes, StepCost
from paceline.engines.virtual.computing.flops import ForwardCount
from paceline.engines.virtual.process import Process
from paceline.errors import UsageError
from paceline.strategies.replica import Replica


class PromiseListener(Protocol):
    """Who has to know how long a worker exchanges nothing."""

    def __call__(self, until_s: float, *, may_leave: bool) -> None:
        """Called before anything of a step is computed.

        Args:
            may_leave: others may be computed before this one goes on.
        """


@final
class Pace:
    """Takes virtual time for what a prepared model computes.

    The backward pass takes its time in parts, one when each parameter's gradient is ready, so that a bucket is full
    when the layers whose gradients it holds would be done.

    Args:
        compute: how long that is, and what part of it each gradient takes.
        before_step: called when a step's computing begins; may raise to end the worker.
        on_promise: told of the worker's promises.
    """

    def __init__(
        self,
        process: Process,
        times: ComputeTimes,
        cost: StepCost,
        *,
        compute: Compute,
        before_step: Callable[[], None],
        on_promise: PromiseListener | None = None,
    ) -> None:
        self._process, self._times, self._cost = process, times, cost
        self._settings, self._before_step, self._on_promise = compute, before_step, on_promise
        self._replica: Replica | None = None
        self._count: ForwardCount | None = None
        self._given_shares: list[float] = []
        self._shares: list[float] = []
        self._flop_per_sample = 0.0
        self._forward_s: float | None = None  # of the forward pass under way, once it is known
        self._backward_s: float | None = None  # of a backward pass through what was computed last
        self._left_s = 0.0  # of the backward pass under way
        self._in_backward = False
        self._asked_samples: int | None = None  # of a batch of which nothing has been computed yet
        self._next_samples: int | None = None  # of the batch after that
        self._has_other_passes = False  # than one for each batch
        self._is_as_asked = True  # whether the last batch was computed as a whole
        self._has_begun = False  # whether the next step has, with a batch
        self._has_forward = False  # whether there was one that no backward pass has followed

    def watch(self, replica: Replica) -> None:
        """Be told of what this model computes; before anyone else is, so that the clock is right when they are.

        Raises:
            UsageError: the cluster was measured with another model.
        """
        self._given_shares = list(self._settings.shares_of(len(replica.parameters)))
        self._replica = replica
        replica.model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        replica.model.register_forward_hook(self._end_forward, with_kwargs=True)
        for index, parameter in enumerate(replica.parameters):
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))

    def begin_batch(self, num_samples: int, next_samples: int | None) -> None:
        """The script asks for its next batch, of so many samples, to train on.

        Args:
            next_samples: of the one that will be asked for right after its step, if one will.

        Scripts enter contexts of the thread's or the process's around a forward pass; here none is to be expected.
        """
        if not self._process.is_running or not torch.is_grad_enabled():
            return  # a thread of the script's asks, or it is not trained on
        self._asked_samples, self._next_samples = num_samples, next_samples
        if self._is_as_asked:
            self._has_begun = True
            self._begin_step(num_samples, may_leave=True)

    def _begin_step(self, num_samples: int, *, may_leave: bool) -> None:
        least_s = self._times.at_least(self._mean_s(num_samples)) if self._shares else None
        if least_s is not None and self._asked_samples is None:  # it may not be trained on
            least_s *= 1 - self._settings.backward_share
        until_s = self._process.promise.begin(self._process.now_s, least_s)
        if until_s is not None and self._on_promise is not None:
            self._on_promise(until_s, may_leave=may_leave)

    def _note_forward(self, num_samples: int) -> None:
        """What is computed next belongs to a step, which this begins where no batch has."""
        if self._has_forward:  # of this step, too, whose time is then nobody knows what
            self._process.promise.give_up()
        elif not self._has_begun:
            self._has_other_passes = True
            self._begin_step(num_samples, may_leave=False)
        if self._asked_samples is not None:
            self._is_as_asked = self._asked_samples == num_samples
        self._has_begun, self._has_forward, self._asked_samples = False, True, None

    def _begin_forward(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        self._before_step()
        num_samples = _num_samples((*inputs, *named.values()))
        if torch.is_grad_enabled():
            self._note_forward(num_samples)
        if self._shares:  # then it is known what this pass takes
            self._forward_s = self._draw(num_samples)
        elif self._replica is not None:
            self._count = ForwardCount(model, self._replica.parameters)

    def _end_forward(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], output: object) -> None:
        num_samples = _num_samples((*inputs, *named.values()))
        if self._count is not None:
            self._count.end(output)
            self._shares = self._given_shares or self._count.shares()
            self._flop_per_sample = self._count.flop / num_samples
            self._count = None
        forward_s = self._forward_s if self._forward_s is not None else self._draw(num_samples)
        self._forward_s = None
        if torch.is_grad_enabled():
            self._compute(forward_s)
        else:
            self._process.advance(forward_s)

    def _draw(self, num_samples: int) -> float:
        """How long the passes take; returns what of it is the forward pass."""
        mean_s = self._mean_s(num_samples)
        if not torch.is_grad_enabled():
            return mean_s * (1 - self._settings.backward_share)
        step_s = self._times.draw(mean_s)
        self._process.promise.takes(step_s)
        self._process.promise.next_step_s = self._next_step_s()
        self._backward_s = step_s * self._settings.backward_share
        return step_s - self._backward_s

    def _next_step_s(self) -> float | None:
        """What the next batch takes to compute at least, if nothing else is computed before."""
        if self._next_samples is None or not self._is_as_asked or self._has_other_passes:
            return None
        return self._times.at_least(self._mean_s(self._next_samples))

    def _mean_s(self, num_samples: int) -> float:
        return self._cost.seconds(num_samples=num_samples, forward_flop=self._flop_per_sample * num_samples)

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            if not self._in_backward:
                self._begin_backward()
            part_s = min(self._left_s, self._backward_time_s() * self._shares[index])
            self._left_s -= part_s
            self._compute(part_s)

        return on_gradient

    def _begin_backward(self) -> None:
        self._in_backward, self._has_forward = True, False
        self._left_s = self._backward_time_s()
        # Called before those that are asked for after this: gradients are exchanged when all of them are computed.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._compute(self._left_s)
        self._left_s = 0.0

    def _compute(self, duration_s: float) -> None:
        """A part of a training step."""
        self._process.advance(duration_s)
        self._process.promise.computed(duration_s)

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
