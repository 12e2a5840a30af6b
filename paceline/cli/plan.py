"""`paceline plan`: what every strategy would do on a cluster, predicted."""

import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli import common_options
from paceline.cluster import reading as cluster_file
from paceline.engines.scripting import read_script
from paceline.errors import UsageError
from paceline.lab import words
from paceline.planner import failing, observing, wording
from paceline.planner.noise import NoiseScale
from paceline.planner.search import Plan, require_in_range
from paceline.planner.search import plan as search

_MEASURE = "measure"
PAGE_NAME, TABLE_NAME = "plan.html", "plan.csv"


def plan(
    script: common_options.Script,
    cluster: common_options.Cluster,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="To look at, as compare takes them, such as all-reduce:codec=int8.",
            metavar="A,B",
            show_default="all that move something different",
        ),
    ] = None,
    target_batch: Annotated[
        int | None,
        typer.Option(help="Samples of one step of all workers, divided among them.", show_default="the script's each"),
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(help="The most to look at.", show_default="what the cluster holds")
    ] = None,
    noise_scale: Annotated[
        str | None,
        typer.Option(
            help="Gradient noise scale in samples, or measure: then time to target decides, not samples per second.",
            metavar="N|measure",
        ),
    ] = None,
    steps: Annotated[
        float | None,
        typer.Option(help="To the target with one worker: makes times to target absolute, and has whole rounds count."),
    ] = None,
    staleness_penalty: Annotated[
        float, typer.Option(help="What an update of staleness costs at the target; 0: it does no harm.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Where plan.html and plan.csv go.", show_default="nowhere")] = None,
    arguments: common_options.Arguments = None,
) -> None:
    """Predict what a step of SCRIPT takes under every strategy, for every number of workers and servers of a cluster.

    The script runs for two steps (or some more, for its noise scale, or rows of tables) on the virtual engine; all else
    is computed.

    Example: paceline plan train.py --cluster commodity-10gbe --noise-scale measure --out plan
    """
    described = cluster_file.load(cluster)
    noise = _noise(noise_scale)
    require_in_range(
        described,
        max_workers=max_workers,
        target_batch=target_batch,
        has_noise=noise_scale is not None,
        single_steps=steps,
        staleness_penalty=staleness_penalty,
    )
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a directory for {PAGE_NAME} and {TABLE_NAME}; give another --out")
    program = read_script(script, arguments or ())
    Console(stderr=True).print(f"Running the first steps of {script} ...", markup=False, highlight=False)
    seen = observing.observe(program, measures_noise=noise_scale == _MEASURE)
    began_s = time.perf_counter()
    found = search(
        described,
        seen.work,
        strategies=None if strategies is None else [text for text in strategies.split(",") if text.strip()],
        max_workers=max_workers,
        target_batch=target_batch,
        noise=seen.noise or noise,
        single_steps=steps,
        staleness_penalty=staleness_penalty,
    )
    took_s = time.perf_counter() - began_s
    console = Console(soft_wrap=True)
    console.print(table(found))
    if described.can_fail:
        console.print(failures_table(found))
    for number, line in enumerate(wording.answer(found)):
        console.print(line, style="bold" if number == 0 else None, markup=False, highlight=False)
    console.print(f"To simulate it: {_simulating(found, script, cluster, arguments)}", markup=False, highlight=False)
    work = seen.work
    console.print(
        f"{words.quantity(work.parameter_bytes / 1e6)} MB of parameters, {work.samples} samples a worker and step; "
        f"{len(found.points)} combinations in {took_s:.1f} s.",
        highlight=False,
    )
    if out is not None:
        console.print(str(write(found, out, script=script.name, cluster=cluster)), markup=False, highlight=False)


def _simulating(found: Plan, script: Path, cluster: str, arguments: Sequence[str] | None) -> str:
    """The command that trains under what was found best, on the same cluster."""
    best = found.best
    command = ["paceline", "run", str(script), "--strategy", best.label, "--workers", str(best.prediction.workers)]
    command += ["--engine", "virtual", "--cluster", cluster]
    return shlex.join([*command, *(["--", *arguments] if arguments else [])])


def _noise(text: str | None) -> NoiseScale | None:
    if text is None or text == _MEASURE:
        return None
    try:
        samples = float(text)
    except ValueError:
        samples = math.nan
    if not 0 <= samples < math.inf:
        raise UsageError(f"--noise-scale {text!r} is neither {_MEASURE} nor a number of samples, such as 2000")
    return NoiseScale(samples)


def table(found: Plan) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    sooner = ["sooner"] if found.noise is not None else []
    for heading in ("strategy", "workers", "step, ms", "samples/s", *sooner, "efficiency", "binds"):
        is_text = heading in ("strategy", "binds")
        # Long texts are broken over lines, and no number is.
        shown.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for point in found.best_of_each:
        best = point.prediction
        rates = [words.quantity(best.step_s * 1e3), words.quantity(best.samples_per_s)]
        merit = [f"{words.ratio(point.merit)} x" if point.is_ranked else "unknown"] if sooner else []
        shown.add_row(point.label, str(best.workers), *rates, *merit, words.percent(best.efficiency), best.binding)
    return shown


def failures_table(found: Plan) -> Table:
    """A table of each strategy's best in spite of failures."""
    shown = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, title_justify="left")
    for heading in ("with failures", "workers", "gets over them", "saves every", "goodput", "takes", "price"):
        is_text = heading in ("with failures", "gets over them")
        shown.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for outcome in failing.Survey(found).best_of_each:
        way = "--elastic" if outcome.way == "elastic" else "restarts"
        every = "" if outcome.every is None else f"{outcome.every:,}"
        price = words.quantity(outcome.cost) if 0 < outcome.cost < math.inf else ""
        cells = [way, every, words.percent(outcome.goodput), wording.takes(outcome), price]
        shown.add_row(outcome.point.label, str(outcome.point.prediction.workers), *cells)
    return shown


def write(found: Plan, directory: Path, *, script: str, cluster: str) -> Path:
    """The page and the table; returns where the page is. Raises UsageError if they cannot be written."""
    from paceline.planner import page  # here, because plotly takes a while to load

    path = directory / PAGE_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found.frame.to_csv(directory / TABLE_NAME, index=False)
        path.write_text(page.render(found, script=script, cluster=cluster), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the plan to {directory}: {error.strerror}; give another --out") from None
    return path
