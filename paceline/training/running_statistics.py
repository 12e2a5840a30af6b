"""Batch norm's running statistics of a model that is the mean of several, which none of them has seen.

Its activations vary less than those of the models that it was made from: where these have learnt different things,
means cancel (Jordan et al., "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", ICLR 2023). So the
mean of the models' statistics is not the mean model's, the less so the further the models have come apart. As for
averages of weights (Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018,
section 3.2), statistics are taken anew, of what the mean model makes of batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.comm.base import Collective
from paceline.hooks import OwnHook, place_in_script
from paceline.training.calls import is_transformed
from paceline.training.last_batches import LastBatches
from paceline.training.preserving import preserved

NUM_BATCHES = 10
"""Of each worker, and no more than a round has. So many in all are enough for statistics of them alone."""
_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@final
class RunningStatistics:
    """Keeps the last batches of a round, and takes statistics of what the mean model makes of them.

    A norm that fewer than `NUM_BATCHES` batches of all workers have reached has the mean of the workers' own statistics
    for those that lack: after a short round, or where only some batches or none are for it.

    Args:
        rounds: how many are over.
    """

    def __init__(self, model: nn.Module, *, rounds: Callable[[], int]) -> None:
        self._model, self._rounds = model, rounds
        self._norms = [each for each in model.modules() if isinstance(each, _Norm) and each.running_mean is not None]
        self._trained: list[_Norm] = []  # those that are not frozen
        kinds = {statistic.device.type for statistic in self._statistics}
        self._batches = LastBatches(rounds=rounds, limit=NUM_BATCHES, device_types=kinds)
        self._restored: list[Tensor] = []  # those of the global model that this worker goes on from
        self._restored_at = -1
        self._failure, self._has_told = "", False  # the first of a model that cannot be given a batch again
        self._hook = model.register_forward_pre_hook(OwnHook(self._keep), with_kwargs=True) if self._norms else None

    def close(self) -> None:
        """Keep no batch from here on."""
        if self._hook is not None:
            self._hook.remove()
        self._batches.clear()

    def restore(self, *, rounds: int) -> None:
        """The model is the global one of a checkpoint after so many rounds, with its statistics. Call it before this
        worker's own are loaded, and before any `of_mean`, which has these in place of the workers' mean until a worker
        has ended another round."""
        self._restored = [statistic.clone() for statistic in self._statistics]
        self._restored_at = rounds

    @contextmanager
    def of_mean(self, collective: Collective) -> Iterator[None]:
        """The model has statistics of its own meanwhile. Call it inside `Synchronizer.global_model`, when the model is
        the mean of all workers' with the mean of their statistics, and after `restore` if there is a checkpoint to go
        on from. Collective call."""
        if not self._norms or collective.size == 1:
            yield
            return
        before = [statistic.clone() for statistic in self._statistics]
        try:
            _put(self._statistics, self._joined(*self._seen(), collective))
            self._tell()
            yield
        finally:
            _put(self._statistics, before)

    def _keep(self, model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        if model.training and not is_transformed():
            self._trained = [norm for norm in self._norms if norm.training]
            self._batches.keep(inputs, named)

    def _seen(self) -> tuple[list[Tensor], list[int]]:
        """The norms' statistics of this worker's batches, and how many have reached each norm."""
        none = [statistic.clone() for statistic in self._statistics], [0] * len(self._norms)
        if not (batches := self._batches.unchanged):
            return none
        # What is on the model's calls, such as a clock, is not to hear of these, and nothing is compiled anew for them.
        forward = getattr(self._model, "_orig_mod", self._model).forward
        try:
            with torch.no_grad(), preserved(self._model), self._counting():
                for batch in batches:
                    batch.give(forward)
                counts = {norm: int(norm.get_buffer("num_batches_tracked")) for norm in self._trained}
                return [each.clone() for each in self._statistics], [counts.get(norm, 0) for norm in self._norms]
        except Exception as error:  # whatever it is: the others wait for this worker's part of their means
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            return none

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Nothing but batch norm is as in training: statistics are to be of what the evaluated model normalises."""
        momenta = {norm: norm.momentum for norm in self._trained}
        for module in self._model.modules():
            module.training = False
        try:
            for norm in self._trained:
                norm.training = True
                norm.reset_running_stats()
                norm.momentum = None  # all batches count alike
            yield
        finally:
            for norm, momentum in momenta.items():
                norm.momentum = momentum

    def _joined(self, seen: Sequence[Tensor], counts: Sequence[int], collective: Collective) -> list[Tensor]:
        """Of all workers, by how many batches each has: one who has just joined has none. In double precision."""
        lengths = [statistic.numel() for statistic in self._statistics]
        mine = torch.tensor(counts, dtype=torch.float64).repeat_interleave(2)
        each = mine.repeat_interleave(torch.tensor(lengths))
        flat = _flat(seen)
        each = each.to(flat.device)
        has_gone_on = torch.full_like(flat[:1], float(self._rounds() != self._restored_at))
        sums = torch.cat([has_gone_on, each, torch.where(each > 0, flat * each, 0.0)])
        collective.all_reduce(sums, op="sum").wait()
        any_gone_on, count, total = sums.split([1, len(flat), len(flat)])
        rest = _flat(self._statistics if float(any_gone_on) else self._restored)
        missing = (1 - count / NUM_BATCHES).clamp(min=0)
        means = total / count.clamp(min=1)
        # The workers' own may be infinite where they count nothing.
        return list(torch.where(missing > 0, (1 - missing) * means + missing * rest, means).split(lengths))

    def _tell(self) -> None:
        if self._failure and not self._has_told:
            self._has_told = True
            place_in_script().warn(
                f"the mean model cannot be given this worker's batches again ({self._failure}), so it is "
                "evaluated and saved with batch norm statistics of other workers' batches, or with the workers' mean"
            )

    @property
    def _statistics(self) -> list[Tensor]:
        both = [each for norm in self._norms for each in (norm.running_mean, norm.running_var)]
        return [each for each in both if each is not None]


def _flat(statistics: Sequence[Tensor]) -> Tensor:
    """On the first one's device."""
    return torch.cat([each.double().flatten().to(statistics[0].device) for each in statistics])


@torch.no_grad()
def _put(statistics: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for statistic, value in zip(statistics, values, strict=True):
        statistic.copy_(value.view_as(statistic))
