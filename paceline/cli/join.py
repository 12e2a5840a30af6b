"""`paceline join`: be a client of a federated run."""

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from paceline.cli import common_options, exit_codes
from paceline.config import DeviceChoice, RunConfig


def join(
    script: common_options.Script,
    ticket: Annotated[
        Path, typer.Option(help="The file that the server's owner has given to this client.", show_default=False)
    ],
    address: Annotated[
        str | None,
        typer.Option(help="Where the server is.", metavar="HOST[:PORT]", show_default="as the ticket says"),
    ] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Take part only if the server learns sums of updates alone (secure=masks).")
    ] = False,
    deadline: Annotated[
        float, typer.Option(help="Seconds without a word of the server's after which to end.")
    ] = 3600.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of what this client draws.", show_default="drawn, so that nobody knows its noise"),
    ] = None,
    device: common_options.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where this client keeps its records and its state.", show_default="a directory of its own under runs/"
        ),
    ] = None,
    arguments: common_options.Arguments = None,
) -> None:
    """Be a client of a federated run: train SCRIPT on this machine's data whenever the server asks for a turn.

    Example: paceline join train.py --ticket client-3.ticket -- --data /srv/images
    """
    config = RunConfig(deadline_s=deadline, device=cast(DeviceChoice, device))
    from paceline.running import serving

    console = Console(stderr=True, soft_wrap=True)
    try:
        result = serving.join(
            script,
            ticket=ticket,
            arguments=arguments or (),
            address=address,
            secure=secure,
            config=config,
            seed=seed,
            out=out,
            say=lambda line: console.print(line, markup=False, highlight=False),
        )
    except KeyboardInterrupt:
        console.print("interrupted; the same command takes part again", markup=False, highlight=False)
        raise typer.Exit(exit_codes.INTERRUPTED) from None
    console.print(f"the run is over; what it came to is in {result.directory}", markup=False, highlight=False)
