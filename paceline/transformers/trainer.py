"""Transformers' Trainer, whose optimizer exchanges as the run's strategy says."""

from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers
from accelerate import skip_first_batches
from transformers.trainer_utils import SaveStrategy

import paceline
from paceline.accelerate import Accelerator
from paceline.accelerate.loader import TrainingLoader
from paceline.accelerate.weights import apart
from paceline.durable import whole
from paceline.errors import UsageError
from paceline.transformers.arguments import TrainingArguments

_FILE = "paceline.bin"


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Trains under the strategy of the run that started the script: `paceline run script.py --strategy ps-asp`.

    What is evaluated, predicted and saved is the strategy's global model. Where it logs, evaluates or saves, all
    workers wait for each other, also where they run free between. Checkpoints are Transformers' own, with Paceline's
    part beside.

    Args:
        settings: Transformers' own. `args` are `paceline.transformers.TrainingArguments`.

    Raises:
        UsageError: the script asks for something that the run cannot give.
    """

    accelerator: Accelerator

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._worker = paceline.init()
        super().__init__(*arguments, **settings)
        if not isinstance(self.args, TrainingArguments):
            raise UsageError(
                "Trainer(args=...): take them from paceline, which tells Transformers of the run's workers: "
                "from paceline.transformers import Trainer, TrainingArguments"
            )
        self.add_callback(_EndOfRun())

    def create_accelerator_and_postprocess(self) -> None:
        with patch.object(transformers.trainer, "Accelerator", Accelerator):
            super().create_accelerator_and_postprocess()

    # --- training -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The run's loader, which needs the optimizer: it is made here, and not after."""
        self.create_optimizer()
        with self.accelerator.training(self.model, self.optimizer):
            loader = super().get_train_dataloader()
        if self.args.average_tokens_across_devices and self._counts_tokens() and not loader.is_even:
            raise UsageError(
                "average_tokens_across_devices counts all workers' tokens alike, and the last batch of an epoch is "
                "smaller on some; set dataloader_drop_last=True, or average_tokens_across_devices=False"
            )
        return loader

    def _counts_tokens(self) -> bool:
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func)

    def _run_epoch(self, *arguments: Any, **settings: Any) -> None:
        with patch.object(transformers.trainer, "skip_first_batches", _begin_at):
            super()._run_epoch(*arguments, **settings)

    def _maybe_log_save_evaluate(self, *arguments: Any, **settings: Any) -> None:
        """All workers do so together: at the same of their own steps."""
        due = [work for work in ("log", "evaluate", "save") if getattr(self.control, f"should_{work}")]
        if not due:
            return
        with self._worker.meeting(f"the Trainer's place to {' and '.join(due)}"):
            super()._maybe_log_save_evaluate(*arguments, **settings)

    # --- the global model ---------------------------------------------------------------------------------------

    def evaluation_loop(self, *arguments: Any, **settings: Any) -> Any:
        with self.accelerator.global_model():
            return super().evaluation_loop(*arguments, **settings)

    def save_model(self, *arguments: Any, **settings: Any) -> None:
        with self.accelerator.global_model():
            super().save_model(*arguments, **settings)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """With weights in memory of their own: parameters are views of one buffer, of which a file would keep one."""
        super()._save(output_dir, apart(self.model.state_dict() if state_dict is None else state_dict))

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """In one directory, also where the run's end finds workers at different steps. Paceline's part is there
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


class _EndOfRun(transformers.TrainerCallback):  # type: ignore[misc]
    """Training is over when the run is. Workers that have come to its end at different steps log, evaluate and save
    together where the epoch ends, as it then does for all."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        worker = paceline.init()
        if not worker.is_over:
            return
        control.should_training_stop = True
        if not worker.strategy.traits.lock_step:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        worker = paceline.init()
        if not worker.is_over:
            return
        control.should_training_stop = True
        if args.save_strategy == SaveStrategy.STEPS and not worker.strategy.traits.lock_step:
            control.should_save = True


def _begin_at(loader: Any, num_batches: int) -> Any:
    if isinstance(loader, TrainingLoader):
        return loader.begin_at(num_batches)
    return cast(Any, skip_first_batches(loader, num_batches))
