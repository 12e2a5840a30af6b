"""Records the steps of a script that exchanges by itself, so that reports set it beside Paceline's strategies."""

from collections.abc import Iterator
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader

from paceline.comm.base import Timing
from paceline.engines.world import World
from paceline.errors import BudgetReached
from paceline.records import EventRecord
from paceline.training.accounting import Account
from paceline.training.clock import TrainingClock
from paceline.training.sharding.contents import tensors_in


class Standing(NamedTuple):
    """How far a worker has come."""

    iteration: int = 0
    time_s: float = 0.0
    """The time by its training clock."""


@final
class Recorder:
    """The steps of one rank's first `DistributedOptimizer`, an iteration each.

    The clock starts with the first batch after that was made, and runs until the script ends. Samples are those of
    DataLoaders' batches by which a gradient was computed. Evaluation between steps is computing: the script does not
    say when it evaluates.

    Args:
        timing: what this rank's operations took so far.
        standing: where its iterations and its clock begin.
    """

    def __init__(self, world: World, timing: Timing, standing: Standing) -> None:
        self._rank, self._reporter = world.context.rank, world.reporter
        self._max_steps = world.config.max_steps
        self._clock = TrainingClock()
        self._clock.set(standing.time_s)
        self._iteration = self._committed = standing.iteration
        self._account = Account(self._clock, [timing])
        self._is_following = False
        self._steps = 0
        self._handed_out = 0  # samples of the last batch, until a gradient was computed by it
        self._samples = 0
        world.progress = lambda: self._steps
        self._iterate = DataLoader.__iter__
        _watch_loaders(self)

    @property
    def standing(self) -> Standing:
        return Standing(self._iteration, self._clock.now_s)

    def commit(self) -> None:
        """The state after this step is what `go_back` returns to."""
        self._committed = self._iteration

    def go_back(self) -> None:
        """Steps since the last commit are made again, as the same iterations."""
        self._iteration = self._committed
        self._handed_out = self._samples = 0

    def follow(self, parameters: list[Parameter]) -> bool:
        """Whether `step` is to be called after each step of this optimizer, which has these parameters."""
        if self._is_following:
            return False
        self._is_following = True
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        return True

    def step(self) -> None:
        """The optimizer has stepped. Raises BudgetReached after the last step that was asked for."""
        self._begin()
        self._steps += 1
        self._iteration += 1
        samples, self._samples = self._samples, 0
        step = self._account.close_step(self._rank, self._steps, self._iteration, samples, staleness=0)
        self._reporter.emit(step)
        if self._max_steps is not None and self._steps >= self._max_steps:
            raise BudgetReached(f"the run ends after {self._steps} steps")

    def batches(self, loader: Any) -> Iterator[Any]:
        """What the loader gives."""
        if self._is_following:
            self._begin()
        for batch in self._iterate(loader):
            tensors = tensors_in(batch)
            self._handed_out = len(tensors[0]) if tensors and tensors[0].dim() else loader.batch_size or 1
            yield batch

    def _begin(self) -> None:
        if not self._clock.is_running:
            self._account.start()
            if self._rank == 0:
                self._reporter.emit(EventRecord("training", "run", 0, 0.0, {}))

    def _on_gradient(self, parameter: Tensor) -> None:
        self._begin()
        self._samples += self._handed_out
        self._handed_out = 0


def _watch_loaders(recorder: Recorder) -> None:
    """The process is one worker of one run, and ends with it."""
    DataLoader.__iter__ = lambda loader: recorder.batches(loader)  # type: ignore[assignment,method-assign,return-value]
