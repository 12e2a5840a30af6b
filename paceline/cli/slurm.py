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
from paceline.scheduler import Job, job_script

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
_JOBS_OWN = ("workers", "out", "resume", "address", "detach")
"""Options of `paceline run` that the job sets itself, or has no use for."""


def slurm(
    context: typer.Context,
    script: common_options.Script,
    nodes: Annotated[int, typer.Option(help="Hosts of the job.", min=1)] = 1,
    cores: Annotated[int, typer.Option(help="Cores of each host.", min=1)] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each host.", min=0)] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Processes that train.", show_default="one a GPU, or one a host", min=1)
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="A further option of sbatch, as in time=01:00:00; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Result directory; the job's number is added.")] = Path("runs/slurm"),
    write: Annotated[
        Path | None, typer.Option(help="Write the job script here, and submit nothing.", metavar="FILE")
    ] = None,
) -> None:
    """Train SCRIPT as a job of SLURM: write its job script, and submit it.

    Options of `paceline run` are taken, too.

    Example: paceline slurm train.py --nodes 4 --cores 8 --strategy ps-asp:servers=4 --sbatch time=01:00:00 -- --lr 0.1
    """
    rest = jobs.for_the_run(context)
    jobs.require_a_run(script, rest, jobs_own=_JOBS_OWN)
    text = job_script(
        Job(
            name=script.stem,
            nodes=nodes,
            cores=cores,
            gpus=gpus,
            options=_sbatch_options(sbatch or ()),
            command=[*_paceline(), "run", str(script), "--workers", str(workers or nodes * max(1, gpus)), *rest],
            directory=str(out),
            checkpoint=_checkpoint_file(),
            interrupted=exit_codes.INTERRUPTED,
        )
    )
    if write is not None:
        write.write_text(text, encoding="utf-8")
        typer.echo(f"Wrote {write}; submit it with: sbatch {shlex.quote(str(write))}")
        return
    typer.echo(_submitted(text, out))


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


def _submitted(text: str, out: Path) -> str:
    """Gives the job to sbatch; returns its answer."""
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here; --write FILE writes the job script, to be submitted where SLURM is")
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["sbatch", f"--output={out}-%j.log"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"sbatch does not take the job: {done.stderr.strip()}")
    return f"{done.stdout.strip()}; its words go to {out}-JOB.log, its results to {out}-JOB"
