"""The report of one study, or of several side by side: one HTML file that needs nothing else."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from paceline import durable
from paceline.errors import UsageError
from paceline.lab import html_page, losses, words
from paceline.lab.figures import Chart, Figure, Subject, figures
from paceline.lab.frames import FAILED, MISSING, Frames
from paceline.lab.html_page import chart_view
from paceline.lab.origin import origin
from paceline.lab.runner import TRIALS
from paceline.lab.spec import StudySpec
from paceline.lab.study import Study
from paceline.lab.summary_table import summary_table
from paceline.lab.virtual_cluster import VirtualCluster
from paceline.records import EventRecord, iterate_records
from paceline.training import clock
from paceline.training.holding import NUM_SAMPLES

FILE_NAME = "report.html"
_SIMULATED = "Gradients are real; the network and the clock are simulated. Figures and tables say so."


@dataclass(frozen=True)
class Page:
    name: str
    script: str
    frames: Frames
    answer: Sequence[str]
    """The verdict's sentences, the most important first."""
    command: str
    """Repeats the study."""
    facts: Mapping[str, str]
    """Machine, versions and settings."""
    losses: Mapping[str, Any] = field(default_factory=dict)
    """What failures took, as `losses.table` has it; empty: nobody could die."""


def write(directories: Sequence[Path], out: Path) -> None:
    """Make the report of the studies in these directories. Raises UsageError if a directory holds no study, two have
    the same name, or `out` cannot be written."""
    studies = [Study.open(directory) for directory in directories]
    names = [study.name for study in studies]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two studies are named {name}, as their directories are; rename one")
    for study in studies:
        study.save_tables()
    text = render([page_of(study) for study in studies])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with durable.whole(out) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {out}: {error.strerror}") from None


def page_of(study: Study) -> Page:
    # In the study's own directory there is nothing left to run.
    again = study.directory.resolve().with_name(f"{study.name}-again")
    command = shlex.join(study.spec.command(out=again))
    lost = losses.table(study.frames, losses.of_trials(study.directory, study.frames))
    return Page(study.name, study.spec.title, study.frames, study.verdict.lines, command, _facts(study), lost)


def render(pages: Sequence[Page]) -> str:
    """The report as HTML. Names, reasons and everything else from outside are shown as text, never taken as markup."""
    frames = [page.frames for page in pages]
    all_strategies = tuple(dict.fromkeys(name for frame in frames for name in frame.trials["strategy"]))
    all_counts = tuple(sorted({int(count) for frame in frames for count in frame.trials["workers"]}))
    subjects = [Subject(page.name, page.script, page.frames, all_strategies, all_counts) for page in pages]
    drawn = [_figure_view(figure, subjects) for figure in figures(subjects)]
    charts = {view["id"]: view["plot"] for figure in drawn for view in figure["charts"] if not view["is_missing"]}
    context = {
        "title": " and ".join(dict.fromkeys(page.script for page in pages)),
        "pages": [_page_view(page, subject) for page, subject in zip(pages, subjects, strict=True)],
        "figures": drawn,
        "virtual_note": _virtual_note(subjects),
    }
    return html_page.render("report.html.jinja", package="paceline.lab", plots=charts, context=context)


def _virtual_note(subjects: Sequence[Subject]) -> str:
    """What the page's header says of simulated clusters, whose times are no measurements; empty where all are
    measured."""
    simulated = [subject for subject in subjects if subject.is_virtual]
    if not simulated:
        return ""
    if len(subjects) == 1:
        return f"Simulated cluster {simulated[0].cluster}. {_SIMULATED}"
    named = words.listed([f"{subject.study} on the simulated cluster {subject.cluster}" for subject in simulated])
    real = words.listed([subject.study for subject in subjects if not subject.is_virtual])
    return f"{named}{f'; {real} on a real clock' if real else ''}. {_SIMULATED}"


def _page_view(page: Page, subject: Subject) -> dict[str, Any]:
    return {
        "name": page.name,
        "answer": page.answer or ["Nothing has finished yet."],
        "context": _context(page, subject),
        "machine": page.facts.get("Machine", ""),
        "summary": summary_table(
            page.frames, has_target=subject.target is not None, metric=subject.metric, seconds=subject.unit
        ),
        "losses": page.losses,
        "failures": _failures(page.frames.trials),
        "command": page.command,
        "facts": [{"name": name, "value": value} for name, value in page.facts.items()],
    }


def _context(page: Page, subject: Subject) -> str:
    """Under the answer: what it rests on."""
    trials = page.frames.trials
    seeds, counts = trials["seed"].nunique(), ", ".join(map(str, subject.counts))
    parts = [
        f"{page.script}: {len(subject.strategies)} strategies on {counts} workers, "
        f"{seeds} seed{'s' * (seeds != 1)} each; {len(subject.finished)} of {len(trials)} trials finished."
    ]
    if subject.target is not None:
        sign = "≥" if subject.target.rising else "≤"
        parts.append(f"Target: {subject.target.metric} {sign} {subject.target.value:g}, {_held(subject)}.")
    parts.append("Times leave evaluation out.")
    if (trials["setting"] != "").any():
        parts.append("Each has the script's options that suited it best, tuned on a seed that is not judged.")
    else:
        parts.append("The script's options were the same for all, whichever they suit best.")
    return " ".join(parts)


