"""What happens when a worker's loaders give batches: its part of the data, their weights, and a client's turns."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline.attacks import DataAttack
from paceline.errors import UsageError
from paceline.roster import Participation
from paceline.seeding import derive
from paceline.training.course import Course
from paceline.training.feeds import require_even
from paceline.training.given import Given
from paceline.training.lone_samples import LoneSamples
from paceline.training.sharding import Part, Place, ShardedLoader
from paceline.training.surviving import Surviving
from paceline.training.unstepped import Unstepped
from paceline.training.worker_run import WorkerRun


@final
class Batches:
    """Hears of every batch that the script asks for.

    Args:
        model: all models in one.
        parameters: those of the first optimizer.
        poisons: attacks on the data of hostile workers.
        survivor: deals data out anew when a worker dies, in an elastic run.
    """

    def __init__(
        self,
        run: WorkerRun,
        course: Course,
        *,
        model: nn.Module,
        parameters: Sequence[Tensor],
        poisons: Sequence[DataAttack],
        survivor: Surviving | None,
    ) -> None:
        self._run, self._course, self._poisons, self._survivor = run, course, poisons, survivor
        self._thread = threading.get_ident()
        self._is_weighed = run.traits.is_synchronous
        self._unstepped = Unstepped(parameters, rank=run.context.rank)
        self._lone_samples = LoneSamples(model, rank=run.context.rank)
        self.num_samples = 0
        """Samples of the batch that was handed out last."""
        self.on_pass: Callable[[], object] = lambda: None
        """Called where a pass over a loader begins."""

    def sharded(self, name: str, given: Given, *, on_position: Callable[[], None]) -> ShardedLoader:
        """This worker's part of a loader. The orders of several are drawn apart, as one process would draw them.

        Args:
            on_position: called when the loader has come to where a checkpoint was taken.

        Raises:
            UsageError: one of several loaders has batches of different weights.
        """
        context, seed = self._run.context, self._run.config.seed
        index = list(given.loaders).index(name)
        size, participation = context.num_at_start or context.size, self._participation()
        sharded = ShardedLoader(
            given.loaders[name],
            rank=context.rank if context.rank < size or participation is not None else 0,
            size=size,
            seed=derive(seed, "data", index) if index else seed,
            on_return=partial(self._on_return, name),
            on_part=partial(self._on_part, name),
            on_position=on_position,
            poison=self._poison if self._poisons else None,
            on_pass=self._on_pass,
            on_pass_end=partial(self._on_pass_end, name),
            should_stop=self._course.is_over,
            gather=context.collective.all_gather_object,
            takes_equal_steps=self._run.traits.takes_equal_steps,
            participation=participation,
            players=context.membership.ranks if self._survivor is not None else None,
            dealing=self._survivor.deals if self._survivor is not None else None,
            is_kept=self._run.reporter.keeps_files,
        )
        if len(given.loaders) > 1 and self._run.traits.is_synchronous:
            require_even(name, sharded.is_even)
        return sharded

    def _participation(self) -> Participation | None:
        """Who takes part of those whose turns are played here."""
        found, context = self._run.strategy.participation(), self._run.context
        if found is None:
            return None
        if self._survivor is not None:
            return found.kept_by_all()
        here = found.at_client() if context.server is not None else found
        return here.at_server() if context.clients is not None else here

    def close(self) -> None:
        self._lone_samples.close()

    def _on_return(self, name: str) -> bool:
        if self._run.is_evaluating:
            raise UsageError(
                f"rank {self._run.context.rank}: the evaluation reads the loader {name!r} that prepare returned, which "
                "is in the middle of its training and gives this worker's part of the data alone; give the evaluation "
                "a DataLoader of its own"
            )
        if threading.get_ident() == self._thread:
            handouts = self._run.prepared.handouts
            if handouts.fresh:
                handouts.look_back()
            if not self._run.steps:
                self._unstepped.look(has_trained=handouts.has_trained)
            if self._course.unsettled is not None or self._run.has_ended:
                self._course.settle()
            if self._survivor is not None:
                self._course.come_or_leave()
            return self._run.has_ended or self._course.refusal is not None
        is_stream = isinstance(self._run.prepared.feeds[name].loader.dataset, IterableDataset)
        is_agreed = is_stream and self._run.traits.takes_equal_steps
        if self._run.context.pacing.is_simulated or self._survivor or is_agreed:
            # Raised in the script's own thread: it may wait for this one, which now only ends its epoch.
            self._course.refuse(
                UsageError(
                    f"rank {self._run.context.rank} reads the loader in another thread: a virtual run would not repeat "
                    "itself, and ranks could not agree on a stream's end, or on what a dead one had done (--elastic); "
                    "loop over the loader itself, and give the DataLoader num_workers to read ahead"
                )
            )
        return self._course.is_over()

    def _on_pass(self) -> None:
        """Where a pass over the data is a client's turn: another one begins."""
        run = self._run
        if not self._is_elsewhere:
            self.on_pass()
        if run.context.roster is None:
            return
        if self._is_elsewhere:
            self._course.refuse(
                UsageError(
                    f"rank {run.context.rank} reads the loader in another thread, while the script trains on a "
                    "client's batches; loop over the loader itself"
                )
            )
            return
        self._course.start_once()
        self._unstepped.forget()
        for feed in run.prepared.feeds.values():
            feed.handouts.end_pass()
        self._course.begin_turn()

    def _on_pass_end(self, name: str) -> None:
        if self._is_elsewhere:
            return
        self._run.prepared.feeds[name].handouts.end_data()
        if self._run.context.roster is not None:
            self._unstepped.forget()
            self._course.end_turn()

    def _on_part(self, name: str, part: Part, place: Place) -> None:
        is_elsewhere = threading.get_ident() != self._thread
        if not is_elsewhere and not self._course.has_started:
            self._course.start_once()
        is_of_client = self._run.context.roster is not None
        if is_of_client:
            self._course.record_late()
        if not self._is_weighed and part.weight != 1.0:
            part = part._replace(weight=1.0)  # every gradient is an update of its own
        feeds = self._run.prepared.feeds
        if len(feeds) > 1:
            require_even(name, part.weight == 1.0)
        if self._survivor is not None and not is_of_client:
            self._survivor.give(place)
        if part.num_samples == 1 or self._lone_samples.places:
            self._lone_samples.expect(name, place, num_samples=part.num_samples)
        self.num_samples = part.num_samples
        same_gradients = self._run.prepared.same_gradients
        if same_gradients is not None and same_gradients.is_looking:
            same_gradients.hand_out(part.data)
        feeds[name].handouts.hand_out(part, place, is_elsewhere=is_elsewhere)

    def _poison(self, batch: Any) -> Any:
        sender = self._run.prepared.synchronizer.sender
        size = self._run.traits.num_clients or self._run.context.num_named
        for attack in self._poisons:
            if attack.is_hostile(sender, size=size):
                batch = attack.of_batch(batch)
        return batch

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the caller is a thread that reads the loader for the script, while the script itself may train."""
        return threading.get_ident() != self._thread
