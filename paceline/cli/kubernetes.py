"""`paceline kubernetes`: write a job of KubeRay that trains a script."""

import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options, jobs
from paceline.elastic import Elastic
from paceline.errors import UsageError
from paceline.running.places import is_address
from paceline.scheduler import RayJob, ray_job_yaml
from paceline.scheduler.ray_job import RESULTS, SCRIPTS
from paceline.scheduler.ray_job_yaml import apply_command
from paceline.scheduler.script_alone import require_alone

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
_JOBS_OWN = ("workers", "out", "address", "insecure", "detach")
"""Options of `paceline run` that the job sets itself, or has no use for."""


def kubernetes(
    context: typer.Context,
    script: common_options.Script,
    image: Annotated[str, typer.Option(help="With Python, torch, Paceline and ray[default].", show_default=False)],
    nodes: Annotated[int, typer.Option(help="Hosts that train, a pod each.", min=1)] = 1,
    cores: Annotated[int, typer.Option(help="Cores of each host.", min=1)] = 1,
    memory: Annotated[str, typer.Option(help="Memory of each host.", metavar="QUANTITY")] = "4Gi",
    gpus: Annotated[int, typer.Option(help="GPUs of each host.", min=0)] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Processes that train.", show_default="one a GPU, or one a host", min=1)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the job.", show_default="the script's")] = None,
    namespace: Annotated[str, typer.Option(help="Of the job and of all that it names.")] = "default",
    token_secret: Annotated[
        str, typer.Option(help="The Secret with the cluster's token.", metavar="SECRET")
    ] = "ray-token",
    script_in_image: Annotated[
        bool, typer.Option("--script-in-image", help="SCRIPT is a path in the image; else a ConfigMap holds it.")
    ] = False,
    results_claim: Annotated[
        str | None,
        typer.Option(help="The PersistentVolumeClaim for results.", metavar="CLAIM", show_default="the head's disk"),
    ] = None,
    shared_claim: Annotated[
        bool,
        typer.Option(
            "--shared-claim",
            help="Mount the claim on the hosts that train, too, for what SCRIPT itself writes to /paceline/results; it "
            "has to be one of several nodes (ReadWriteMany).",
        ),
    ] = False,
    service_account: Annotated[str | None, typer.Option(help="Of the pods.", metavar="ACCOUNT")] = None,
    pull_secret: Annotated[
        str | None, typer.Option(help="The Secret with which the image is fetched.", metavar="SECRET")
    ] = None,
    head_cores: Annotated[int, typer.Option(help="Cores of the head, which starts the run.", min=1)] = 1,
    head_memory: Annotated[str, typer.Option(help="Memory of the head.", metavar="QUANTITY")] = "4Gi",
    ray_version: Annotated[
        str | None, typer.Option(help="The image's Ray.", metavar="VERSION", show_default="this machine's")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write here.", metavar="FILE", show_default="to the standard output")
    ] = None,
) -> None:
    """Write the job of KubeRay that trains SCRIPT on a cluster of Kubernetes; kubectl submits it.

    Options of `paceline run` are taken, too.

    Example: paceline kubernetes train.py --image team/train:1 --nodes 4 --gpus 1 --output job.yaml -- --lr 0.1
    """
    if output is not None and not str(output).isprintable():
        raise UsageError(f"--output {str(output)!r} has characters that cannot be printed; give another name")
    rest = jobs.for_the_run(context)
    given = jobs.require_a_run(script, rest, jobs_own=_JOBS_OWN, is_here=not script_in_image)
    if script_in_image and not script.is_absolute():
        raise UsageError(f"--script-in-image: {script} must be the whole path in the image, from / on")
    named = name if name is not None else script.stem
    path = str(script) if script_in_image else f"{SCRIPTS}/{script.name}"
    num_workers = workers or nodes * max(1, gpus)
    goes_on_there = "resume" in given and not is_address(str(given["resume"]))
    out = [] if goes_on_there else ["--out", f"{RESULTS}/{named}"]
    text = ray_job_yaml(
        RayJob(
            name=named,
            namespace=namespace,
            image=image,
            nodes=nodes,
            bounds=_bounds(given.get("elastic"), nodes, num_workers),
            cores=cores,
            memory=memory,
            gpus=gpus,
            head_cores=head_cores,
            head_memory=head_memory,
            ray_version=ray_version if ray_version is not None else metadata.version("ray"),
            command=["paceline", "run", path, "--workers", str(num_workers), *out, *rest],
            script=None if script_in_image else _whole(script),
            token_secret=token_secret,
            service_account=service_account,
            pull_secret=pull_secret,
            results_claim=results_claim,
            shares_claim=shared_claim,
        ),
        file=str(output or "-"),
    )
    _deliver(text, output)


def _bounds(elastic: str | None, nodes: int, num_workers: int) -> tuple[int, int]:
    """How few and how many hosts an elastic run may have, if each keeps as many workers as at the start.

    Raises:
        UsageError: the run could not start with its workers.
    """
    if elastic is None:
        return nodes, nodes
    asked = Elastic.parse(elastic)
    asked.require(num_workers=num_workers)
    each = math.ceil(num_workers / nodes)
    return math.ceil(asked.at_least / each), max(nodes, math.ceil(asked.at_most / each))


def _deliver(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        print(f"Submit it with: {apply_command('-')}", file=sys.stderr)
        return
    try:
        output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"Wrote {output}; submit it with: {apply_command(str(output))}")


def _whole(script: Path) -> tuple[str, str]:
    """The script's name and its text. Raises UsageError if these are not all that it needs."""
    text = script.read_text(encoding="utf-8-sig")
    require_alone(script, text)
    return script.name, text
