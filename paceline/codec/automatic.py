"""The codec that is chosen once a run has shown what its steps take."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, final

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
        """Among fewer. Raises ValueError where none fits."""
        names = [name for name in self.among.split("+") if fit(_known()[name]())]
        if not names:
            raise ValueError(f"none of {self.among} fits")
        return replace(self, among="+".join(names))

    def num_bytes(self, shape: Shape) -> int:
        raise UsageError("codec=auto has no size before it has chosen")


def _known() -> dict[str, type[Codec]]:
    pieces: dict[str, type[Codec]] = named(Codec)  # type: ignore[type-abstract]
    return {name: kind for name, kind in pieces.items() if not kind.adapts}


def chosen(step_s: float, steps_s: dict[Codec, float], *, what: str = "step") -> tuple[Codec | None, str]:
    """The codec to take, and why.

    Args:
        what: takes so long.
        step_s: what a step takes without.
        steps_s: what it would take with each.
    """
    best = min(steps_s, key=lambda codec: steps_s[codec])
    gain = 1 - steps_s[best] / step_s
    said = f"a {what} of {step_s * 1e3:.3g} ms would take {steps_s[best] * 1e3:.3g} ms with {best}"
    if gain < LEAST_GAIN:
        return None, f"none: {said}, which is not {LEAST_GAIN:.0%} shorter"
    return best, f"{best}: {said}" + (f"; from step {best.first_step} on" if best.first_step else "")
