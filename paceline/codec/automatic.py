"""The codec that is chosen once a run has shown what its steps take."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

from paceline.codec.base import Codec, Shape, doc
from paceline.errors import UsageError
from paceline.pieces import named

LEAST_GAIN = 0.05


@final
@dataclass(frozen=True, kw_only=True)
class Auto(Codec, name="auto"):
    """None, unless some steps show that one of `among` would make them at least 5 % shorter."""

    adapts: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.0, 0.0)

    among: str = doc("bf16+int8+powersgd", "names of codecs, with + between them")
    after: int = doc(10, "steps, or rounds of local steps, that are measured, without a codec")

    def __post_init__(self) -> None:
        if self.after < 2:
            raise UsageError(f"after must be at least 2 steps, not {self.after}")
        known = _known()
        for name in self.among.split("+"):
            if name not in known:
                raise UsageError(f"among={self.among} names {name!r}, which is none of {', '.join(sorted(known))}")

    @property
    def candidates(self) -> tuple[Codec, ...]:
        return tuple(_known()[name]() for name in self.among.split("+"))

    def of_those(self, fit: Callable[[Codec], bool]) -> "Auto":
        """The choice among those that fit. Raises ValueError where none does."""
        names = [name for name in self.among.split("+") if fit(_known()[name]())]
        if not names:
            raise ValueError(f"none of {self.among} fits")
        return replace(self, among="+".join(names))

    def num_bytes(self, shape: Shape) -> int:
        raise UsageError("codec=auto has no size before it has chosen")


def _known() -> dict[str, type[Codec]]:
    pieces: dict[str, type[Codec]] = named(Codec)  # type: ignore[type-abstract]
    return {name: kind for name, kind in pieces.items() if not kind.adapts}


@final
class Chosen(NamedTuple):
    """The codec to take, and why."""

    codec: Codec | None
    why: str
    before: Codec | None = None
    """The codec that steps take until the chosen one's first step."""


def chosen(step_s: float, steps_s: dict[Codec, float], *, what: str = "step") -> Chosen:
    """Takes the codec that makes steps shortest, if it makes them enough shorter.

    Args:
        what: takes so long: a step, or a round, of which none has to wait for a codec's first one.
        step_s: what a step takes without.
        steps_s: what it would take with each.
    """
    best = min(steps_s, key=lambda codec: steps_s[codec])
    said = f"a {what} of {step_s * 1e3:.3g} ms would take {steps_s[best] * 1e3:.3g} ms with {best}"
    if not _gains(step_s, steps_s[best]):
        return Chosen(None, f"none: {said}, which is not {LEAST_GAIN:.0%} shorter")
    if what != "step" or not best.first_step:
        return Chosen(best, f"{best}: {said}")
    at_once = {codec: each_s for codec, each_s in steps_s.items() if not codec.first_step and _gains(step_s, each_s)}
    before = min(at_once, key=lambda codec: at_once[codec]) if at_once else None
    until = f", and {at_once[before] * 1e3:.3g} ms with {before} until then" if before is not None else ""
    return Chosen(best, f"{best}: {said}, from step {best.first_step} on{until}", before)


def _gains(step_s: float, coded_s: float) -> bool:
    return 1 - coded_s / step_s >= LEAST_GAIN
