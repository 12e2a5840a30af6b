"""The synchronizers of several optimizers as one: an iteration is a step of the first."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor, nn

from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.strategies.base import Context, StepOutcome, Synchronizer
from paceline.strategies.own_state import OwnState
from paceline.strategies.pass_ends import PassEnds
from paceline.strategies.replica import Replica

_ITERATION = "iteration"


@final
class Together(Synchronizer):
    """Steps and waits are the first optimizer's; the others' steps are `parts[name].step`, and belong to the first's
    iteration. All else concerns all. States have the optimizer's name in front.

    Args:
        whole: all parameters.
        parts: by the optimizers' names, the first's in front.
    """

    def __init__(self, context: Context, whole: Replica, parts: Mapping[str, Synchronizer]) -> None:
        super().__init__(context, whole)
        self._parts = dict(parts)
        self._first, *self._others = self._parts.values()
        PassEnds(context.collective, [passes for part in parts.values() if (passes := part.passes) is not None])
        self._told: list[Mapping[str, float | str]] = []  # each part's facts
        self._follow_facts()

    def start(self) -> None:
        for part in self._parts.values():
            part.start()

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        outcome = self._first.step(update, pause_at=pause_at)
        self.iteration = outcome.iteration
        self._follow_facts()
        return outcome

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        outcome = self._first.wait_for_admission(pause_at=pause_at)
        if self.context.roster is not None:  # a round ends for all of them
            for part in self._others:
                part.wait_for_admission(pause_at=pause_at)
        self.iteration = outcome.iteration
        return outcome

    def begin_turn(self) -> None:
        for part in self._parts.values():
            part.begin_turn()

    def require_between_rounds(self, place: str) -> None:
        self._first.require_between_rounds(place)

    def end_turn(self) -> StepOutcome:
        outcome, *_ = [part.end_turn() for part in self._parts.values()]
        self.iteration = outcome.iteration
        return outcome

    @property
    def measures(self) -> Mapping[str, float]:
        return self._first.measures

    @property
    def timings(self) -> tuple[Timing, ...]:
        each = {id(timing): timing for part in self._parts.values() for timing in part.timings}
        return tuple(each.values())

    def set_weight(self, weight: float) -> None:
        for part in self._parts.values():
            part.set_weight(weight)

    def set_synchronizing(self, on: bool) -> bool:
        before, *_ = [part.set_synchronizing(on) for part in self._parts.values()]
        return before

    def meet(self, iteration: int, *, active: Sequence[int]) -> int:
        for part in self._others:
            part.meet(part.iteration, active=active)
        self.iteration = self._first.meet(iteration, active=active)
        return self.iteration

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        with ExitStack() as in_place:
            for part in self._parts.values():
                in_place.enter_context(part.global_model())
            yield self.replica.model

    def leave(self) -> None:
        for part in self._parts.values():
            part.leave()
        self.iteration = self._first.iteration

    def step_aside(self) -> None:
        for part in self._parts.values():
            part.step_aside()

    def come_back(self) -> None:
        for part in self._parts.values():
            part.come_back()

    def optimizer_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            own = {**part.optimizer_state(), _ITERATION: torch.tensor(part.iteration)}
            state |= {f"{name}.{key}": tensor for key, tensor in own.items()}
        return state

    def own_state(self) -> dict[str, OwnState]:
        return {f"{name}.{key}": own for name, part in self._parts.items() for key, own in part.own_state().items()}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        for name, part in self._parts.items():
            mine = _without(f"{name}.", state)
            if _ITERATION not in mine:
                raise UsageError(f"the checkpoint has no state of the optimizer {name!r}; resume with the same ones")
            at = int(mine.pop(_ITERATION))
            part.restore(mine, _without(f"{name}.", own), iteration=iteration if part is self._first else at)
        self.iteration = iteration

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def _follow_facts(self) -> None:
        """A part may have measured or chosen something."""
        told = [part.facts for part in self._parts.values()]
        if len(self._told) != len(told) or not all(map(operator.is_, told, self._told)):
            self._told = told
            each = zip(self._parts, told, strict=True)
            self.facts = {f"{name}.{fact}": value for name, facts in each for fact, value in facts.items()}


def _without(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What has the prefix, by the rest of its name."""
    return {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
