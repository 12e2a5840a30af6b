"""Options that mean the same under several commands, with their help."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.reading import shipped


def _clusters(incomplete: str) -> list[str]:
    return [name for name in shipped() if name.startswith(incomplete)]


Script = Annotated[Path, typer.Argument(help="The training script.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="The script's own arguments, after --.", show_default=False)
]
Engine = Annotated[str, typer.Option(help="ray: real processes; virtual: real gradients on a simulated cluster.")]
SimulatedCluster = Annotated[
    str | None,
    typer.Option(
        help="What --engine virtual simulates: a TOML file or a shipped name.",
        metavar="FILE|NAME",
        autocompletion=_clusters,
    ),
]
Cluster = Annotated[
    str, typer.Option(help="A TOML file or a shipped name.", metavar="FILE|NAME", autocompletion=_clusters)
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use a Ray cluster that takes work from anybody, without a token.")
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        help="A variable of workers and servers, with this value, which results keep and show, or the one here; may be "
        "repeated.",
        metavar="NAME[=VALUE]",
    ),
]
EvalEvery = Annotated[
    str | None,
    typer.Option(
        help="From one evaluation to the next: 100 (iterations), 10000samples, 200batches or 30s.", metavar="INTERVAL"
    ),
]
EvalEveryAlike = Annotated[
    str | None,
    typer.Option(
        "--eval-every",
        help="From one evaluation to the next: 100 (batches of all workers together), 10000samples, 30s, 50iterations.",
        metavar="INTERVAL",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Deadline = Annotated[float, typer.Option(help="Seconds that any wait for a peer may take.")]
StartDeadline = Annotated[float, typer.Option(help="Seconds that workers and servers may take to start.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="What to reach; the run ends when evaluations hold it. May be repeated: the hardest ends it.",
        metavar="METRIC=VALUE",
    ),
]
Hold = Annotated[
    int | None,
    typer.Option(
        help="Evaluations in a row that must reach the target.",
        show_default="up to 3, by num_samples of the evaluation",
    ),
]
AfterTarget = Annotated[str, typer.Option(help="stop, or continue to the end of the budget.", metavar="stop|continue")]
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        "--attack",
        help="What hostile workers do, to try defences; may be repeated. docs/robustness.md lists them.",
        metavar="NAME:workers=N",
    ),
]
Track = Annotated[
    list[str] | None, typer.Option(help="Send numbers to mlflow or wandb; may be repeated.", metavar="SERVICE")
]

Elastic = Annotated[
    str | None,
    typer.Option(
        help="Workers may die, and the others go on while MIN are left; others may join, up to MAX.", metavar="MIN:MAX"
    ),
]
Replace = Annotated[
    int | None,
    typer.Option(help="Of an elastic run: so many times a new worker starts in a dead one's place.", show_default="0"),
]
