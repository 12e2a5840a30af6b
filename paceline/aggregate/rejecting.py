"""Contributions that make the model worse are left out before the others are joined."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.pieces import Piece


@final
@dataclass(frozen=True)
class Validation(Piece, name="validation"):
    """Judges each contribution by the model with `share` of it alone, on samples that nobody trains on, and leaves out
    those after which `metric` is worse than before by more than `margin`.

    With a loss it is the score of Zeno (Xie et al., ICML 2019, definition 2, with rho = 0), held against a threshold as
    in Zeno++ (Xie et al., ICML 2020). Fang et al. (USENIX Security 2020, section 5) reject by the loss or the error of
    the joint with and without a contribution, and leave out a stated number. A small share asks for the direction: what
    honest senders change, each by few samples, may lead too far in the right one.

    >>> Validation(margin=0.5).rejects(2.0, [1.0, 2.5, 2.6, float("nan")], rises=False)
    [False, False, True, True]
    """

    metric: str = "loss"
    margin: float = 0.01
    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin must be at least 0 and finite, not {self.margin:g}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {self.share:g}")

    def rejects(self, before: float, after: Sequence[float], *, rises: bool) -> list[bool]:
        """Whether each contribution is left out.

        Args:
            before: the metric of the model as it is. If it is no number, whoever makes it one counts.
            after: the metric of the model with each contribution alone.
            rises: the larger the metric, the better.
        """
        sign = -1 if rises else 1
        worst = sign * before + self.margin if math.isfinite(before) else math.inf
        return [not (math.isfinite(each) and sign * each <= worst) for each in after]
