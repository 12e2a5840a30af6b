"""`paceline slurm`: train a script as a job of SLURM."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options, exit_codes, jobs
from paceline.errors import RunFailed, UsageError
from paceline.scheduler import Asked, Job, array_script, job_script

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
_JOBS_OWN = ("resume", "address", "detach")
"""Options of `paceline run` that the job sets itself, or has no use for."""
_ARRAYS_OWN = ("point", "address")
"""The same of `paceline compare`."""


def slurm(
    context: typer.Context,
    script: common_options.Script,
    nodes: Annotated[int, typer.Option(help="Hosts of the job.", min=1)] = 1,
    cores: Annotated[int, typer.Option(help="Cores of each host.", min=1)] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each host.", min=0)] = 0,
    workers: Annotated[
        str | None, typer.Option(help="Processes that train.", show_default="one a GPU, or one a host", metavar="N")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Have an array of jobs do what `paceline compare` does, whose options are taken: a run a job, and one "
            "report.",
        ),
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="A further option of sbatch, as in time=01:00:00; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Result directory; the job's number is added, but to that of --compare, which goes on.",
            show_default="runs/slurm; of --compare studies/SCRIPT",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the job script here, and submit nothing.", metavar="FILE")
    ] = None,
) -> None:
    """Train SCRIPT as a job of SLURM: write its job script, and submit it.

    Options of `paceline run` are taken, too.

    Example: paceline slurm train.py --nodes 4 --cores 8 --strategy ps-asp:servers=4 --sbatch time=01:00:00 -- --lr 0.1
    """
    asked = Asked(script.stem, nodes, cores, gpus, _sbatch_options(sbatch or ()))
    rest = jobs.for_the_run(context)
    if compare:
        out = out or Path("studies") / script.stem
        text = _array(asked, script, [*(["--workers", workers] if workers else []), *rest], out)
        logs = f"{out}-%A_%a.log"
    else:
        out = out or Path("runs/slurm")
        given = jobs.require_a_run(script, rest, jobs_own=_JOBS_OWN)
        if workers is not None and not (workers.isdecimal() and int(workers) > 0):
            raise UsageError(f"--workers {workers}: give a number above 0; several are for --compare")
        text = job_script(
            Job(
                asked,
                command=[*_paceline(), "run", str(script), "--workers", workers or str(nodes * max(1, gpus)), *rest],
                directory=str(out),
                checkpoint=_checkpoint_file(),
                interrupted=exit_codes.INTERRUPTED,
                outlives_hosts="elastic" in given,
            )
        )
        logs = f"{out}-%j.log"
    if write is not None:
        write.write_text(text, encoding="utf-8")
        _make_room(logs)
        typer.echo(f"Wrote {write}; submit it with: {shlex.join(['sbatch', f'--output={logs}', str(write)])}")
        return
    said = _submitted(text, logs)
    results = f"the report to {out}" if compare else f"its results to {out}-JOB"
    typer.echo(f"{said}; its words go to {logs.replace('%j', 'JOB').replace('%A_%a', 'JOB_RUN')}, {results}")


def _array(asked: Asked, script: Path, given: Sequence[str], out: Path) -> str:
    """The job script of a study. The script's own arguments stay the last."""
    num_runs = jobs.require_a_study(script, given, jobs_own=_ARRAYS_OWN)
    command = [*_paceline(), "compare", str(script), "--out", str(out), *given]
    return array_script(asked, command, num_tasks=num_runs)


def _sbatch_options(given: Sequence[str]) -> dict[str, str]:
    options = {}
    for text in given:
        name, is_set, value = text.removeprefix("--").partition("=")
        if not name or any(character.isspace() for character in text):
            raise UsageError(f"--sbatch {text!r} is not as in time=01:00:00, without spaces")
        options[name] = value if is_set else ""
    return options


def _paceline() -> list[str]:
    """This very installation, since a job's environment may have another first."""
    return [str(Path(sys.executable).with_name("paceline"))]


def _checkpoint_file() -> str:
    from paceline.checkpoint import FILE_NAME

    return FILE_NAME


def _submitted(text: str, logs: str) -> str:
    """Gives the job to sbatch; returns its answer."""
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here; --write FILE writes the job script, to be submitted where SLURM is")
    _make_room(logs)
    done = subprocess.run(["sbatch", f"--output={logs}"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"sbatch does not take the job: {done.stderr.strip()}")
    return done.stdout.strip()


def _make_room(logs: str) -> None:
    """SLURM makes no directory for what a job says, and the job then fails without a word."""
    Path(logs).parent.mkdir(parents=True, exist_ok=True)