def _held(subject: Subject) -> str:
    """How surely it is known that a target was reached, and not touched by luck."""
    num = int(subject.finished["hold"].max()) if len(subject.finished) else 0
    if num > 1:
        return f"held for {num} evaluations in a row"
    is_known = NUM_SAMPLES in set(subject.frames.evaluations["metric"])
    return "at one evaluation" + ("" if is_known else " (on how many samples is not known: luck may pass it)")


def _failures(trials: pd.DataFrame) -> list[dict[str, str]]:
    without = trials[trials["status"].isin((FAILED, MISSING))]
    return [
        {"trial": row.trial, "status": row.status, "reason": row.reason or "not run yet"}
        for row in without.itertuples()
    ]


def _figure_view(figure: Figure, subjects: Sequence[Subject]) -> dict[str, Any]:
    """A figure as the template wants it: its charts in reading order, and how many columns they form."""
    charts = []
    for place, row in enumerate(figure.rows):
        for subject, chart in zip(subjects, row, strict=True):
            charts.append(_chart_view(figure, place, chart, subject, names_study=len(subjects) > 1))
    columns = len(subjects) if len(subjects) > 1 else max(1, min(2, len(charts)))
    texts = {"key": figure.key, "title": figure.title, "reading": figure.reading, "failure": figure.failure}
    return {**texts, "is_detail": figure.is_detail, "columns": columns, "charts": charts}


def _chart_view(
    figure: Figure, place: int, chart: Chart | None, subject: Subject, *, names_study: bool
) -> dict[str, Any]:
    study = subject.study if names_study else ""
    if chart is None:
        other = next((found.title for found in figure.rows[place] if found is not None), "")
        return {"is_missing": True, "heading": " · ".join(part for part in (study, other) if part)}
    position = figure.rows[place].index(chart)
    return {
        "is_missing": False,
        "id": f"{figure.key}-{place + 1}" + (f"-{position + 1}" if names_study else ""),
        "heading": " · ".join(part for part in (study, chart.title) if part),
        "plot": json.loads(chart.plot.to_json()),
        **chart_view(chart),
    }


def _facts(study: Study) -> dict[str, str]:
    """The study's settings, and what its trials wrote down of machines and versions."""
    spec = study.spec
    eval_every = spec.config(spec.seeds[0]).eval_every  # with what it is where none was asked for
    facts = {
        "Seeds": ", ".join(map(str, spec.seeds)),
        "Target": ", ".join(spec.targets) or "none",
        "Tuned": _tuned(study),
        "Attack": ", ".join(spec.attacks),
        "After the target": "training goes on" if spec.after_target == "continue" else "",
        "Engine": spec.engine,
        "Elastic": _elastic(spec),
        "Cluster": _cluster(spec.cluster) if spec.cluster is not None else "",
        "Evaluation": f"every {eval_every.words}" if eval_every else "at the end of each run",
        "Models kept to be judged": _keeping(study),
        "Budget": _budget(spec),
        "Script": f"{spec.script} (SHA-256 {spec.script_sha256[:12]}…)",
        "Left out": "; ".join(f"{out.variant.text} × {out.workers}: {out.reason}" for out in spec.left_out),
    }
    facts |= origin(study.directory)
    return {name: value for name, value in facts.items() if value}


def _tuned(study: Study) -> str:
    """What each combination was judged with."""
    rows = study.frames.trials[["strategy", "workers", "setting"]].drop_duplicates()
    return "; ".join(f"{s} × {n}: {setting}" for s, n, setting in rows.itertuples(index=False) if setting)


def _keeping(study: Study) -> str:
    """What it cost rank 0 to keep models under strategies that have nobody wait for an evaluation."""
    trials = study.frames.trials.set_index("trial")["training_time_s"].dropna()
    told = {
        trial: event.details
        for trial in trials.index
        for event in iterate_records(study.directory / TRIALS / trial, EventRecord)
        if event.name == "models_kept"
    }
    if not told:
        return ""
    share = max(details["took_s"] / max(trials[trial], 1e-9) for trial, details in told.items())
    left_out = sum(details["left_out"] for details in told.values())
    cost = f"{sum(details['kept'] for details in told.values()):,} copies, which took {share:.2%} of a run at most"
    return cost + (f"; {left_out:,} more had no room in memory and were not judged" if left_out else "")


def _cluster(cluster: VirtualCluster) -> str:
    about = cluster.content.about
    return f"{cluster.source}{f' ({about})' if about else ''}; all of its settings are in study.json"


def _elastic(spec: StudySpec) -> str:
    if spec.elastic is None:
        return ""
    replaced = f", and {spec.replace} workers in the place of others" if spec.replace else ""
    return f"{spec.elastic} workers{replaced}, under strategies that can go on without some"


def _budget(spec: StudySpec) -> str:
    steps = f"{spec.max_steps:,} iterations" if spec.max_steps is not None else ""
    time = f"{spec.max_time_s:g} {clock.unit(spec.engine)}" if spec.max_time_s is not None else ""
    return " or ".join(part for part in (steps, time) if part)
