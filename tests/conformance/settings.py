"""What the tests' engines are asked for, as `paceline.run` is."""

from __future__ import annotations

from paceline.config import AfterTarget, Best, DeviceChoice, RunConfig, Target
from paceline.interval import Interval

DEADLINE_S = 120.0
SOON_S = DEADLINE_S / 2
"""In which nobody has waited for a deadline, also on a busy machine."""


def config_of(
    *,
    max_steps: int | None = None,
    max_time_s: float | None = None,
    eval_every: int | str | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 2,
    keep_best: str | None = None,
    copy_checkpoints: str | None = None,
    target: str | None = None,
    after_target: AfterTarget = "stop",
    seed: int = 0,
    deadline_s: float = DEADLINE_S,
    device: DeviceChoice = "cpu",
    strict: bool = False,
    attacks: tuple[str, ...] = (),
) -> RunConfig:
    """On cores, wherever the tests run: their scripts leave batches where these are."""
    return RunConfig(
        max_steps=max_steps,
        max_time_s=max_time_s,
        eval_every=Interval.parse(eval_every) if eval_every is not None else None,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        keep_best=Best.parse(keep_best) if keep_best is not None else None,
        copy_checkpoints=copy_checkpoints,
        target=Target.parse(target) if target is not None else None,
        after_target=after_target,
        seed=seed,
        deadline_s=deadline_s,
        device=device,
        strict=strict,
        attacks=attacks,
    )
