"""A worker's clock moves on as its model computes: forward when it is called, backward gradient by gradient."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.buckets import when_gradient_is_ready
from paceline.cluster.description import Compute
from paceline.engines.virtual.computing.durations import ComputeTimes, StepCost
from paceline.engines.virtual.computing.flops import ForwardCount
from paceline.engines.virtual.process import Process, Signal
from paceline.errors import UsageError
from paceline.hooks import OwnHook
from paceline.strategies.pacing import Pacing
from paceline.strategies.replica import Replica, named_parameters_of
from paceline.strategies.several import models_of


@final
class Pace(Pacing):
    """Takes virtual time for what prepared models compute. `before_step` may raise to end the worker; `send` has so
    many bytes on their way to the first worker's host, and calls back when they have come."""

    is_simulated = True

    def __init__(
        self,
        process: Process,
        times: ComputeTimes,
        cost: StepCost,
        *,
        compute: Compute,
        before_step: Callable[[], None],
        send: Callable[[float, Callable[[], object]], None],
        operation_s: float = 0.0,
    ) -> None:
        self._process, self._cost, self._send = process, cost, send
        self.operation_s = operation_s
        self._model_pace = partial(_ModelPace, process, times, cost, compute=compute, before_step=before_step)
        self._shares_of = compute.shares_of

    def now_s(self) -> float:
        return self._process.catch_up()

    def spend(self, seconds: float) -> None:
        self._process.compute(self._cost.on_this_host_s(seconds))
        self._process.catch_up()

    def rest(self, seconds: float) -> None:
        self._process.advance(seconds)

    def carry(self, num_bytes: float) -> float:
        began_s, arrived = self._process.catch_up(), Signal()
        self._process.post(self._send, num_bytes, partial(arrived.fire, self._process.timeline))
        self._process.wait(arrived, lambda: "a client's change to come to the server")
        return self._process.now_s - began_s

    def watch(self, replica: Replica) -> None:
        """Hook the models before anyone else does, so that the clock is right when other hooks are called. Raises
        UsageError if the cluster was measured with another model."""
        shares, models = self._shares_of(len(replica.parameters)), models_of(replica.model)
        owners = {id(p): model for model in reversed(models) for _, p in named_parameters_of(model)}
        for model in models:
            parameters = [parameter for parameter in replica.parameters if owners[id(parameter)] is model]
            self._model_pace(model, parameters, given_shares=shares if len(models) == 1 else ())


@final
class _ModelPace:
    """What one model takes.

    The backward pass takes its time in parts, one as each parameter's gradient is ready. So a bucket is full when the
    layers whose gradients it holds would be done.
    """

    def __init__(
        self,
        process: Process,
        times: ComputeTimes,
        cost: StepCost,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        compute: Compute,
        before_step: Callable[[], None],
        given_shares: Sequence[float],
    ) -> None:
        self._process, self._times, self._cost = process, times, cost
        self._settings, self._before_step = compute, before_step
        self._parameters, self._given_shares = parameters, list(given_shares)
        self._count: ForwardCount | None = None
        self._shares: list[float] | None = None  # of the backward pass, by parameter, once a forward pass was counted
        self._flop_per_sample, self._num_calls = 0.0, 0
        self._backward_s: float | None = None  # of a backward pass through what was computed last
        self._left_s = 0.0  # of the backward pass under way
        self._in_backward = False
        # Time passes outside of what a script has compiled.
        begin, end, leave = map(torch.compiler.disable, (self._begin_forward, self._end_forward, self._leave_forward))
        model.register_forward_pre_hook(OwnHook(begin), with_kwargs=True)
        model.register_forward_hook(OwnHook(end), with_kwargs=True)
        model.register_forward_hook(OwnHook(leave), always_call=True)
        for index, parameter in enumerate(parameters):
            when_gradient_is_ready(parameter, self._on_gradient, index)

    def _begin_forward(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Let its time pass before it asks servers for rows, since most of it is what scripts do before a lookup. In
        the first pass, whose operations are yet to be counted, it passes at the end."""
        self._before_step()
        if self._shares is None:
            self._count = ForwardCount(model, self._parameters)
        else:
            self._process.compute(self._draw(_num_samples((*inputs, *named.values()))))

    def _end_forward(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], output: object) -> None:
        if self._count is None:
            return
        num_samples = _num_samples((*inputs, *named.values()))
        self._count.end(output)
        self._shares = self._given_shares or self._count.shares()
        self._flop_per_sample, self._num_calls = self._count.flop / num_samples, self._count.num_calls
        self._count = None
        self._process.compute(self._draw(num_samples))

    def _leave_forward(self, model: nn.Module, inputs: object, output: object) -> None:
        """Stop counting, also where the pass has failed: it would go on in this process's other runs."""
        if self._count is not None:
            self._count.close()
            self._count = None

    def _draw(self, num_samples: int) -> float:
        """Draw how long the passes over a batch take; returns the forward pass's part, in seconds."""
        is_training = torch.is_grad_enabled()
        forward_flop = self._flop_per_sample * num_samples
        mean_s = self._cost.seconds(
            num_samples=num_samples,
            forward_flop=forward_flop,
            forward_calls=self._num_calls,
            is_training=is_training,
        )
        if not is_training:
            return mean_s * (1 - self._settings.backward_share)
        step_s = self._times.draw(mean_s)
        self._backward_s = step_s * self._settings.backward_share
        return step_s - self._backward_s

    def _on_gradient(self, index: int) -> None:
        if not self._in_backward:
            self._begin_backward()
        part_s = min(self._left_s, self._backward_time_s() * (self._shares or [])[index])
        self._left_s -= part_s
        self._process.compute(part_s)

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._left_s = self._backward_time_s()
        # Strategies ask for their callbacks after this one, so they exchange gradients once all are computed.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._process.compute(self._left_s)
        self._left_s = 0.0
        self._process.catch_up()

    def _backward_time_s(self) -> float:
        """Raises UsageError if the prepared model was never called itself."""
        if self._backward_s is None:
            raise UsageError(
                "the virtual engine takes time when the prepared model is called, and the script computes gradients "
                "without calling it; call model(...) rather than its parts"
            )
        return self._backward_s


def _num_samples(inputs: Sequence[Any]) -> int:
    """How many samples a batch has: the first dimension of its first tensor; 1 if it has none."""
    for value in inputs:
        if isinstance(value, Tensor) and value.dim():
            return max(1, value.shape[0])
    return 1
