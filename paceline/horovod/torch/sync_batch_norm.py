"""Batch normalisation over the batches of all ranks together."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.horovod import runtime as basics
from paceline.horovod.torch.collectives import allreduce
from paceline.horovod.torch.operations import Sum


class SyncBatchNorm(_BatchNorm):
    """As `torch.nn.BatchNorm`, with mean and variance of all ranks' samples in training. Collective call in training.

    Input: (N, C, ...); N may differ between ranks.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        is_training = self.training or self.running_mean is None
        if not is_training or basics.runtime().size == 1:
            return self._alone(input, is_training=is_training)
        others = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // input.shape[1]
        wide = input.float() if input.dtype.itemsize < 4 else input  # half precision cannot even count so far
        sums = torch.cat([wide.sum(others), wide.new_tensor([count])])
        reduced = allreduce(sums, op=Sum)
        total = reduced[-1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        mean = reduced[:-1] / total
        centred = wide - mean.view(shape)
        variance = allreduce(centred.square().sum(others), op=Sum) / total
        self._keep(mean, variance, float(total))
        result: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _alone(self, input: Tensor, *, is_training: bool) -> Tensor:
        momentum = self._next_momentum() if self.training and self.track_running_stats else 0.0
        return batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, is_training, momentum, self.eps
        )

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        momentum = self._next_momentum()
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), momentum)

    def _next_momentum(self) -> float:
        batches: Any = self.num_batches_tracked
        if batches is not None:
            batches.add_(1)
        return 1.0 / float(batches) if self.momentum is None else self.momentum
