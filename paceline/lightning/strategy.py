"""Lightning's strategy that has a run of Paceline's exchange what its workers train."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from paceline.errors import UsageError
from paceline.lightning.batches import Rounds, TrainingBatches
from paceline.lightning.world import WorldBody
from paceline.running.frameworks import agree_on, begin, join, require_strategy
from paceline.training.sharding import RoundBatches, ShardedLoader

_KEY = "paceline"
"""The key of what Lightning's checkpoints hold for Paceline."""
_JOB = "paceline_job"
"""The key of the number of SLURM's job that has saved a checkpoint."""


class StrategyBody(WorldBody):
    """Trains an unchanged LightningModule under the strategy of the run that started the script.

    `Trainer(strategy=PacelineStrategy())` in a script that `paceline run script.py --strategy ps-asp --workers 4`
    starts. `max_steps` and epochs of the Trainer count each worker's steps; the run's own budget ends training as well.
    A batch is what each worker takes; training data is divided as `worker.prepare` does.

    Validation, tests and checkpoints are of the strategy's global model. They, and metrics of `sync_dist=True`, have
    workers wait for each other, also where these run free between them.

    Args:
        strategy: as `paceline run --strategy` takes it, to be the run's; none: whatever the run has.

    Raises:
        UsageError: the run has another strategy, or one that Lightning's loop cannot follow. Later: the Trainer asks
            for what the run cannot give.
    """

    environment: Any
    """The class of the cluster's environment."""
    callback: Any
    """The class of Lightning's callbacks."""
    accelerator: Any
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, strategy: str | None = None, **plugins: Any) -> None:
        self._worker = join("fit(ckpt_path=...)")
        require_strategy(self._worker, strategy)
        self._in_place = ExitStack()
        self._asked_for: tuple[Any, TrainingBatches] | None = None  # before there were optimizers
        self._loaded: Tensor | None = None  # the run's part of the checkpoint to go on from
        self._begun_from: str | None = None  # what the job that is started again has saved
        self._state = b""  # of the one that is being saved
        self._has_ended = False
        self._optimizer_states: dict[int, dict[str, Any]] = {}
        # The global model is there before other callbacks put weights of their own in its place, which they take away
        # before it goes. Lightning calls its strategy last, at both.
        self._first = self.callback()
        for stage in ("validation", "test", "predict"):
            setattr(self._first, f"on_{stage}_start", self._put_global_model_in_place)
        if self._worker.strategy.traits.lock_step:  # elsewhere workers have no common last batch
            self._first.on_train_batch_end = self._save_for_a_job
        self._first.on_train_end = self._end_training
        super().__init__(cluster_environment=self.environment(self._worker), **plugins)

    # --- training -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise UsageError(
                "Trainer(sync_batchnorm=True): workers keep batch norm's statistics of their own; leave it out"
            )
        super().setup(trainer)
        if self._first not in trainer.callbacks:
            trainer.callbacks.insert(0, self._first)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):  # it would ask torch.distributed, which knows nothing of the run
                module.distributed_available_fn = lambda: self._worker.size > 1
                # A function, of which a copy of the module has the same: a method would be copied with this strategy.
                module.dist_sync_fn = lambda tensor, group=None: self._gathered(tensor)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if self._is_prepared or self._asked_for is not None:
            raise UsageError(
                "Paceline's run takes one training loader, once: join data sets into one "
                "(torch.utils.data.ConcatDataset), leave reload_dataloaders_every_n_epochs out, and call fit once a run"
            )
        if self.optimizers:
            return self._begun(dataloader)
        # configure_optimizers asks how many batches there are (estimated_stepping_batches).
        if self._worker.strategy.participation() is not None:
            raise UsageError(
                "rounds of clients differ in length, so that nobody knows their steps before the first: leave "
                "trainer.estimated_stepping_batches out, and give schedulers a number of your own"
            )
        part = ShardedLoader(
            dataloader,
            rank=self._worker.rank,
            size=self._worker.size,
            seed=0,
            gather=self._worker.all_gather_object,
            takes_equal_steps=self._worker.strategy.traits.takes_equal_steps,
        )
        self._asked_for = dataloader, TrainingBatches(part, trainer, on_end=self._stop_if_over)
        return self._asked_for[1]

    def on_train_start(self) -> None:
        if self._asked_for is not None and not self._is_prepared:
            dataloader, batches = self._asked_for
            batches.become(self._begun(dataloader))

    def _begun(self, dataloader: Any) -> Any:
        """Prepare, now that there are optimizers; returns what Lightning is to loop over."""
        trainer = self.lightning_module.trainer
        if self._averages and self._worker.strategy.traits.servers_own_model:
            raise UsageError(
                "WeightAveraging and StochasticWeightAveraging leave their average in the model, which servers would "
                "undo, since it is theirs: use all-reduce, gossip or local updates"
            )
        batches = begin(self._worker, [self.lightning_module], self.optimizers, dataloader)
        self._is_prepared = True
        if isinstance(batches, RoundBatches):
            self._rounds = batches
            if self._loaded is not None:
                batches.begin_at()
            return Rounds(batches, trainer, on_end=self._stop_if_over)
        if self._loaded is not None:
            self._worker.load_run_state(self._loaded.numpy().tobytes())
        return TrainingBatches(batches, trainer, on_end=self._stop_if_over)

    def training_step(self, *arguments: Any, **settings: Any) -> Any:
        self._is_in_step = True
        try:
            result = super().training_step(*arguments, **settings)
        finally:
            self._is_in_step = False
        self._end_step()
        return result

    def optimizer_step(self, *arguments: Any, **settings: Any) -> Any:
        result = super().optimizer_step(*arguments, **settings)
        if not self._is_in_step:  # under manual optimization other optimizers may step after this one
            self._end_step()
        return result

    def _end_step(self) -> None:
        """Before Lightning looks whether it is to stop, so that all workers validate alike before they do."""
        self._worker.end_step()
        self._stop_if_over()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._worker.no_sync():
            yield

    def _save_for_a_job(self, trainer: Any, *_: Any) -> None:
        """When a job of SLURM is told that its time is over, as Lightning does there by itself: started again, it goes
        on from this file unless the script names another one."""
        if self._has_ended or not self._worker.is_over or self._rounds is not None:
            return
        self._has_ended = True
        with self._all("the run's end"):
            is_told = any(self._worker.all_gather_object(_job() is not None and self._worker.is_asked_to_stop))
        if is_told:
            trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))

    # --- the global model ---------------------------------------------------------------------------------------

    @contextmanager
    def _global_model(self) -> Iterator[None]:
        self._require_between_rounds("the global model")
        with self._worker.global_model():
            for average in self._averages:
                agree_on(average)
            yield

    @property
    def _averages(self) -> list[torch.nn.Module]:
        """The models in which Lightning's callbacks average this worker's weights over time."""
        kept = [getattr(callback, "_average_model", None) for callback in self.lightning_module.trainer.callbacks]
        return [average for average in kept if isinstance(average, torch.nn.Module)]

    def _end_training(self, trainer: Any, module: Any) -> None:
        self._save_for_a_job(trainer)
        if self._begun_from is not None:  # Lightning would begin what comes next from it
            self.remove_checkpoint(self._begun_from)
        if self._averages:
            with self._global_model():  # which has them agree
                pass

    def _put_global_model_in_place(self, trainer: Any, module: Any) -> None:
        if self._is_prepared:
            self._in_place.enter_context(self._global_model())

    def on_validation_end(self) -> None:
        self._in_place.close()
        self._stop_if_over()

    on_test_end = on_predict_end = on_validation_end

    def load_model_state_dict(self, *arguments: Any, **settings: Any) -> None:
        """After training, `test(ckpt_path="best")` and the like are of what they load; then the workers' models are
        back, which the strategy goes by."""
        if self._is_prepared:
            self._in_place.enter_context(self._global_model())
        super().load_model_state_dict(*arguments, **settings)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._is_prepared:
            return cast(dict[str, Any], super().lightning_module_state_dict())
        with self._global_model():
            self._state = self._worker.run_state()
            self._optimizer_states = {id(own): self._worker.optimizer_state(own) for own in self.optimizers}
            return {name: _copied(value) for name, value in super().lightning_module_state_dict().items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        own = getattr(optimizer, "_optimizer", optimizer)  # of Lightning's wrapper
        return self._optimizer_states.get(id(own)) or own.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._state and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = torch.frombuffer(bytearray(self._state), dtype=torch.uint8)
        if (job := _job()) is not None:
            checkpoint[_JOB] = job
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **settings: Any) -> dict[str, Any]:
        checkpoint = cast(dict[str, Any], super().load_checkpoint(checkpoint_path, *arguments, **settings))
        trainer, job = self.lightning_module.trainer, _job()
        if job is not None and str(checkpoint_path) == trainer._checkpoint_connector._hpc_resume_path:
            if checkpoint.get(_JOB) != job:
                raise UsageError(
                    f"this is job {job}, and {checkpoint_path}, from which Lightning begins by itself, is of job "
                    f"{checkpoint.get(_JOB) or 'unknown'}: give Trainer(default_root_dir=...) a directory of this "
                    "job's own; to go on from that file, move it elsewhere and name it in fit(ckpt_path=...)"
                )
            self._begun_from = str(checkpoint_path)
        self._loaded = checkpoint.get(_KEY)
        return checkpoint

    def teardown(self) -> None:
        """The model stays where it is: the run evaluates and saves it when the script is done."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _job() -> str | None:
    """Which job of SLURM this is, the same when it is queued again; none where it is no job."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
