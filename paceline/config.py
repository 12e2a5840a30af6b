"""What a run is asked to do, whatever the strategy."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.elastic.spec import Elastic
from paceline.errors import UsageError
from paceline.interval import Interval

DeviceChoice = Literal["auto", "cpu", "cuda"]
AfterTarget = Literal["stop", "continue"]
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|(?<![a-z0-9])(mae|mse|rmse|nll|wer|cer)(?![a-z0-9])")


def rises(metric: str) -> bool:
    """Whether more of a metric is better, as its name says; any text is a name.

    >>> rises("top-1 acc (%)"), rises("val_loss")
    (True, False)
    """
    return _LOWER_IS_BETTER.search(metric.lower()) is None


@dataclass(frozen=True)
class Target:
    """A metric's value that ends the run once an evaluation reaches it."""

    metric: str
    value: float
    rising: bool
    """True: reached at or above the value; false: at or below."""

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read `accuracy=0.95`, `accuracy>=0.95` or `loss<=0.3`. Raises UsageError if the text has another form.

        With `=`, a metric is to fall if its name says loss, error or perplexity, or has mae, mse, rmse, nll, wer or cer
        as a word. All others are to rise.
        """
        match = re.fullmatch(r"\s*([A-Za-z_][\w./-]*?)\s*(>=|<=|=)\s*([^\s=<>]+)\s*", text)
        try:
            metric, sign, number = match.groups()  # type: ignore[union-attr]
            value = float(number)
        except (AttributeError, ValueError):
            raise UsageError(f"target {text!r} is not of the form metric=value, such as accuracy=0.95") from None
        if not math.isfinite(value):
            raise UsageError(f"target {text!r} can never be reached")
        rising = sign == ">=" or (sign == "=" and rises(metric))
        return cls(metric, value, rising)

    def is_reached(self, value: float) -> bool:
        """Whether the value reaches the target. One that is not finite never does: nothing was learnt by it."""
        return math.isfinite(value) and (value >= self.value if self.rising else value <= self.value)

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.rising else '<='}{self.value:.15g}"


@dataclass(frozen=True)
class Best:
    """The metric by which a run's best checkpoint is chosen."""

    metric: str
    rising: bool
    """True: more of it is better."""

    @classmethod
    def parse(cls, text: str) -> "Best":
        """Read `accuracy`, `score:max` or `loss:min`; without a direction, the name tells it as for targets. Raises
        UsageError if the text has another form."""
        match = re.fullmatch(r"\s*([A-Za-z_][\w./-]*?)\s*(?::\s*(min|max))?\s*", text)
        if match is None:
            raise UsageError(f"keep-best {text!r} is not of the form metric, metric:min or metric:max")
        metric, direction = match.groups()
        return cls(metric, rises(metric) if direction is None else direction == "max")

    def is_better(self, value: float, than: float | None) -> bool:
        """A value that is not finite never is; any other is better than none."""
        if not math.isfinite(value):
            return False
        return than is None or (value > than if self.rising else value < than)

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.rising else 'min'}"


def in_order(targets: Iterable[Target]) -> list[Target]:
    """The targets of one metric from the easiest to the hardest; those of several as they come. The last one decides.

    >>> [str(target) for target in in_order(map(Target.parse, ("loss=0.3", "loss=0.5")))]
    ['loss<=0.5', 'loss<=0.3']
    """
    found = list(targets)
    if len({(target.metric, target.rising) for target in found}) == 1:
        found.sort(key=lambda target: target.value if target.rising else -target.value)
    return found


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Budget, cadence and environment of one run. Raises UsageError, which names the value, if one is out of range."""

    max_steps: int | None = None
    """Iterations as the literature counts them: global updates, or gradients applied where every gradient is one."""
    max_time_s: float | None = None
    """Seconds of training time."""
    eval_every: Interval | None = None
    """How far it is from one evaluation to the next; none: only at the end."""
    checkpoint_every: int | None = None
    """Iterations between checkpoints; none: so often that a killed run loses at most 30 s, and at the end."""
    keep_checkpoints: int = 2
    """How many are kept: the newest, and those before it."""
    keep_best: Best | None = None
    """By which evaluations a checkpoint of the best model is kept besides."""
    copy_checkpoints: str | None = None
    """The newest ones are copied to this address of fsspec's."""
    target: Target | None = None
    hold: int | None = None
    """Evaluations in a row that reach the target for it to count; none: as `training/holding.py` says."""
    after_target: AfterTarget = "stop"
    seed: int = 0
    device: DeviceChoice = "auto"
    deadline_s: float = 300.0
    """How long any wait for a peer may take."""
    start_deadline_s: float = 120.0
    """How long processes may take to start, with their imports of torch."""
    strict: bool = False
    """Lock-step workers compare their parameters after every step."""
    attacks: tuple[str, ...] = ()
    """What hostile workers do, as `sign-flip:workers=2`."""

    directory: str | None = None
    """The result directory, for servers that write there themselves; the launcher says it."""
    resumed_from: str | None = None
    """Where the checkpoint lies that the run goes on from, if it does."""
    elastic: Elastic | None = None
    """Workers may die, and the others go on."""

    def __post_init__(self) -> None:
        counts = ("max_steps", "checkpoint_every", "keep_checkpoints", "hold")
        for name in (*counts, "max_time_s", "deadline_s", "start_deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name.removesuffix('_s').replace('_', '-')} must be positive, not {value}")
        if self.attacks:
            from paceline.attacks import parse  # needs torch, and the command line is understood before that is loaded

            parse(self.attacks)
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be in 0..2^63-1, not {self.seed}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device must be auto, cpu or cuda, not {self.device!r}")
        if self.after_target not in ("stop", "continue"):
            raise UsageError(f"after-target must be stop or continue, not {self.after_target!r}")
        if (self.target is not None or self.keep_best is not None) and self.eval_every is None:
            object.__setattr__(self, "eval_every", DEFAULT_EVAL_EVERY)

    def in_directory(self, directory: Path, *, resumed_from: Path | None) -> "RunConfig":
        """The same, of the run that has its results there."""
        before = None if resumed_from is None else str(resumed_from.resolve())
        return replace(self, directory=str(directory.resolve()), resumed_from=before)


DEFAULT_EVAL_EVERY = Interval(100)
