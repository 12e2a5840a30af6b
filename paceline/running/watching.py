"""What a person sees of a run that is under way: a line of progress or two, and the scripts' output above it."""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from paceline.config import RunConfig
from paceline.engines.standing import Progress, Watcher
from paceline.records import summarise
from paceline.training.clock import unit

_REFRESH_S = 0.1
_PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 10
_FIXED_WIDTH = 12  # the spinner, the time, and what separates them from the rest
_FACTS_WIDTH = 60  # step, time left, speed and a metric; where so much is not left, they get a line of their own
_GAP = _INDENT = "  "


def is_seen(console: Console) -> bool:
    """Whether somebody looks at what a console shows, and nothing that is printed beside it goes to a file."""
    return console.is_jupyter or (console.is_terminal and is_terminal(sys.stdout))


def is_terminal(stream: TextIO | None) -> bool:
    """Programs without a terminal may have no streams, closed ones, or some of their own that cannot tell."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


@final
class ProgressLine(Watcher):
    """A context in which a run shows its step, speed, metrics and where its time goes.

    On a terminal a line that moves, or two where it is narrow; elsewhere a plain line every few seconds, so that logs
    stay readable. Nothing else is shown meanwhile: Ray's notices go to standard output, and say less than a run's own
    errors.
    """

    def __init__(
        self,
        console: Console,
        label: str,
        config: RunConfig,
        *,
        engine: str = "ray",
        outlook: Callable[[], str] = lambda: "",
    ) -> None:
        """`outlook` is asked for what else to show, such as the time left; `engine` has the clock that the run is
        on."""
        self._console, self._label, self._config, self._outlook = console, label, config, outlook
        # Where nobody knows how many steps there will be, a bar says nothing.
        bars = [BarColumn(bar_width=_BAR_WIDTH)] if config.max_steps is not None else []
        left = console.width - len(label) - _FIXED_WIDTH - (_BAR_WIDTH + 1) * len(bars)
        self._has_second_line = left < _FACTS_WIDTH
        self._facts_width = console.width - len(_INDENT) if self._has_second_line else left
        self._unit = unit(engine)
        self._facts = "starting"
        beside = [] if self._has_second_line else [TextColumn("{task.fields[facts]}")]
        self._bar = Bar(SpinnerColumn(), TextColumn("{task.description}"), *bars, *beside, TimeElapsedColumn())
        self._task = self._bar.add_task(label, total=config.max_steps, facts=self._facts)
        self._live = Live(
            get_renderable=self._renderable,
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=round(1 / _REFRESH_S),
        )
        self._shown_s = 0.0
        self._silence = contextlib.redirect_stdout(io.StringIO())

    def __enter__(self) -> "ProgressLine":
        self._shown_s = time.monotonic()
        self._silence.__enter__()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._live.stop()
        self._silence.__exit__(*failure)

    def on_progress(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < (_REFRESH_S if self._console.is_terminal else _PLAIN_INTERVAL_S):
            return
        self._shown_s = now_s
        first, *others = _facts(progress, self._unit)
        facts = [first, *filter(None, [self._outlook()]), *others]
        if self._console.is_terminal:
            self._facts = _fitting(facts, self._facts_width)
            self._bar.update(self._task, completed=progress.iteration, facts=self._facts)
        else:
            self._console.print(f"{self._label}: {_GAP.join(facts)}", markup=False, highlight=False, soft_wrap=True)

    def on_output(self, who: str, line: str) -> None:
        self._console.print(Text.assemble((f"[{who}] ", "dim"), Text.from_ansi(line)), soft_wrap=True)

    def _renderable(self) -> RenderableType:
        line = self._bar.get_renderable()
        return Group(line, Text(_INDENT + self._facts, no_wrap=True)) if self._has_second_line else line


def _facts(progress: Progress, unit: str) -> list[str]:
    """What is to be shown, the most important first."""
    if progress.phase != "training":
        return ["starting"]
    facts = [f"step {progress.iteration}"]
    if progress.num_workers is not None:  # what stands before these facts says how many it began with
        facts.append(f"now x {progress.num_workers}")
    elapsed_s = progress.time_s - progress.began_s
    if elapsed_s > 0:
        facts.append(f"{progress.samples / elapsed_s:,.0f} samples/{unit}")
    if progress.metrics:
        facts.append(summarise(progress.metrics))
    whole = progress.compute_s + progress.communication_s + progress.waiting_s
    if whole > 0:
        shares = (progress.compute_s / whole, progress.communication_s / whole, progress.waiting_s / whole)
        facts.append("compute {:.0%} communication {:.0%} waiting {:.0%}".format(*shares))
    return facts


def _fitting(facts: list[str], width: int) -> str:
    """As many as fit on the line, which must not wrap."""
    shown = facts[0]
    for fact in facts[1:]:
        if len(shown) + len(_GAP) + len(fact) > width:
            break
        shown += _GAP + fact
    return shown
