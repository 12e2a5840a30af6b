"""What a Trainer does otherwise in a run of Paceline's."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers
from accelerate import skip_first_batches

from paceline.accelerate import Accelerator
from paceline.accelerate.loader import TrainingLoader
from paceline.accelerate.weights import apart
from paceline.durable import whole
from paceline.errors import UsageError
from paceline.training.sharding import RoundBatches
from paceline.training.worker import Worker

_FILE = "paceline.bin"
_Base: Any = object


class TrainerBody(_Base):  # type: ignore[misc]
    """Stands before a Trainer's own class, whose optimizer then exchanges as the run's strategy says.

    Raises:
        UsageError: the script asks for something that the run cannot give.
    """

    accelerator: Accelerator
    _worker: Worker
    _callback: Any

    def begin(self, worker: Worker, callback: Any) -> None:
        """What the Trainer has made for one process is made anew."""
        self._worker, self._callback = worker, callback
        config = self.args.accelerator_config.gradient_accumulation_kwargs
        if config is not None:
            config.pop("num_steps", None)  # the Trainer has put it there, and refuses to find it
        self.args.__dict__.pop("_setup_devices", None)  # found where there were no workers
        device = self.args.device  # which finds them, before the accelerator does
        self.create_accelerator_and_postprocess()
        self._train_batch_size = self.args.train_batch_size
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        if self.place_model_on_device:
            self._move_model_to_device(self.model, device)

    def create_accelerator_and_postprocess(self) -> None:
        with patch.object(transformers.trainer, "Accelerator", Accelerator):
            super().create_accelerator_and_postprocess()

    # --- training -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The run's loader, which needs the optimizer: it is made here, and not after."""
        if self._callback not in self.callback_handler.callbacks:
            raise UsageError(
                "PacelineCallback(trainer) is not among the Trainer's callbacks, by which it notices the run's end: "
                "trainer.add_callback(PacelineCallback(trainer))"
            )
        self.create_optimizer()
        with self.accelerator.training(self.model, self.optimizer):
            loader = super().get_train_dataloader()
        batches = self.accelerator.training_loader
        if batches is None:
            raise UsageError(
                "the Trainer's own get_train_dataloader returns a loader that the run knows nothing of: let it return "
                "self.accelerator.prepare(loader), of a DataLoader over the whole data, which the run divides"
            )
        if self.args.average_tokens_across_devices and self._counts_tokens() and not batches.is_even:
            raise UsageError(
                "average_tokens_across_devices counts all workers' tokens alike, and the last batch of an epoch is "
                "smaller on some; set dataloader_drop_last=True, or average_tokens_across_devices=False"
            )
        if self.accelerator.rounds is not None:
            self._require_whole_rounds()
        return loader

    def _counts_tokens(self) -> bool:
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func)

    def _run_epoch(self, **settings: Any) -> None:
        rounds = self.accelerator.rounds
        if rounds is not None:
            rounds.require_turns_for_all()  # else a worker without a batch would end its training
            settings |= {"steps_in_epoch": len(rounds), "num_update_steps_per_epoch": self._num_steps(len(rounds))}
        with patch.object(transformers.trainer, "skip_first_batches", _begin_at):
            super()._run_epoch(**settings)
        if self._worker.is_over:  # there is no batch in another epoch
            self.control.should_training_stop = True

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        """All workers do so together: at the same of their own steps."""
        due = [work for work in ("log", "evaluate", "save") if getattr(self.control, f"should_{work}")]
        if not due:
            return
        with self.accelerator.meeting(f"the Trainer's place to {' and '.join(due)}"):
            if self.accelerator.rounds is not None and self.control.should_log:  # else it would be weighed again
                self._weigh(tr_loss)
            super()._maybe_log_save_evaluate(tr_loss, *arguments, **settings)

    # --- rounds of clients, each of which is an epoch -----------------------------------------------------------

    def _require_whole_rounds(self) -> None:
        args = self.args
        strategies = (args.logging_strategy, args.eval_strategy, args.save_strategy)
        if "steps" in strategies or args.logging_first_step or args.max_steps > 0 or args.num_train_epochs % 1:
            raise UsageError(
                "with clients an epoch is a round, in which workers take different numbers of steps: set "
                "logging_strategy, eval_strategy and save_strategy to 'epoch' or 'no', leave max_steps and "
                "logging_first_step out, and give num_train_epochs, a whole number of rounds"
            )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """This worker's steps of all rounds, by which schedulers count."""
        values = super().set_initial_training_values(args, dataloader)
        rounds = self.accelerator.rounds
        return values if rounds is None else (*values[:-1], self._num_steps_of(rounds, range(values[0])))

    def _num_steps_of(self, rounds: RoundBatches, numbers: Iterable[int]) -> int:
        return sum(self._num_steps(rounds.num_batches(number)) for number in numbers)

    def _num_steps(self, num_batches: int) -> int:
        return math.ceil(num_batches / int(self.args.gradient_accumulation_steps))

    def _weigh(self, tr_loss: torch.Tensor) -> None:
        """The sum of this worker's losses: the first worker reports the mean of these sums over its own steps, and is
        to report the mean over all workers' steps."""
        steps = self._worker.all_gather_object(self.state.global_step - self._globalstep_last_logged)
        tr_loss *= steps[0] * len(steps) / max(1, sum(steps))

    # --- the global model ---------------------------------------------------------------------------------------

    def evaluation_loop(self, *arguments: Any, **settings: Any) -> Any:
        with self.accelerator.global_model():
            return super().evaluation_loop(*arguments, **settings)

    def save_model(self, *arguments: Any, **settings: Any) -> None:
        with self.accelerator.global_model():
            super().save_model(*arguments, **settings)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights in memory of their own: parameters are views of one buffer, of which a file would keep one."""
        super()._save(output_dir, apart(self.model.state_dict() if state_dict is None else state_dict))

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save in one directory, also where the run's end finds workers at different steps. Paceline's part is there
        before what makes it look whole."""
        own_step = self.state.global_step
        with self.accelerator.global_model():
            self.state.global_step = self._worker.broadcast_object(own_step)
            state = self._worker.run_state()
            if state and not self.args.save_only_model:
                directory = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
                directory.mkdir(parents=True, exist_ok=True)
                with whole(directory / _FILE) as partial:
                    partial.write_bytes(state)
            super()._save_checkpoint(model, trial)
            self.state.global_step = own_step

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.rounds is not None:
            self.accelerator.rounds.begin_at()
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / _FILE
        if not path.exists():
            raise UsageError(
                f"{checkpoint} has no {_FILE}, as where a Trainer without Paceline has written it, or with "
                "save_only_model; begin a new run from its weights, with from_pretrained"
            )
        self._worker.load_run_state(path.read_bytes())


def _begin_at(loader: Any, num_batches: int) -> Any:
    if isinstance(loader, TrainingLoader):
        return loader.begin_at(num_batches)
    return cast(Any, skip_first_batches(loader, num_batches))
