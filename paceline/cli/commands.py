"""The commands, each loaded when it is run: most import torch and Ray, which takes seconds."""

from typing import Any, final

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import cli
from paceline.cluster.reading import shipped

SUMMARIES = {
    "run": "Train SCRIPT under one strategy: real processes, on this machine or a Ray cluster, or on a simulated one.",
    "compare": "Run SCRIPT under every combination of strategy, workers and seed, and say which gets there first.",
    "plan": "Predict what a step of SCRIPT takes under every strategy, for every number of workers and servers of a "
    "cluster.",
    "scale": "Have more or fewer workers, or more servers, in a run with --elastic while it goes on.",
    "runs": "List the runs in a folder, and which of them are under way on this host.",
    "attach": "Show a run of this host until it ends, and exit as it does: with 0, 130 if it was stopped, else 1.",
    "stop": "Have a run that is under way on this host save itself and end, as Ctrl-C in its terminal does.",
    "chaos": "Strike processes of runs of SCRIPT at places of the protocol, and judge whether nothing is lost.",
    "report": "Make the report of a study again, from its records; of several studies, side by side in one report.",
    "timeline": "Write what every worker and server did when, from a run's records: open it at ui.perfetto.dev.",
    "demo": "Train a small conv net on digits on this machine, then on a simulated laboratory: which strategy is first "
    "where?",
    "doctor": "Check Python, torch, Ray, cores, memory, shared memory and the network, and say what to do where one is "
    "wrong.",
    "probe": "Measure a cluster with SCRIPT, and write the file that `run --engine virtual --cluster` simulates.",
    "attack": "Recover samples from their gradients (leak), tell from a gradient what its batch holds (property), or "
    "deceive a trained model by small changes of images (evade).",
    "serve": "Be the server of a federated run: clients join it with tickets, on machines and with data of their own.",
    "join": "Be a client of a federated run: train SCRIPT on this machine's data whenever the server asks for a turn.",
    "ticket": "Make tickets for clients of a federated run, or revoke one; a server that runs minds it at once.",
    "horovodrun": "Run a script of Horovod's, or any command, in so many processes: here, on RAY_ADDRESS's cluster, or "
    "by ssh.",
    "slurm": "Train SCRIPT as a job of SLURM: write its job script, and submit it.",
    "kubernetes": "Write the job of KubeRay that trains SCRIPT on a cluster of Kubernetes; kubectl submits it.",
    "migrate": "Print the diff that turns a script of Horovod's into Paceline's three lines. The script stays as it "
    "is.",
    "strategies": "List every strategy with its options, one line each; or show with whom workers exchange under a "
    "topology.",
}
"""A line a command, equal to the first of its own help. The list is shown without loading the commands."""

SCRIPTS_OWN = "paceline.scripts_own"
"""The key, in a context's `meta`, of the arguments after --."""

DATA_SETS = ("digits", "mnist", "fashion-mnist", "cifar10")
"""The names in `paceline.data`, which is not imported here because it loads torch."""


def what_can_be_named() -> str:
    """What the list of commands says below them."""
    return (
        f"Clusters, for --cluster: {', '.join(shipped())}; or a TOML file of your own.\n\n"
        f"Data sets, for paceline.data.load: {', '.join(DATA_SETS)}.\n\n"
        "Strategies: paceline strategies."
    )


@final
class Commands(TyperGroup):
    """Knows the commands by their summaries alone, and loads the one that is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest


def add_to(app: typer.Typer) -> None:
    """Have an app of the class `Commands` list them."""
    for name, summary in SUMMARIES.items():
        app.command(name, help=summary)(_not_loaded)


def load(name: str) -> TyperCommand:
    """The command itself: the function of its name in the module of its name."""
    alone = typer.Typer(add_completion=False)
    module = cli.load(f"paceline.cli.{name}")
    alone.command(name, cls=_Command, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(getattr(module, name))
    command = typer.main.get_command(alone)
    assert isinstance(command, _Command)
    return command


@final
class _Command(TyperCommand):
    """Says where the script's own options go when it is given one as if it were the command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[SCRIPTS_OWN] = args[args.index("--") + 1 :] if "--" in args else []
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            takes_script = any(parameter.name == "arguments" for parameter in self.params)
            # By name: the class is click's or typer's own, as typer's version has it.
            if takes_script and type(error).__name__ == "NoSuchOption":
                own: Any = error
                own.message += f". The script's own options go after --, as in: -- {own.option_name}"
            raise


def _not_loaded() -> None:
    raise AssertionError("a summary is not run")
