"""What a study's tables say, in plain words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd

from paceline.config import Target, rises
from paceline.lab import amdahl, binding, words
from paceline.lab.analysis import num_tried, reliability, surest
from paceline.lab.comparing import COST, METRIC, RATE, TIME
from paceline.lab.frames import FAILED, FINISHED, MISSING, Frames
from paceline.training import clock

Row: TypeAlias = pd.Series
"""A row of the summary: one strategy on one number of workers."""

_MAX_FAILURES = 8
_MAX_REASON = 200
_MAX_DISTURBED = 4
_BUSY = 0.2  # of the machine: less is what a system does anyhow, and hardly seen in the time of a step
_MAX_TIED = 3
_COMBINATION = ("strategy", "workers")
_MAY_BE = "; chance may explain their differences."
_ENDED = {"max-steps": "ended by --max-steps", "max-time": "ended by --max-time", "script": "the script ended", "": "ended"}
_NOTHING_KNOWN = "One run of each tells nothing of chance: give two seeds or more to learn which is first, and why."
_VISIBLE = 0.02  # of a time: what is smaller is not seen in two digits
_LARGE_RESIDUAL = 0.1  # of the best speed-up: beyond it, Amdahl's law does not describe what was measured


@dataclass(frozen=True)
class Verdict:
    """Sentences, the answer first."""

    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def judge(frames: Frames) -> Verdict:
    return Verdict(_Judge(frames).lines())


@dataclass(frozen=True)
class _Judge:
    frames: Frames

    @property
    def trials(self) -> pd.DataFrame:
        return self.frames.trials

    @property
    def summary(self) -> pd.DataFrame:
        return self.frames.summary

    def lines(self) -> list[str]:
        measured = self._rows(self.summary["seeds"] > 0)
        text = str(self.trials["target"].iloc[0])
        if not measured:
            answer = ["No trial has finished."]
        elif not text:
            answer = ["No target was set.", *self._rates(measured), *self._nearest(measured)]
        else:
            answer = self._to_target(measured, Target.parse(text))
        doubts = [*self._one_seed(measured), *self._disturbed()]
        return [*answer, *doubts, *self._diverged(), *self._failed(), *self._missing(), *self._simulated()]

    def _rows(self, chosen: pd.Series) -> list[Row]:
        return _each(self.summary[chosen])

    # --- with a target ----------------------------------------------------------------------------------------

    def _to_target(self, measured: Sequence[Row], target: Target) -> list[str]:
        goal = f"{target.metric} {target.value:g}"
        reached = [row for row in measured if row["reached"] > 0]
        if not reached:
            return [f"No run reached {goal}.", *self._nearest(measured), *self._rates(measured)]
        candidates = _each(surest(self.summary))
        first = self._first(candidates, TIME)
        return [
            *self._fastest(first, goal),
            *self._cheapest(first, candidates),
            *self._what_binds(first.row),
            *self._serial(first.row),
            *_unsure(reached),
            *self._never(first.row, [row for row in measured if row["reached"] == 0], goal),
        ]

    def _first(self, rows: Sequence[Row], quantity: str, *, most: bool = False) -> "_First":
        """The best of these rows, and those that may be better by what chance explains."""
        compared = self.frames.compared(quantity)
        may_be = [row for row in rows if bool(compared.loc[(row["strategy"], row["workers"]), "may_be_best"])]
        ordered = sorted(may_be, key=lambda row: row[quantity], reverse=most)
        is_known = len(rows) == 1 or bool(compared["spread"].notna().any())
        return _First(ordered[0], ordered[1:], is_known)

    def _fastest(self, first: "_First", goal: str) -> list[str]:
        row = first.row
        caveat = f", in {_seeds(row)} only" if reliability(row) < 1 else ""
        gain = f", {_gain(row)}" if _has_gain(row) else ""
        if not first.is_known:
            line = f"The shortest time to {goal}, of one run each: {_name(row)}{caveat}, {_time(row)}{gain}."
            return [line, _NOTHING_KNOWN, *_resolution(row)]
        if first.tied:
            return [f"No winner at {goal}: {first.listed(_time)}{_MAY_BE}", *_resolution(row)]
        return [f"Reach {goal} fastest with {_name(row)}{caveat}: {_time(row)}{gain}.", *_resolution(row)]

    def _cheapest(self, fastest: "_First", candidates: Sequence[Row]) -> list[str]:
        first = self._first(candidates, COST)
        if first.is_known and first.tied:
            return [f"Cheapest is one of {len(first.tied) + 1}: {first.listed(self._cost)}{_MAY_BE}"]
        is_same = first.row.name == fastest.row.name and not fastest.tied
        line = "It is also the cheapest" if is_same else f"Cheapest with {_name(first.row)}"
        return [f"{line}: {self._cost(first.row)}."]

    def _cost(self, row: Row) -> str:
        virtual = "virtual " if row["engine"] == clock.VIRTUAL else ""
        cost = f"{words.quantity(row['worker_s_to_target'])} {virtual}worker-seconds"
        server_s = self._trials_of(row)["server_s_to_target"].mean()
        return f"{cost} and {words.quantity(server_s)} {virtual}server-seconds" if server_s > 0 else cost

    def _trials_of(self, row: Row) -> pd.DataFrame:
        trials = self.trials
        return trials[(trials["strategy"] == row["strategy"]) & (trials["workers"] == row["workers"])]

    def _what_binds(self, fastest: Row) -> list[str]:
        """Past the best number of workers; where that is the largest, up to it."""
        strategy, best = str(fastest["strategy"]), int(fastest["workers"])
        tried = self._rows(self.summary["strategy"] == strategy)
        rows = {int(row["workers"]): row for row in tried if row["reached"] > 0}
        if max(row["reached"] for row in rows.values()) < 2:
            return []  # of one run each nobody knows what is chance
        more = min((n for n in rows if n > best), default=None)
        if more is not None:
            clause, change = self._bound(strategy, best, more), self._change(fastest, rows[more])
            if not (clause or change):
                return []
            said = ": ".join(part for part in (change, clause) if part) if change else f", {clause}"
            return [f"With {strategy} past {words.workers(best)}{said}."]
        untried = "" if any(row["workers"] > best for row in tried) else "; more were not tried"
        clause = self._bound(strategy, min(rows), best) if min(rows) < best else None
        return [f"With {strategy} from {min(rows)} to {words.workers(best)}, {clause}{untried}."] if clause else []

    def _bound(self, strategy: str, fewer: int, more: int) -> str | None:
        costs = [binding.costs_of(self.trials, strategy=strategy, workers=workers) for workers in (fewer, more)]
        if costs[0] is None or costs[1] is None:
            return None
        return str(binding.what_binds(costs[0], costs[1], binding.noise_in(self.trials)))

    def _unsure(reached: Sequence[Row]) -> list[str]:
    partly = [row for row in reached if reliability(row) < 1]
    return [f"{_name(row)} reached it in {_seeds(row)}, there after {_time(row)}." for row in partly]
