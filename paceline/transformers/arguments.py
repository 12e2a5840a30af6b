"""Transformers' arguments in a run of Paceline's."""

from dataclasses import dataclass

import transformers

import paceline
from paceline.accelerate.group import join_group
from paceline.errors import UsageError
from paceline.running.frameworks import require_possible


@dataclass
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """Transformers' own, for which the run's workers are torch.distributed's ranks.

    Where a strategy has no common step, `average_tokens_across_devices` is off: each worker's loss is a mean over its
    own tokens, since no step belongs to all.

    Raises:
        UsageError: the run is of a kind that the Trainer cannot follow, or an argument cannot be honoured in it.
    """

    def __post_init__(self) -> None:
        worker = paceline.init()
        require_possible(worker.strategy)
        if self.auto_find_batch_size:
            raise UsageError("auto_find_batch_size: workers would find other sizes; set per_device_train_batch_size")
        if self.load_best_model_at_end and worker.strategy.traits.num_servers:
            raise UsageError(
                "load_best_model_at_end changes parameters that the servers own; leave it out, and load "
                "trainer.state.best_model_checkpoint in the end, with from_pretrained"
            )
        join_group(worker)
        if vars(self)["use_cpu"] and worker.device.type != "cpu":
            raise UsageError(f"use_cpu: this run is on {worker.device}; leave it out, and use --device cpu")
        self.use_cpu = worker.device.type == "cpu"
        self.average_tokens_across_devices &= worker.strategy.traits.lock_step
        super().__post_init__()
