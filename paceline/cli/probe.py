"""`paceline probe`: measure a cluster and write it down for the virtual engine."""

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from paceline.cli import common_options, exit_codes
from paceline.cluster.description import Cluster
from paceline.probing import measuring


def probe(
    script: common_options.Script,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster (default: RAY_ADDRESS; else this machine alone).")
    ] = None,
    insecure: common_options.Insecure = False,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("cluster.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    steps: Annotated[int, typer.Option(help="Training steps that each host takes.")] = 50,
    max_time: Annotated[float, typer.Option(help="Seconds of training after which fewer steps will do.")] = 10.0,
    arguments: common_options.Arguments = None,
) -> None:
    """Measure a cluster with SCRIPT, and write the file that `run --engine virtual --cluster` simulates.

    Each host takes some training steps by itself, then every pair of hosts exchanges messages. Nothing of the training
    is kept. Two hosts take about half a minute, of which up to --max-time is training; each further host adds some
    seconds.

    Example: paceline probe train.py --address FIRST:6379 --out ours.toml -- --lr 0.1
    """
    console = Console(stderr=True)
    config = measuring.config_for(script, arguments or (), num_steps=steps, max_s=max_time)
    measuring.require_writable(out, force=force)
    try:
        with _shown(console) as stages:
            cluster = measuring.probe(config, address=address, audience=stages, insecure=insecure)
        measuring.write(cluster, out)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written", markup=False, highlight=False)
        raise typer.Exit(exit_codes.INTERRUPTED) from None
    _show(cluster, out)


def _show(cluster: Cluster, out: Path) -> None:
    console = Console(soft_wrap=True)
    compute = cluster.compute
    said = [f"a step takes {(compute.step_s or 0) * 1e3:.4g} ms, {compute.backward_share:.0%} of it backward"]
    said += [
        f"{hosts.count} host(s) of {hosts.cores} core(s) and {hosts.devices} device(s): "
        f"{hosts.bandwidth_gbit_per_s:.4g} Gbit/s, {hosts.latency_us:.4g} us, "
        f"memory {hosts.memory_gbyte_per_s:.3g} GB/s"
        for hosts in cluster.hosts
    ]
    for line in said:
        console.print(line, markup=False, highlight=False)
    console.print(
        f"Wrote {out}. Next: paceline run ... --engine virtual --cluster {out}", markup=False, highlight=False
    )


@contextmanager
def _shown(console: Console) -> "Iterator[_Stages]":
    """On a terminal a line that moves; elsewhere a line a stage. What Ray prints meanwhile is not shown."""
    status = console.status("starting Ray or connecting to it") if console.is_terminal else None
    with contextlib.redirect_stdout(io.StringIO()), status or contextlib.nullcontext():
        yield _Stages(console, status)


@final
@dataclass(frozen=True)
class _Stages:
    """Shows which stage a probe is at."""

    console: Console
    status: Status | None

    def on_stage(self, number: int, count: int, what: str) -> None:
        text = f"{number}/{count} {what}"
        if self.status is not None:
            self.status.update(text)
        else:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_output(self, who: str, line: str) -> None:
        self.console.print(Text.assemble((f"[{who}] ", "dim"), Text.from_ansi(line)), soft_wrap=True)
