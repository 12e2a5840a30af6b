"""A run as a trace for Perfetto (ui.perfetto.dev) or Chrome (chrome://tracing): what every member did when.

The format is the Trace Event Format's JSON: complete events (`X`), instants (`i`) and names (`M`); times in µs.

Records say how long the parts of a step took, not in which order. The trace draws them in the order in which steps
mostly go: compute, wait, exchange. Exchange hidden behind compute lies on a line of its own, at the end of the compute.
A server's update is drawn when the step ended whose gradient it applied, by which time it had happened. Which step that
was follows from order alone: a worker's n-th update is of its n-th step whose gradient was applied. Clocks do not tell,
as they begin anew where a run is resumed.
"""

import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline import durable
from paceline.errors import UsageError
from paceline.records import EvaluationRecord, EventRecord, StepRecord, UpdateRecord, iterate_records
from paceline.running import manifest

FILE_NAME = "timeline.json.gz"
MAX_STEPS = 100_000  # more is more than a browser shows
_STEPS, _HIDDEN = 0, 1
_RUN, _FIRST_WORKER, _FIRST_SERVER = 0, 1, 100_001  # "processes" of the trace; their order is the order on screen

Event = dict[str, Any]
_StepEnds = dict[tuple[int, int], float]
"""Seconds on the training clock when the n-th step of a worker ended whose gradient was applied, by worker and n."""


@dataclass
class Window:
    """The part of a run that is drawn: the steps that end in it, but no more than `MAX_STEPS`."""

    begin_s: float = 0.0
    """When it begins on the training clock."""
    end_s: float = math.inf
    num_drawn: int = 0
    num_left_out: int = 0
    """Steps in the window beyond the limit."""

    def takes(self, step: StepRecord) -> bool:
        """Whether the step is to be drawn; counts it."""
        if not self.holds(step.time_s):
            return False
        if self.num_drawn == MAX_STEPS:
            self.num_left_out += 1
            return False
        self.num_drawn += 1
        return True

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s <= self.end_s

    def __str__(self) -> str:
        if not self.num_left_out:
            return f"{self.num_drawn:,} steps"
        total = self.num_drawn + self.num_left_out
        return f"the first {self.num_drawn:,} of {total:,} steps; for others choose a window of the training time"


def write(
    directory: Path, out: Path | None = None, *, begin_s: float = 0.0, end_s: float = math.inf
) -> tuple[Path, Window]:
    """Write the trace of the run in a result directory.

    Args:
        directory: of the result; the run may have failed, or still go on.
        out: the file, compressed if its name ends in `.gz`; none: `timeline.json.gz` in the directory.
        begin_s, end_s: on the training clock; what lies outside is not drawn.

    Returns:
        Where it was written, and what of the run is in it.

    Raises:
        UsageError: there is no run in the directory, the window is empty, or the file cannot be written.
    """
    if not begin_s < end_s:
        raise UsageError(f"a timeline from {begin_s:g} s to {end_s:g} s is empty")
    described = manifest.read(directory)
    out = out or directory / FILE_NAME
    window = Window(begin_s, end_s)
    try:
        with durable.whole(out) as partial, _opened(partial, compressed=out.suffix == ".gz") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for index, event in enumerate(events(directory, window)):
                file.write(",\n" if index else "")
                json.dump(event, file, separators=(",", ":"), allow_nan=False)
            file.write('\n],"otherData":')
            clock = "training clock, evaluation excluded"
            json.dump({"strategy": described["strategy"]["name"], "clock": clock, "drawn": str(window)}, file)
            file.write("}\n")
    except OSError as error:
        raise UsageError(f"cannot write the timeline {out}: {error.strerror}") from None
    return out, window


def events(directory: Path, window: Window) -> Iterator[Event]:
    """The trace's events, read from the records one by one, so that a long run needs little memory."""
    yield _name(_RUN, "process_name", "run")
    ends: _StepEnds = {}
    num_applied: Counter[int] = Counter()
    known: set[int] = set()
    for step in iterate_records(directory, StepRecord):
        is_applied = step.staleness >= 0
        num_applied[step.worker] += is_applied
        if not window.takes(step):
            continue
        if step.worker not in known:
            known.add(step.worker)
            yield from _introduce_worker(step.worker)
        if is_applied:
            ends[step.worker, num_applied[step.worker]] = step.time_s
        yield from _step(step)
    yield from _updates(directory, ends)
    for evaluation in iterate_records(directory, EvaluationRecord):
        if window.holds(evaluation.time_s):
            values = {name: _finite(value) for name, value in evaluation.metrics.items()}
            yield _instant(_RUN, "evaluation", evaluation.time_s, {"iteration": evaluation.iteration, **values})
    for event in iterate_records(directory, EventRecord):
        if window.holds(event.time_s):
            yield _instant(_RUN, event.name, event.time_s, {"who": event.who, "iteration": event.iteration})


def _finite(value: float) -> float | str:
    """JSON has no NaN, and a trace with one is not read."""
    return value if math.isfinite(value) else str(value)


def _step(step: StepRecord) -> Iterator[Event]:
    process = _FIRST_WORKER + step.worker
    parts = (("compute", step.compute_s), ("waiting", step.waiting_s), ("exchange", step.communication_s))
    at_s = step.time_s - sum(duration_s for _, duration_s in parts)
    details = {"step": step.step, "iteration": step.iteration, "staleness": step.staleness, "bytes": step.moved_bytes}
    if step.hidden_s > 0:
        began_s = at_s + max(0.0, step.compute_s - step.hidden_s)
        yield _slice(process, _HIDDEN, "exchange behind compute", began_s, step.hidden_s, {"step": step.step})
    for name, duration_s in parts:
        if duration_s > 0:
            yield _slice(process, _STEPS, name, at_s, duration_s, details)
        at_s += duration_s


def _updates(directory: Path, ends: _StepEnds) -> Iterator[Event]:
    known: set[int] = set()
    num_applied: Counter[tuple[int, int]] = Counter()
    for update in iterate_records(directory, UpdateRecord):
        num_applied[update.server, update.worker] += 1
        at_s = ends.get((update.worker, num_applied[update.server, update.worker]))
        if at_s is None:
            continue  # its step is not drawn, or was not recorded: the run ended first
        process = _FIRST_SERVER + update.server
        if update.server not in known:
            known.add(update.server)
            yield _name(process, "process_name", f"server {update.server}")
            yield _name(process, "thread_name", "updates")
        details = {"iteration": update.iteration, "worker": update.worker, "staleness": update.staleness}
        yield _instant(process, f"gradient of worker {update.worker}", at_s, details)


def _introduce_worker(worker: int) -> Iterator[Event]:
    process = _FIRST_WORKER + worker
    yield _name(process, "process_name", f"worker {worker}")
    yield _name(process, "thread_name", "steps")
    yield _name(process, "thread_name", "hidden exchange", thread=_HIDDEN)


def _name(process: int, kind: str, name: str, *, thread: int = _STEPS) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, at_s: float, duration_s: float, details: dict[str, Any]) -> Event:
    times = {"ts": _us(max(0.0, at_s)), "dur": _us(duration_s)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times, "args": details}


def _instant(process: int, name: str, at_s: float, details: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "p", "pid": process, "tid": _STEPS, "name": name, "ts": _us(at_s), "args": details}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _opened(path: Path, *, compressed: bool) -> TextIO:
    if not compressed:
        return path.open("w", encoding="utf-8")
    return io.TextIOWrapper(gzip.open(path, "wb", compresslevel=5), encoding="utf-8")
