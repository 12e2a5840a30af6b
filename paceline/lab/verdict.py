"""What a study's tables say, in plain words."""

import math
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
_ENDED = {
    "max-steps": "ended by --max-steps",
    "max-time": "ended by --max-time",
    "script": "the script ended",
    "": "ended",
}
_TOO_FEW = "; runs are too few to tell what is chance."
_MORE_SEEDS = "With more seeds the study says which is first, and why."
_VISIBLE = 0.02  # of a time: what is smaller is not seen in two digits
_LARGE_RESIDUAL = 0.1  # of the best speed-up: beyond it, Amdahl's law does not describe what was measured


@dataclass(frozen=True)
class Verdict:
    """Sentences, the answer first."""

    lines: list[str]
    clock: str = ""
    """Says that times are simulated, and of which cluster; empty where they are real."""

    def __str__(self) -> str:
        return "\n".join(self.said)

    @property
    def said(self) -> list[str]:
        """All of it, for whoever has not been told about the clock yet, as a report's reader has."""
        return [*self.lines, *filter(None, [self.clock])]


def judge(frames: Frames) -> Verdict:
    found = _Judge(frames)
    return Verdict(found.lines(), found.clock())


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
        return [*answer, *doubts, *self._diverged(), *self._failed(), *self._missing()]

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
        reasons = [*self._cheapest(first, candidates), *self._what_binds(first.row), *self._serial(first.row)]
        return [
            *self._fastest(first, goal),
            *(reasons if first.is_known else []),
            *_unsure(reached),
            *self._never(first.row, [row for row in measured if row["reached"] == 0], goal),
        ]

    def _first(self, rows: Sequence[Row], quantity: str, *, most: bool = False) -> "_First":
        """The best of these rows, and those that may be better by what chance explains."""
        compared = self.frames.compared(quantity)
        may_be = [row for row in rows if bool(compared.loc[(row["strategy"], row["workers"]), "may_be_best"])]
        ordered = sorted(may_be, key=lambda row: row[quantity], reverse=most)
        is_sure = len(ordered) == 1 and ordered[0]["reached"] > 1  # while others did not always arrive
        is_known = is_sure or bool(compared["spread"].notna().any())
        return _First(ordered[0], ordered[1:], is_known)

    def _fastest(self, first: "_First", goal: str) -> list[str]:
        row = first.row
        caveat = f", in {_seeds(row)} only" if reliability(row) < 1 else ""
        if first.tied and not first.is_known:
            measured = f"Measured, the shortest first: {first.listed(_time)}."
            return [f"No winner at {goal}{_TOO_FEW}", measured, _MORE_SEEDS, *_resolution(row)]
        if first.tied:
            return [f"No winner at {goal}: {first.listed(_time)}{_MAY_BE}", *_resolution(row)]
        if not first.is_known:
            return [f"{goal} was reached by {_name(row)}{caveat}: {_time(row)}.", *_resolution(row)]
        gain = f", {_gain(row)}" if _has_gain(row) and not self._is_disturbed(row) else ""
        return [f"Reach {goal} fastest with {_name(row)}{caveat}: {_time(row)}{gain}.", *_resolution(row)]

    def _cheapest(self, fastest: "_First", candidates: Sequence[Row]) -> list[str]:
        first = self._first(candidates, COST)
        if first.tied:
            return [f"Cheapest is one of {len(first.tied) + 1}: {first.listed(self._cost)}{first.why}"]
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

    def _change(self, best: Row, more: Row) -> str | None:
        """How the time to the target changed; None where it fell, as of a combination that got there less surely."""
        if more["time_to_target_s"] < best["time_to_target_s"]:
            return None
        compared = self.frames.compared(TIME)
        typical = compared.loc[(best["strategy"], best["workers"]), "typical"]
        has_risen = compared.loc[(more["strategy"], more["workers"]), "low"] > typical
        return " the time rises" if has_risen else " the time does not fall"

    def _serial(self, fastest: Row) -> list[str]:
        """Amdahl's law, where it describes what was measured."""
        strategy = fastest["strategy"]
        fits = self.frames.amdahl[self.frames.amdahl["strategy"] == strategy]
        if fits.empty:
            return []
        fit = fits.iloc[0]
        own = self.summary[(self.summary["strategy"] == strategy) & self.summary["speedup"].notna()]
        fitted = _each(own[own["workers"] <= fit["workers"]])
        best = max(row["speedup"] for row in fitted)
        limit = amdahl.speedup(float("inf"), serial_fraction=fit["serial_fraction"])
        if limit < best or fit["residual"] > _LARGE_RESIDUAL * best:
            return []
        bounds = ""
        if all(row["speedup_pairs"] > 1 for row in fitted):
            low, high = (words.percent(fit[f"serial_fraction_{bound}"]) for bound in ("low", "high"))
            bounds = f" ({low} to {high})" if low != high else ""
        part = words.percent(fit["serial_fraction"]) if fit["serial_fraction"] > 0 else "no part"
        extent = f": at most {words.ratio(limit)} times {_base(fastest)}" if fit["serial_fraction"] > 0 else ""
        return [
            f"Up to {words.workers(fit['workers'])}, {strategy} speeds up as if {part}{bounds} of the work were serial "
            f"(Amdahl's law){extent}."
        ]

    def _never(self, fastest: Row, rows: Sequence[Row], goal: str) -> list[str]:
        """Who never got there, and what ended it. A run that ended before the fastest arrived tells nothing of who is
        sooner."""
        if not rows:
            return []
        named, early = [], []
        for row in rows:
            own = self._trials_of(row)
            own = own[own["status"] == FINISHED]
            after = words.duration(own["training_time_s"].mean(), row["engine"])
            named.append(f"{_name(row)} (last {_last(row)}; {_ENDED[own['ended_by'].iloc[0]]} after {after})")
            early += [_name(row)] * bool(own["training_time_s"].max() < fastest["time_to_target_s"])
        unknown = [f"Ended too soon to tell whether it is slower: {words.listed(early)}."] if early else []
        return [f"Never reached {goal}: {words.listed(named)}.", *unknown]

    # --- without ----------------------------------------------------------------------------------------------

    def _rates(self, measured: Sequence[Row]) -> list[str]:
        known = [row for row in measured if row["samples_per_s"] > 0]
        if not known:
            return []
        return [self._first(known, RATE, most=True).sentence("Most samples a second", _rate)]

    def _nearest(self, measured: Sequence[Row]) -> list[str]:
        known = [row for row in measured if math.isfinite(row["last_metric"])]
        names = [name for name in self.trials["metric"].unique() if name]
        if not known or not names:
            return []
        target = str(self.trials["target"].iloc[0])
        is_rising = Target.parse(target).rising if target else rises(names[0])
        return [self._first(known, METRIC, most=is_rising).sentence(f"Best last {names[0]}", _last)]

    # --- remarks ----------------------------------------------------------------------------------------------

    def _one_seed(self, measured: Sequence[Row]) -> list[str]:
        """Names the compared strategies that only one seed measured, so that their spread is not known."""
        candidates = _each(surest(self.summary))
        alone = [row for row in candidates or measured if row["reached" if candidates else "seeds"] == 1]
        if not alone:
            return []
        if len(alone) == len(candidates or measured):
            return ["One seed only: the spread is not known, and a difference may be chance."] * (len(alone) == 1)
        named = words.listed([_name(row) for row in alone])
        return [f"One seed only of {named}: it is taken to vary as others do."]

    def _is_disturbed(self, row: Row) -> bool:
        """Whether its times, or those that its speed-up is measured against, are not the strategy's alone."""
        own, base = (row["strategy"], row["workers"]), (row["base_strategy"], row["base_workers"])
        used = self.trials.set_index(list(_COMBINATION))["used_by_others"]
        return bool((used[used.index.isin([own, base])] > _BUSY).any())

    def _disturbed(self) -> list[str]:
        """Trials that began beside other programs, whose times are not the strategy's alone."""
        trials = self.trials[self.trials["used_by_others"] > _BUSY]
        if trials.empty:
            return []
        bases = {(row["base_strategy"], row["base_workers"]) for row in _each(self.summary)}
        names = dict.fromkeys(zip(trials["strategy"], trials["workers"], strict=True))
        named = words.listed([words.combination(*name) for name in names], most=_MAX_DISTURBED)
        is_base = any(name in bases for name in names)
        against = " What speed-ups are measured against is among them." if is_base else ""
        return [
            f"Other programs kept up to {words.percent(trials['used_by_others'].max())} of the machine busy as trials "
            f"began, of {named}: their times mislead.{against} "
            "Run the study again on a quiet machine."
        ]

    def _diverged(self) -> list[str]:
        """Trials that trained to their end, and whose last evaluation is no number."""
        trials = self.trials[(self.trials["status"] == FINISHED) & ~np.isfinite(self.trials["last_metric"])]
        evaluations = self.frames.evaluations
        trials = trials[trials["trial"].isin(evaluations.loc[evaluations["metric"].isin(trials["metric"]), "trial"])]
        return [
            f"Diverged: {words.combination(*key)}, {_seeds_of(group)}: "
            f"the last {group['metric'].iloc[0]} is no finite number."
            for key, group in trials.groupby([*_COMBINATION], sort=False)
        ]

    def _failed(self) -> list[str]:
        """Each reason for a failure, once a combination."""
        failed = self.trials[self.trials["status"] == FAILED]
        groups = list(
            failed.assign(reason=failed["reason"].map(_first_line)).groupby([*_COMBINATION, "reason"], sort=False)
        )
        said = [
            f"Failed: {words.combination(strategy, workers)}, {_seeds_of(group)}: {reason}."
            for (strategy, workers, reason), group in groups[:_MAX_FAILURES]
        ]
        num_left = sum(len(group) for _, group in groups[_MAX_FAILURES:])
        return [*said, f"Failed: {num_left} more trials."] if num_left else said

    def _missing(self) -> list[str]:
        num = int((self.trials["status"] == MISSING).sum())
        return [f"{num} of {len(self.trials)} trials have not been run yet."] if num else []

    def clock(self) -> str:
        first = self.trials.iloc[0]
        if first["engine"] != clock.VIRTUAL:
            return ""
        return f"Times are virtual, those of the simulated cluster {first['cluster']}."


