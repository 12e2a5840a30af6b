"""A server's models of earlier rounds, which late clients began with."""

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from paceline.arrays import clones
from paceline.strategies.own_state import OwnState

_PAST = "past."
Version = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The server's parameters and buffers of one round."""


@final
class Past:
    """The oldest first, at most as many as were asked for last."""

    def __init__(self) -> None:
        self._versions: list[Version] = []

    def add(self, version: Version, *, most: int) -> None:
        """A copy, if any are kept at all."""
        if most:
            self._versions.append((clones(version[0]), clones(version[1])))
        del self._versions[: max(0, len(self._versions) - most)]

    def before(self, present: Version, *, rounds: int) -> Version:
        """The one of so many rounds before the present one. After a resume with other workers nobody knows it any
        more, and the oldest there is takes its place."""
        known = [*self._versions, present]
        return known[max(0, len(known) - 1 - rounds)]

    def own_state(self) -> dict[str, OwnState]:
        return {
            f"{_PAST}{number}.{index}": OwnState(each, "same")
            for number, (parameters, buffers) in enumerate(self._versions)
            for index, each in enumerate([*parameters, *buffers])
        }

    def restore(self, own: Mapping[str, Tensor], *, num_parameters: int, num_buffers: int) -> None:
        """Take up what `own_state` gave, as far as it is there."""
        self._versions.clear()
        while f"{_PAST}{len(self._versions)}.0" in own:
            saved = f"{_PAST}{len(self._versions)}."
            tensors = [own[f"{saved}{index}"].clone() for index in range(num_parameters + num_buffers)]
            self._versions.append((tensors[:num_parameters], tensors[num_parameters:]))
