"""Options that are for the checkpoints and evaluations of Paceline, which some scripts have themselves instead."""

from collections.abc import Mapping

from paceline.config import RunConfig
from paceline.errors import UsageError

CHECKPOINTS = {
    "--checkpoint-every": "checkpoint_every",
    "--keep-best": "keep_best",
    "--copy-checkpoints": "copy_checkpoints",
}
"""Need Paceline's checkpoints; by their names in a run's config."""
MODEL = CHECKPOINTS | {"--target": "target", "--eval-every": "eval_every", "--elastic": "elastic"}
"""Need a model that `prepare` was given."""


def refuse(options: Mapping[str, str], config: RunConfig, *, is_resumed: bool, why: str) -> None:
    """Raise UsageError if the run is given one of the options, or goes on from a checkpoint; `why` follows the option's
    name."""
    given = [option for option, name in options.items() if getattr(config, name) is not None]
    for option in given + ["--resume"] * is_resumed:
        raise UsageError(f"{option} {why}")