@dataclass(frozen=True)
class _First:
    """Who leads in a quantity."""

    row: Row
    tied: list[Row]
    """Others that chance may have put behind it."""
    is_known: bool
    """Whether it is known what chance explains; if not, all others are tied."""

    @property
    def why(self) -> str:
        """Ends a sentence that lists those who are tied."""
        return _MAY_BE if self.is_known else _TOO_FEW

    def listed(self, say: Callable[[Row], str]) -> str:
        return words.listed([f"{_name(row)} ({say(row)})" for row in (self.row, *self.tied)], most=_MAX_TIED)

    def sentence(self, what: str, say: Callable[[Row], str]) -> str:
        if self.tied:
            return f"{what}: {self.listed(say)}{self.why}"
        return f"{what} with {_name(self.row)}: {say(self.row)}."


def _each(summary: pd.DataFrame) -> list[Row]:
    return [row for _, row in summary.iterrows()]


def _name(row: Row) -> str:
    return words.combination(row["strategy"], row["workers"])


def _seeds(row: Row) -> str:
    return f"{row['reached']} of {num_tried(row)} seeds"


def _seeds_of(trials: pd.DataFrame) -> str:
    """`seed 3`, or `seeds 0 and 1`."""
    seeds = [str(seed) for seed in trials["seed"]]
    return f"seed{'s' * (len(seeds) > 1)} {words.listed(seeds)}"


