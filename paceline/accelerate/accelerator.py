"""Accelerate's class, whose prepared optimizers exchange as the run's strategy says."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import accelerate
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.accelerate.group import join_group
from paceline.accelerate.loader import TrainingLoader, training_data
from paceline.accelerate.weights import apart, load_weights
from paceline.errors import UsageError
from paceline.running.frameworks import begin, join
from paceline.training.sharding import RoundBatches

_FILE = "paceline.bin"
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
Parameters = ParamSpec("Parameters")
Found = TypeVar("Found")


def _together(
    method: Callable[Concatenate["Accelerator", Parameters], Found],
) -> Callable[Concatenate["Accelerator", Parameters], Found]:
    """All workers' scripts are there, also under strategies that keep them in no step."""

    @wraps(method)
    def inside(self: "Accelerator", *arguments: Parameters.args, **settings: Parameters.kwargs) -> Found:
        with self.meeting(f"accelerator.{method.__name__}"):
            return method(self, *arguments, **settings)

    return cast(Callable[Concatenate["Accelerator", Parameters], Found], inside)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Trains a script of Accelerate's under the strategy of the run that started it: `paceline run script.py --strategy
    ps-asp --workers 4`.

    Of the DataLoaders that `prepare` is given together with optimizers, the first is the training data, or the first
    that shuffles where that one does not. It is divided as `worker.prepare` does; all others are Accelerate's to
    divide. A model that the script evaluates is the worker's own: where workers differ, `with
    accelerator.global_model():` puts the strategy's in its place. What needs all workers has them wait for each other,
    also where they run free between.

    Args:
        settings: Accelerate's own.

    Raises:
        UsageError: the run is of a kind that Accelerate's scripts cannot follow, or the script asks for something that
            the run cannot give.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._worker = join("accelerator.load_state(...)")
        join_group(self._worker)
        is_cpu = self._worker.device.type == "cpu"
        if settings.setdefault("cpu", is_cpu) != is_cpu:
            raise UsageError(
                f"cpu={settings['cpu']}: this run is on {self._worker.device}; leave it out, and use --device"
            )
        super().__init__(*arguments, **settings)
        if self.distributed_type not in _KINDS:
            raise UsageError(f"{self.distributed_type} is a strategy of its own; leave its plugin out")
        if self.split_batches or self.dispatch_batches:
            raise UsageError("split_batches, dispatch_batches: each worker takes batches of its own; leave them out")
        self.training_loader: TrainingLoader | None = None
        """`prepare` sets it. Its batches are those whose steps exchange gradients."""
        self.rounds: RoundBatches | None = None
        """The training data where there are clients, from `prepare` on."""
        self._beside: tuple[nn.Module | Optimizer, ...] = ()
        self._known: set[int] = set()  # optimizers that exchange
        self._loads_from: Path | None = None
        self.register_save_state_pre_hook(self._save_run)
        self.register_load_state_pre_hook(self._find_run)

    # --- preparing ----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        things = (*self._beside, *args)
        optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
        loaders = [thing for thing in things if isinstance(thing, DataLoader)]
        models = [thing for thing in things if isinstance(thing, nn.Module)] or list(self._models)
        replaced: dict[int, Any] = {}
        if optimizers and (loaders or not all(id(optimizer) in self._known for optimizer in optimizers)):
            if not models or not loaders or self.training_loader is not None:
                raise UsageError(
                    "give prepare all optimizers at once, with the training DataLoader, and after or with their "
                    "models: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
                )
            training = training_data(loaders)
            replaced[id(training)] = self._begin(models, optimizers, training)
        return super().prepare(*(replaced.get(id(thing), thing) for thing in args), device_placement=device_placement)

    @contextmanager
    def training(self, *things: nn.Module | Optimizer) -> Iterator[None]:
        """Inside, a DataLoader that is prepared by itself is the training data of these models and optimizers."""
        self._beside = things
        try:
            yield
        finally:
            self._beside = ()

    def _begin(self, models: list[nn.Module], optimizers: list[Optimizer], loader: DataLoader[Any]) -> TrainingLoader:
        batches = begin(self._worker, models, optimizers, loader)
        self._known = {id(optimizer) for optimizer in optimizers}
        self.rounds = batches if isinstance(batches, RoundBatches) else None
        device = self.device if self.device_placement else None
        self.training_loader = TrainingLoader(batches, device)
        return self.training_loader

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model without DistributedDataParallel: the optimizer exchanges."""
        return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode=True))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, TrainingLoader):
            return dataloader.begin_at(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    # --- training -----------------------------------------------------------------------------------------------

    def backward(self, loss: Any, **settings: Any) -> None:
        if self.training_loader is not None and self.num_processes > 1:
            self.training_loader.require_its_batch()
        super().backward(loss, **settings)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with self._worker.no_sync():
            yield

    def trigger_sync_in_backward(self, model: nn.Module) -> Any:  # a static method there
        raise UsageError("trigger_sync_in_backward is DistributedDataParallel's; run forward and backward in turn")

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        raise UsageError(
            "join_uneven_inputs is DistributedDataParallel's; leave it out: uneven data is divided as it is"
        )

    # --- what all workers do together ---------------------------------------------------------------------------

    def meeting(self, place: str) -> AbstractContextManager[None]:
        """Have workers meet as `worker.meeting` does, but not within a pass that is a round of clients."""
        if self.rounds is not None:
            self.rounds.require_between(place)
        return self._worker.meeting(place)

    @property
    def is_over(self) -> bool:
        """Whether the run's budget is used up, or it is asked to end: the training loader gives nothing more. All
        workers ask at the same place."""
        with self.meeting("accelerator.is_over"):
            return self._worker.is_over

    @_together
    def gather(self, tensor: Any) -> Any:
        return super().gather(tensor)

    @_together
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return super().gather_for_metrics(input_data, use_gather_object)

    @_together
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return super().reduce(tensor, reduction, scale)

    @_together
    def pad_across_processes(self, *arguments: Any, **settings: Any) -> Any:
        return super().pad_across_processes(*arguments, **settings)

    @_together
    def wait_for_everyone(self) -> None:
        super().wait_for_everyone()

    @_together
    def check_trigger(self) -> bool:
        return bool(super().check_trigger())

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        with self.meeting("accelerator.main_process_first"), super().main_process_first():
            yield

    # --- checkpoints --------------------------------------------------------------------------------------------

    @contextmanager
    def global_model(self) -> Iterator[None]:
        """Inside, prepared models are what the strategy evaluates and saves, on every worker. Collective call."""
        if self.training_loader is None:
            yield
            return
        with self.meeting("accelerator.global_model"), self._worker.global_model():
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state, in memory of its own: parameters are views of one buffer, of which files of safetensors would keep
        one."""
        return apart(super().get_state_dict(model, unwrap))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save weights in memory of their own: Accelerate leaves tensors of one buffer out of files of safetensors."""
        if safe_serialization and isinstance(obj, OrderedDict):  # as which it takes the state dict of a model
            obj = OrderedDict(apart(obj))
        super().save(obj, f, safe_serialization)

    def save_state(self, *arguments: Any, **settings: Any) -> Any:
        with self.global_model():
            return super().save_state(*arguments, **settings)

    def save_model(self, *arguments: Any, **settings: Any) -> Any:
        with self.global_model():
            return super().save_model(*arguments, **settings)

    def load_state(self, *arguments: Any, **settings: Any) -> Any:
        """Does what Accelerate's does. Call it before the first batch; training goes on at the place in the data where
        `save_state` was called."""
        if self.rounds is not None:
            self.rounds.begin_at()
        self._loads_from = None
        super().load_state(*arguments, **settings)
        if self.training_loader is not None and self._loads_from is not None:
            self._worker.load_run_state(self._loads_from.read_bytes())

    def _save_run(self, models: Any, weights: Any, directory: str) -> None:
        if self.training_loader is not None and (state := self._worker.run_state()):
            (Path(directory) / _FILE).write_bytes(state)

    def _find_run(self, models: Any, directory: str) -> None:
        path = Path(directory) / _FILE
        self._loads_from = path if path.exists() else None
        for number, model in enumerate(models):
            load_weights(model, Path(directory), number)
        models.clear()  # Accelerate has nothing left to load of them
