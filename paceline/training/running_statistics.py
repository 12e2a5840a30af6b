"""Batch norm's running statistics of a model that is the mean of several, which none of them has seen.

Its activations vary less than those of the models that it was made from: where these have learnt different things,
means cancel (Jordan et al., "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", ICLR 2023). So the
mean of the models' statistics is not the mean model's, the less so the further the models have come apart. As for
averages of weights (Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018,
section 3.2), statistics are taken anew, of what the mean model makes of batches.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.comm.base import Collective
from paceline.hooks import OwnHook
from paceline.seeding import preserved_random_state
from paceline.training.calls import is_transformed

NUM_BATCHES = 10
"""Of each worker, and no more than a round has."""
_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@final
@dataclass(frozen=True)
class _Given:
    """What a model's forward pass was given."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self._versions())

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has changed it in place since, such as a model that normalises its own input."""
        return self._versions() == self.versions

    def _versions(self) -> list[int]:
        tensors = [each for each in tree_leaves((self.inputs, self.named)) if isinstance(each, Tensor)]
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


@final
class RunningStatistics:
    """Keeps the last batches of a round, and takes statistics of what the mean model makes of them.

    Args:
        rounds: how many are over. No batch of an earlier one is kept, so that a run that goes on from a checkpoint
            finds what one that was never interrupted does.
    """

    def __init__(self, model: nn.Module, *, rounds: Callable[[], int]) -> None:
        self._model, self._rounds = model, rounds
        self._norms = [each for each in model.modules() if isinstance(each, _Norm) and each.running_mean is not None]
        self._trained: list[_Norm] = []  # those that are not frozen
        self._batches: deque[_Given] = deque(maxlen=NUM_BATCHES)
        self._round = -1
        self._restored: list[Tensor] = []  # those of the global model that this worker goes on from
        self._hook = model.register_forward_pre_hook(OwnHook(self._keep), with_kwargs=True) if self._norms else None

    def close(self) -> None:
        """Keep no batch from here on."""
        if self._hook is not None:
            self._hook.remove()
        self._batches.clear()

    def restore(self) -> None:
        """The model is the global one of a checkpoint, with its statistics, which hold until there are batches."""
        self._restored = [statistic.clone() for statistic in self._statistics]

    @contextmanager
    def of_mean(self, collective: Collective) -> Iterator[None]:
        """The model, which is the mean of all workers' with the mean of their statistics, has its own meanwhile.
        Collective call."""
        if not self._norms or collective.size == 1:
            yield
            return
        before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        own = set(map(id, self._statistics))
        try:
            num_seen = self._see_batches()
            _put_back([(buffer, value) for buffer, value in before if id(buffer) not in own])
            self._average(num_seen, collective)
            yield
        finally:
            _put_back(before)

    def _keep(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        if not model.training or is_transformed():
            return
        if self._round != (now := self._rounds()):
            self._batches.clear()
            self._round = now
        self._trained = [norm for norm in self._norms if norm.training]
        self._batches.append(_Given(*tree_map_only(Tensor, Tensor.detach, (tuple(inputs), dict(named)))))

    @torch.no_grad()
    def _see_batches(self) -> int:
        """Nothing but batch norm is as in training: statistics are to be of what the evaluated model normalises.
        Returns of how many batches they are."""
        batches = [batch for batch in self._batches if batch.is_unchanged]
        # What is on the model's calls, such as a clock, is not to hear of these, and nothing is compiled anew for them.
        forward = getattr(self._model, "_orig_mod", self._model).forward
        modes = {module: module.training for module in self._model.modules()}
        momenta = {norm: norm.momentum for norm in self._trained}
        self._model.eval()
        try:
            for norm in self._trained if batches else ():
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # all batches count alike
            with preserved_random_state():
                for batch in batches:
                    forward(*batch.inputs, **batch.named)
        finally:
            for norm, momentum in momenta.items():
                norm.momentum = momentum
            for module, mode in modes.items():
                module.training = mode
        return len(batches)

    def _average(self, num_seen: int, collective: Collective) -> None:
        """By how many batches workers have, in double precision: one who has just joined has none."""
        flat = torch.cat([statistic.double().view(-1) for statistic in self._statistics])
        sums = torch.cat([torch.ones_like(flat[:1]), flat]) * num_seen
        collective.all_reduce(sums, op="sum").wait()
        count = float(sums[0])
        means = (sums[1:] / count).split([each.numel() for each in self._statistics]) if count else self._restored
        if means:
            _put_back(list(zip(self._statistics, means, strict=True)))

    @property
    def _statistics(self) -> list[Tensor]:
        both = [each for norm in self._norms for each in (norm.running_mean, norm.running_var)]
        return [each for each in both if each is not None]


def _put_back(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in values:
        tensor.copy_(value)