def _first_line(reason: str) -> str:
    """The first line of an error's text, cut to what fits into a sentence."""
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "no reason known").rstrip(".")
    return first if len(first) <= _MAX_REASON else first[:_MAX_REASON].rstrip() + " ..."


def _time(row: Row) -> str:
    return words.duration(row["time_to_target_s"], row["engine"])


def _rate(row: Row) -> str:
    return f"{row['samples_per_s']:,.0f} samples/{clock.unit(row['engine'])}"


def _last(row: Row) -> str:
    return f"{row['last_metric']:.4g}"


def _has_gain(row: Row) -> bool:
    """Whether there is somebody else to be faster than."""
    return bool(
        row["speedup"] == row["speedup"]
        and (row["base_strategy"], row["base_workers"]) != (row["strategy"], row["workers"])
    )


def _base(row: Row) -> str:
    is_own = (row["base_strategy"], row["base_workers"]) == (row["strategy"], 1)
    return "one worker" if is_own else words.combination(row["base_strategy"], row["base_workers"])


def _gain(row: Row) -> str:
    """Its range is that of seeds that reached the target in both; what else it rests on is said."""
    basis = ""
    if row["speedup_pairs"] > 1:
        basis = f" ({words.ratio(row['speedup_low'])} to {words.ratio(row['speedup_high'])})"
    elif row["speedup_pairs"] == 0:
        basis = " by the mean times, as no seed reached it in both"
    elif row["reached"] > 1:
        basis = " by the one seed that reached it in both"
    return f"{words.ratio(row['speedup'])} times {_base(row)}{basis}"


def _resolution(fastest: Row) -> list[str]:
    """How finely its time is known, where that can be seen in the number."""
    if not fastest["resolution_s"] > _VISIBLE * fastest["time_to_target_s"]:
        return []
    return [
        f"A target is noticed at evaluations, here {words.duration(fastest['resolution_s'], fastest['engine'])} apart."
    ]


def _unsure(reached: Sequence[Row]) -> list[str]:
    partly = [row for row in reached if reliability(row) < 1]
    return [f"{_name(row)} reached it in {_seeds(row)}, there after {_time(row)}." for row in partly]
