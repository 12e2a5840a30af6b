"""What the tests' engines are asked for, as `paceline.run` is."""

from __future__ import annotations

from paceline.config import DeviceChoice, RunConfig, Target
from paceline.interval import Interval


def config_of(
    *,
    max_steps: int | None = None,
    max_time_s: float | None = None,
    eval_every: int | str | None = None,
    checkpoint_every: int | None = None,
    target: str | None = None,
    seed: int = 0,
    deadline_s: float = 60.0,
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
        target=Target.parse(target) if target is not None else None,
        seed=seed,
        deadline_s=deadline_s,
        device=device,
        strict=strict,
        attacks=attacks,
    )
