"""Which of their inner optimizers' states workers average in rounds of local steps, and how often.

Iacob et al., "DES-LOC: Desynced low communication adaptive optimizers for training foundation models", 2025,
algorithm 1: parameters and each moment have periods of their own, the slower a moment changes the longer.
"""

import json
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.arrays import is_finite
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.messages import Raw, from_frames, raw_bytes, to_frames
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
        self._means: dict[str, list[Tensor]] = {}
        """A tensor for each dtype of parameters, from `average` to `take_up`."""

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

    def average(self, number: int, *, counts: bool = True) -> None:
        """This round, counted from 1, is over: average what is due. Nothing changes before `take_up`. Collective call.

        Args:
            counts: whether this worker's states do; not those of one who has just come with a copy of another's.
        """
        self._means = {}
        for period, names in self._kinds.values():
            if number % period:
                continue
            # Who has left out all steps has none yet, and counts all the same.
            found = self._collective.all_gather_object(self._found(names) if counts else None)
            counting = [each for each in found if each is not None]
            for name in sorted({name for each in counting for name in each}):
                self._means[name] = self._averaged(name, counts=counts, share=len(found) / max(1, len(counting)))

    @torch.no_grad()
    def take_up(self, *, takes: Callable[[str], bool]) -> None:
        """Have the means that `average` found become this worker's states.

        Args:
            takes: asked on all workers alike, with the name of a state whose mean is not finite.
        """
        for name, means in self._means.items():
            for alike, flat in zip(self._by_dtype(), means, strict=True):
                if not is_finite(flat) and not takes(name):
                    continue
                own = self._own(name, alike)
                for kept, mean in zip(own, flat.split([each.numel() for each in alike]), strict=True):
                    if kept is not None:
                        kept.copy_(mean.view_as(kept))
        self._means = {}

    def means(self) -> list[memoryview]:
        """What `average` found, for another worker's `take_means`."""
        if not self._kinds:
            return []
        names = torch.frombuffer(bytearray(json.dumps(list(self._means)).encode()), dtype=torch.uint8)
        return to_frames([names, *(flat for means in self._means.values() for flat in means)])

    def take_means(self, frames: Sequence[Raw]) -> None:
        """What another worker's `means` gave takes the place of what this one would have found."""
        self._means = {}
        if not self._kinds:
            return
        names = json.loads(bytes(raw_bytes(frames[0])))
        self._means = {name: [_room(alike) for alike in self._by_dtype()] for name in names}
        from_frames(frames[1:], [flat for means in self._means.values() for flat in means])

    def exchange_among(self, collective: Collective) -> None:
        """Average with these from here on."""
        self._collective = collective

    @torch.no_grad()
    def _averaged(self, name: str, *, counts: bool, share: float) -> list[Tensor]:
        """States lie behind one another while they travel. Where this worker has none, it counts as zero.

        Args:
            share: how many workers there are for each that counts.
        """
        means = []
        for alike in self._by_dtype():
            own = self._own(name, alike) if counts else [None] * len(alike)
            pairs = zip(own, alike, strict=True)
            parts = [torch.zeros_like(each) if kept is None else kept.to(each.dtype) for kept, each in pairs]
            flat = torch.cat([part.flatten() for part in parts])
            self._collective.all_reduce(flat, op="mean").wait()
            means.append(flat if share == 1 else flat * share)
        return means

    def _by_dtype(self) -> list[list[Tensor]]:
        parameters = self._replica.parameters
        dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
        return [[parameter for parameter in parameters if parameter.dtype == dtype] for dtype in dtypes]

    def _own(self, name: str, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        return [self._replica.optimizer.state.get(parameter, {}).get(name) for parameter in parameters]

    def _found(self, names: Sequence[str]) -> list[str]:
        """Those of these names that some parameter's state has."""
        states = self._replica.optimizer.state.values()
        return [name for name in names if any(isinstance(state.get(name), Tensor) for state in states)]


def _room(tensors: Sequence[Tensor]) -> Tensor:
    """Memory for these tensors, behind one another."""
    return tensors[0].new_empty(sum(each.numel() for each in tensors))
