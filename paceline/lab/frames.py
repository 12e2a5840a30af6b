"""A study's tidy tables: their columns, and the CSV files that hold them.

All times are seconds on the training clock, which leaves evaluation out; on the engine `virtual` it is a simulated one.
A target that was never reached is NaN in every `*_to_target` column, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from paceline import durable
from paceline.errors import UsageError

_EMPTY = {"int64": 0, "str": "", "bool": False}

Columns = Mapping[str, str]
"""Names of columns, in order, with their pandas types."""

QUANTITIES = (
    "time_to_target_s",
    "iterations_to_target",
    "samples_to_target",
    "worker_s_to_target",
    "cost_s_to_target",
    "samples_per_s",
    "iterations_per_s",
    "speedup",
    "efficiency",
    "last_metric",
)
"""What `summary` holds as mean over seeds, with `_low` and `_high` (least and greatest) and `_std` beside it."""

FINISHED, FAILED, MISSING = "finished", "failed", "missing"
_STRATEGY: Columns = {"study": "str", "script": "str", "strategy": "str"}
_COMBINATION: Columns = {**_STRATEGY, "workers": "int64"}
_TRIAL: Columns = {**_COMBINATION, "seed": "int64", "trial": "str"}

COLUMNS: Mapping[str, Columns] = {
    "trials": {
        **_TRIAL,
        "status": "str",
        "reason": "str",
        "setting": "str",  # script options that suited this strategy and number of workers best
        "engine": "str",  # of `virtual`, all seconds are of the simulated clock of `cluster`
        "cluster": "str",
        "unit": "str",  # of an iteration: update, gradient or round
        "servers": "int64",
        "iterations": "int64",
        "training_time_s": "float64",
        "samples": "int64",
        "samples_per_s": "float64",
        "iterations_per_s": "float64",
        "target": "str",
        "passed_targets": "str",  # on the way to it
        "hold": "int64",  # evaluations in a row that count as reaching it
        "reached": "bool",
        "time_to_target_s": "float64",
        "resolution_s": "float64",  # since the evaluation before: the target was reached somewhere in between
        "iterations_to_target": "float64",
        "samples_to_target": "float64",
        "worker_s_to_target": "float64",
        "server_s_to_target": "float64",
        "cost_s_to_target": "float64",  # of workers and servers
        "ended_by": "str",  # target, max-steps, max-time or script
        "metric": "str",  # what the two that follow are of
        "last_metric": "float64",
        "best_metric": "float64",
        "compute_share": "float64",
        "communication_share": "float64",
        "waiting_share": "float64",
        "hidden_share": "float64",
        "moved_bytes": "int64",
        "mean_staleness": "float64",
        "max_staleness": "int64",
        "used_by_others": "float64",  # the part of the launcher's cores, just before the run
    },
    "evaluations": {
        **_TRIAL,
        "iteration": "int64",
        "time_s": "float64",
        "samples": "int64",
        "moved_bytes": "int64",  # by all workers, about
        "metric": "str",
        "value": "float64",
    },
    "workers": {
        **_TRIAL,
        "worker": "int64",
        "steps": "int64",
        "compute_s": "float64",
        "communication_s": "float64",
        "waiting_s": "float64",
        "hidden_s": "float64",
        "moved_bytes": "int64",
    },
    "staleness": {**_TRIAL, "staleness": "int64", "count": "int64"},
    "pace": {**_TRIAL, "time_s": "float64", "iteration": "int64"},
    "summary": {
        **_COMBINATION,
        "unit": "str",  # of an iteration: update, gradient or round
        "engine": "str",
        "cluster": "str",
        "seeds": "int64",
        "failed": "int64",
        "reached": "int64",
        **{f"{quantity}{suffix}": "float64" for quantity in QUANTITIES for suffix in ("", "_low", "_high", "_std")},
        "resolution_s": "float64",
        "speedup_pairs": "int64",
        "base_strategy": "str",  # what speed-ups are measured against
        "base_workers": "int64",  # 0: there is none
    },
    "comparison": {
        **_COMBINATION,
        "quantity": "str",
        "typical": "float64",  # of a run in the middle of all seeds; runs that never arrived count as later ones
        "low": "float64",  # by chance it differs from the best by no more than from here ...
        "high": "float64",  # ... to here, over all combinations at once; NaN: no spread is known
        "may_be_best": "bool",
        "spread": "float64",  # standard deviation of runs of one combination and seed, of logarithms but for metrics
        "arrived": "int64",  # runs with a value
        "censored": "int64",  # runs that ended before they reached the target
    },
    "amdahl": {
        **_STRATEGY,
        "workers": "int64",  # as far as the fit goes: where the strategy was fastest
        "serial_fraction": "float64",
        "serial_fraction_low": "float64",
        "serial_fraction_high": "float64",
        "residual": "float64",
    },
}


@dataclass(frozen=True, eq=False)
class Frames:
    """The tables of one study."""

    trials: pd.DataFrame
    """One row a trial, failed and missing ones included."""
    evaluations: pd.DataFrame
    """One row an evaluation and metric."""
    workers: pd.DataFrame
    """One row a worker of a trial: where its time went."""
    staleness: pd.DataFrame
    """How many gradients of a trial had which staleness."""
    pace: pd.DataFrame
    """Iterations against time, thinned to a few hundred points a trial."""
    summary: pd.DataFrame
    """One row a strategy and number of workers: mean and spread over seeds."""
    amdahl: pd.DataFrame
    """One row a strategy that at least three numbers of workers brought to the target."""

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """One row a quantity and combination that has a value of it: whether it may be the best."""
        from paceline.lab import comparing  # which reads these tables

        return comparing.compare(self.trials, self.summary)

    def compared(self, quantity: str) -> pd.DataFrame:
        """The rows of `comparison` of a quantity, by strategy and workers."""
        rows = self.comparison[self.comparison["quantity"] == quantity]
        return rows.set_index(["strategy", "workers"], drop=False)

    def save(self, directory: Path) -> None:
        """Write each table as `directory/NAME.csv`, each as a whole."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in COLUMNS:
            with durable.whole(directory / f"{name}.csv") as partial:
                getattr(self, name).to_csv(partial, index=False, errors="backslashreplace")

    @classmethod
    def load(cls, directory: Path) -> "Frames":
        """The tables in a directory that `save` wrote. Raises UsageError, which names it, if one is missing or
        differs."""
        read = [field.name for field in fields(cls)]
        return cls(**{name: _load(directory / f"{name}.csv", COLUMNS[name]) for name in read})


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as the table of that name: its columns in order, each of its type. What a row lacks is 0, NaN or empty."""
    columns = COLUMNS[name]
    empty = {name: _EMPTY[kind] for name, kind in columns.items() if kind in _EMPTY}
    whole = [{name: _storable(value) for name, value in {**empty, **row}.items()} for row in rows]
    return pd.DataFrame(whole, columns=list(columns)).astype(dict(columns))


def _storable(value: Any) -> Any:
    """Text as a file would have it: what is no text becomes an escape. With pyarrow installed, pandas asks for it."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _load(path: Path, columns: Columns) -> pd.DataFrame:
    absent = {name: [""] for name, kind in columns.items() if kind == "float64"}
    try:
        frame = pd.read_csv(path, dtype=dict(columns), keep_default_na=False, na_values=absent)
    except OSError as error:
        raise UsageError(f"cannot read the table {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is no table of this version of Paceline: {error}") from None
    if "synchronous" in frame:  # tables of versions that had two units
        frame["synchronous"] = frame["synchronous"].map({True: "update", False: "gradient"})
        frame = frame.rename(columns={"synchronous": "unit"})
    if "value" in frame and "moved_bytes" not in frame:  # evaluations of versions that did not know
        frame.insert(list(columns).index("moved_bytes"), "moved_bytes", 0)
    if list(frame.columns) != list(columns):
        raise UsageError(f"{path} is no table of this version of Paceline: its columns are {', '.join(frame.columns)}")
    return frame
