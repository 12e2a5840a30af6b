"""Which of their inner optimizers' states workers average in rounds of local steps, and how often.

Iacob et al., "DES-LOC: Desynced low communication adaptive optimizers for training foundation models", 2025,
algorithm 1: parameters and each moment have periods of their own, the slower a moment changes the longer.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.arrays import is_finite
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.strategies.replica import Replica

_MOMENTUM = ("exp_avg", "momentum_buffer")
_VARIANCE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


@final
class JoinedStates:
    """One worker's.

    Args:
        momentum_every: rounds from one averaging of first moments to the next; 0: they stay with their workers.
        variance_every: the same of second moments.
    """

    def __init__(
        self, collective: Collective, replica: Replica, *, momentum_every: int = 0, variance_every: int = 0
    ) -> None:
        self._collective, self._replica = collective, replica
        kinds = {"momentum_every": (momentum_every, _MOMENTUM), "variance_every": (variance_every, _VARIANCE)}
        self._kinds = {option: kind for option, kind in kinds.items() if kind[0]}
        self._are_there = False

    def require_there(self) -> None:
        """The optimizer has stepped. Raises UsageError if it keeps no state of a kind that is asked for."""
        if self._are_there:
            return
        for option, (period, names) in self._kinds.items():
            if not self._found(names):
                raise UsageError(
                    f"{option}={period} averages {' or '.join(names)}, and {type(self._replica.optimizer).__name__} "
                    f"keeps none, as it is set; leave {option} out"
                )
        self._are_there = True

    @torch.no_grad()
    def join(self, number: int, *, takes: Callable[[str], bool]) -> None:
        """This round, counted from 1, is over: average what is due. Collective call.

        Args:
            takes: asked on all workers alike, with the name of a state whose mean is not finite.
        """
        for period, names in self._kinds.values():
            if number % period:
                continue
            found = self._collective.all_gather_object(self._found(names))  # who has left out all steps has none yet
            for name in sorted({name for each in found for name in each}):
                self._average(name, takes)

    def _average(self, name: str, takes: Callable[[str], bool]) -> None:
        """States lie behind one another while they travel. Where this worker has none, it counts as zero."""
        parameters, state = self._replica.parameters, self._replica.optimizer.state
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [parameter for parameter in parameters if parameter.dtype == dtype]
            own = [state.get(parameter, {}).get(name) for parameter in alike]
            parts = [torch.zeros_like(p) if o is None else o.to(dtype) for o, p in zip(own, alike, strict=True)]
            flat = torch.cat([part.flatten() for part in parts])
            self._collective.all_reduce(flat, op="mean").wait()
            if not is_finite(flat) and not takes(name):
                continue
            for kept, mean in zip(own, flat.split([part.numel() for part in parts]), strict=True):
                if kept is not None:
                    kept.copy_(mean.view_as(kept))

    def _found(self, names: Sequence[str]) -> list[str]:
        """Those of the names that some parameter's state has."""
        states = self._replica.optimizer.state.values()
        return [name for name in names if any(isinstance(state.get(name), Tensor) for state in states)]
