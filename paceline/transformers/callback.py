"""The callback by which a Trainer trains under the strategy of a run."""

from typing import Any

import transformers
from transformers.trainer_utils import SaveStrategy

from paceline.accelerate.group import join_group
from paceline.errors import UsageError
from paceline.running.frameworks import join
from paceline.training.worker import Worker
from paceline.transformers.trainer import TrainerBody


class PacelineCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Has a Trainer, of whatever class, train under the strategy of the run that started the script:

        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.add_callback(PacelineCallback(trainer))

    What is evaluated, predicted and saved is the strategy's global model. Where the Trainer logs, evaluates or saves,
    all workers wait for each other, also where they run free between. Checkpoints are Transformers' own, with
    Paceline's part beside.

    What callbacks are told does not suffice for this. So the Trainer is given: its class becomes one of its own class
    and of `TrainerBody`, and its arguments learn of the run's workers. Where a strategy has no common step,
    `average_tokens_across_devices` is off: each worker's loss is a mean over its own tokens.

    Args:
        trainer: as the script has made it, before it trains or evaluates.

    Raises:
        UsageError: the run is of a kind that the Trainer cannot follow, or an argument cannot be honoured in it.
    """

    def __init__(self, trainer: Any) -> None:
        self._worker = join("train(resume_from_checkpoint=...)")
        if isinstance(trainer, TrainerBody):
            raise UsageError("this Trainer has a PacelineCallback already; make one for each Trainer")
        _tell_of_the_run(trainer.args, self._worker)
        own = type(trainer)
        trainer.__class__ = type(own.__name__, (TrainerBody, own), {"__module__": own.__module__})
        trainer.begin(self._worker, self)

    # --- the run's end ------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training is over when the run is. Workers that have come to its end at different steps log, evaluate and save
        together where the epoch ends, as it then does for all."""
        if not self._worker.is_over:
            return
        control.should_training_stop = True
        if self._worker.strategy.traits.lock_step:
            control.should_save |= args.save_strategy == SaveStrategy.STEPS
        else:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._worker.is_over:
            return
        control.should_training_stop = True
        if args.save_strategy == SaveStrategy.STEPS and not self._worker.strategy.traits.lock_step:
            control.should_save = True


def _tell_of_the_run(args: Any, worker: Worker) -> None:
    """The run's workers become torch.distributed's ranks, as which the arguments see them from now on."""
    if args.auto_find_batch_size:
        raise UsageError("auto_find_batch_size: workers would find other sizes; set per_device_train_batch_size")
    if args.load_best_model_at_end and worker.strategy.traits.num_servers:
        raise UsageError(
            "load_best_model_at_end changes parameters that the servers own; leave it out, and load "
            "trainer.state.best_model_checkpoint in the end, with from_pretrained"
        )
    if args.use_cpu and worker.device.type != "cpu":
        raise UsageError(f"use_cpu: this run is on {worker.device}; leave it out, and use --device cpu")
    join_group(worker)
    args.use_cpu = worker.device.type == "cpu"
    args.average_tokens_across_devices &= worker.strategy.traits.lock_step
