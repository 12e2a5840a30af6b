"""Notices weights that a rank has changed for a backward pass alone, and that are as before when workers compare."""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn

from paceline.comm.base import Collective
from paceline.errors import TensorMismatch
from paceline.strategies.digests import digest, first_difference

_MOST_PASSES = 4
"""Passes that are looked at after a pause: one for the gradients that perturb weights, and some with the perturbed
ones."""


@final
class SameWeights:
    """Keeps some of each weight as it is in the backward passes between a pause and the next step, and compares them in
    the pause after. Until an optimizer steps they should be what they were in the pause.

    Args:
        is_off: whether the script does something else than training, such as evaluating.
        some_of: as many elements as no step feels.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, is_off: Callable[[], bool], some_of: Callable[[Tensor], Tensor]
    ) -> None:
        self._parameters, self._is_off, self._some_of = parameters, is_off, some_of
        self._passes: list[list[Tensor]] = []
        self._told = self._passes  # what is compared, while the next ones are looked at
        self._seen: set[int] = set()  # whose gradients the pass under way has brought
        self._is_looking = False

    def begin(self) -> None:
        """All workers have the same weights."""
        self._passes, self._is_looking = [], True
        self._seen.clear()

    def close(self) -> None:
        """An optimizer steps."""
        self._is_looking = False

    def take(self, number: int) -> None:
        """A backward pass brings the gradient of the parameter of this number."""
        if not self._is_looking or self._is_off():
            return
        if not self._seen or number in self._seen:
            self._seen.clear()
            self._passes.append([self._some_of(each).clone() for each in self._parameters])
            self._is_looking = len(self._passes) < _MOST_PASSES
        self._seen.add(number)

    def said(self) -> list[str]:
        """What this rank tells the others in a pause."""
        self._told = self._passes
        return list(map(digest, self._told))

    def compare(self, everyone: Sequence[Sequence[str]], names: Sequence[str], collective: Collective) -> None:
        """Raises TensorMismatch, on every rank, which names the first parameter that differed. Collective call.

        Nothing is told where ranks had not as many passes: whether they may is looked at elsewhere.
        """
        if len(set(map(len, everyone))) > 1:
            return
        number = next((number for number, each in enumerate(zip(*everyone, strict=True)) if len(set(each)) > 1), None)
        if number is None:
            return
        found = first_difference(names, self._told[number], collective)
        if found is not None:
            raise TensorMismatch(
                f"in a backward pass parameter {found.name!r} was not the same on ranks 0 and {found.rank}, as it is "
                "before and after it: the script changes weights for the pass by what its own rank has seen or drawn, "
                "and puts them back. Change them alike on every rank: by gradients that backward() has computed, which "
                "are the mean of all workers', or with a torch.Generator of the same seed. If each rank is to have its "
                "own, set loader.dataset.differs_by_rank = True before prepare"
            )
