"""What a training script sees: `paceline.init()` and the worker it returns."""

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast, final, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.comm.base import ReduceOp
from paceline.engines import torchrun
from paceline.engines.world import World, alone, current, enter
from paceline.records import summarise
from paceline.strategies.base import Strategy
from paceline.training.detaching import Detaching
from paceline.training.evaluation import Evaluation
from paceline.training.given import told_apart
from paceline.training.integer_means import average_integers, has_integer_mean
from paceline.training.own_loop import OwnLoop
from paceline.training.session import Session
from paceline.training.trees import TreeOp, all_reduce_tree, broadcast_tree

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item", covariant=True)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def init(*, seed: int = 0) -> "Worker":
    """This process's worker: of the run that started it, of torchrun's world, or of a world of one.

    Every random generator is seeded, so that all workers build the same model.

    Args:
        seed: for scripts run on their own; a run started by Paceline has its own.
    """
    world = current()
    if world is None:
        world = torchrun.join(seed=seed) if "TORCHELASTIC_RUN_ID" in os.environ else alone(seed=seed)
        enter(world)
        atexit.register(_finish_own_run, world)
    if world.worker is None:
        world.worker = Worker(world)
    return cast(Worker, world.worker)


@final
class Worker:
    """One of the processes that train together."""

    def __init__(self, world: World) -> None:
        context = world.context
        self.rank: int = context.rank
        """This worker's number, 0 to size - 1."""
        self.local_rank: int = context.local_rank
        """This worker's number among those on its host."""
        self.device: torch.device = context.device
        """Where this worker computes; `prepare` moves the model there."""
        self.strategy: Strategy = world.strategy
        """What the run trains under; `single` where nobody launched it."""
        self._collective = context.collective
        self._session = Session(context, world.strategy, world.config, world.reporter, world.checkpoint)
        self._own_loop = OwnLoop(self._session.run, is_resumed=world.checkpoint is not None)
        self._detaching = Detaching(rank=context.rank, tell=self._session.run.tell)
        world.at_end += [self._own_loop.end, self._session.finish]
        world.at_release.append(self._session.release)
        world.progress = lambda: self._session.run.steps
        world.awaits_others = lambda: self._session.run.awaits_others
        world.has_ended = lambda: self._session.run.has_ended
        world.epoch = lambda: self._session.run.epoch

    @property
    def size(self) -> int:
        """How many workers train together."""
        return self._session.run.context.size

    @property
    def iteration(self) -> int:
        """Global iterations so far, as the literature counts them: updates, or gradients applied."""
        return self._session.run.iteration

    @property
    def goes_on_by(self) -> str:
        """How a script that saves itself goes on, as it has said; empty for others."""
        return self._session.run.goes_on_by

    @property
    def metrics(self) -> dict[str, float]:
        """What the last evaluation returned, on every worker."""
        return dict(self._session.pauses.last_metrics)

    @overload
    def prepare(
        self, model: Model, optimizer: Optimizer, loader: DataLoader[Item], **stateful: Any
    ) -> tuple[Model, Optimizer, DataLoader[Item]]: ...

    @overload
    def prepare(self, **everything: Any) -> tuple[Any, ...]: ...

    def prepare(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        """Join models, optimizers and data to the run's strategy. Collective call, once a run.

        `prepare(model, optimizer, loader)` takes one of each. Several are given by names of the script's choice, as in
        `prepare(generator=g, discriminator=d, optimizer_g=a, optimizer_d=b, data=loader)`, and come back in that order.
        A step of the first optimizer is an iteration, as the run's budget and cadence count; those of others belong to
        it. Names tell states in checkpoints apart.

        Models and optimizers are the same objects, moved to the worker's device; all workers start from rank 0's
        parameters and buffers. A loader yields this worker's part of every global batch.

        Args:
            given: a model on any device, an optimizer over parameters of it, and a loader of any data set; an iterable
                one that splits itself by rank has `splits_by_rank = True`.
            named: all of these by name; or what else a checkpoint is to hold, such as `scheduler=scheduler`: things
                with `state_dict` and `load_state_dict`, which do not come back.

        Raises:
            UsageError: the strategy cannot honour something asked for.
            TensorMismatch: ranks have different models; the message names rank and tensor.
        """
        found = told_apart(given, named)
        # What a sharded loader does not do itself, the script's own loader does for it.
        back = found.models | found.optimizers | self._session.prepare(found)
        return tuple(back[name] for name in found.names)

    def evaluation(self, function: Evaluation) -> Evaluation:
        """Decorator: have `function(model) -> {metric: value}` called with the global model at the run's cadence; with
        `function(first, second)` where several were prepared.

        It runs on rank 0, in evaluation mode and without gradients, while all workers pause; its time is not on the
        training clock.
        """
        self._session.set_evaluation(function)
        return function

    def saves_itself(self, how: str) -> None:
        """Say, before `prepare`, that this script saves and loads checkpoints of its own. The run then writes none that
        `--resume` would take, and says `how` to go on where it is interrupted or fails, such as "run it again with
        another --out, and --load CHECKPOINT". All workers say the same; saying it again changes nothing.

        Raises:
            UsageError: the run is asked for checkpoints, or to go on from one; it came after `prepare`, or said
                otherwise before. Later, from `prepare`: workers say different things.
        """
        self._session.leave_saving_to_script(how)

    def log(self, **metrics: float | Tensor) -> None:
        """Record numbers of this step, such as `loss=loss`."""
        self._session.log(metrics)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; the next one outside exchanges their sum."""
        return self._session.no_sync()

    @property
    def is_over(self) -> bool:
        """Whether the run's budget or target is reached: the loader gives nothing more, and no step counts."""
        return self._session.run.has_ended

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this worker has heard that the user, or the batch system, wants the run to end; others may not yet
        have."""
        return self._session.run.reporter.stop_requested()

    def end_step(self) -> None:
        """Do now what lies between two steps, such as a pause that is due, so that `is_over` is up to date; otherwise
        that happens when the script asks for its next batch. In a loop of `begin_step` the step ends here, and what
        follows until the next one is no training."""
        if self._session.run.is_prepared:
            self._session.course.settle()
        else:
            self._own_loop.end()

    def begin_step(self, samples: int) -> bool:
        """For loops that train what is not torch's, by `all_reduce_tree`: a step begins, and the one before is over. So
        the run has records of steps, and ends by --max-steps, --max-time and Ctrl-C: False says that it is over, on all
        workers at once. A step is an iteration. Call `end_step` after the loop, and before what is no training; else
        the last step lasts until the script ends. Collective call: workers wait for the slowest at each step.

        Args:
            samples: that this worker takes in the step, 0 or more.

        Raises:
            UsageError: the run is asked for what needs a model of `prepare`'s, or has one; `samples` is no such number.
        """
        return self._own_loop.begin(samples)

    def meeting(self, place: str) -> AbstractContextManager[None]:
        """Inside, all workers are between two steps at this place of the script, off the training clock, so that what
        needs all of them is possible, as in `with worker.meeting("validation"): ...`. Each worker must come to the
        place after as many steps. Under `async-diloco` rounds go on without those who wait here; with backup
        workers the first one here ends updates until all have come, and what the others compute until then is dropped.
        Under strategies with clients the turn ends here, which must be the last of a round. Collective call.

        Args:
            place: what it is, for messages.

        Raises:
            UsageError: a worker has come to another place, or to its script's end.
        """
        return self._session.course.meeting(place)

    def global_model(self) -> AbstractContextManager[nn.Module]:
        """Inside a meeting, the model that the run evaluates and saves, in place on every worker; at the end each has
        its own again. Collective call."""
        return self._session.handover.global_model()

    def run_state(self) -> bytes:
        """What a script that saves the global model itself is to save beside it: counters, optimizers' states wherever
        they are held, and what each worker keeps for itself. On rank 0; empty elsewhere. Collective call inside
        `global_model`."""
        return self._session.handover.state()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As `optimizer.state_dict()`, inside `global_model`; on rank 0 also where servers hold the state."""
        return self._session.handover.optimizer_state(optimizer)

    def load_run_state(self, state: bytes) -> None:
        """Go on from what `run_state` gave; after `prepare`, of a model with the saved weights, and before the first
        batch. Collective call.

        Raises:
            UsageError: the state is of a run with other optimizers or another number of workers.
        """
        self._session.handover.take_up(state)

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Every collective that the script calls is made inside, with workers at the same step; it is no computing."""
        self._session.require_same_step(what)
        with self._own_loop.exchanging():
            yield

    def barrier(self) -> None:
        """Return once every worker has called."""
        with self._exchange("barrier"):
            self._collective.barrier()

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Tensor:
        """Reduce over all workers, in place; returns the tensor, without the history that it may have. A mean of
        integers truncates towards zero; a sum or product of theirs that is too large for their dtype wraps around."""
        with self._exchange("all_reduce"):
            if op == "mean" and has_integer_mean(tensor):
                average_integers(self._collective, tensor)
            else:
                self._collective.all_reduce(tensor, op=op).wait()
            return self._detaching.written("all_reduce", tensor)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> Tensor:
        """Overwrite with the root's, in place; returns the tensor."""
        with self._exchange("broadcast"):
            self._collective.broadcast(tensor, root=root)
            return self._detaching.written("broadcast", tensor)

    def all_reduce_tree(self, tree: Any, op: TreeOp = "mean") -> Any:
        """The mean or sum over all workers of a tree of arrays, such as gradients: a new tree of the same kinds.

        Args:
            tree: dict, list, tuple, namedtuple and None in one another, with the same structure, dtypes and shapes on
                every worker. Leaves: torch tensors, numpy, JAX and eager TensorFlow arrays, int, float and complex.
            op: a mean of integers truncates towards zero.

        Raises:
            UsageError: on every worker, naming the rank and the leaf's path, if trees differ, or a leaf cannot be
                exchanged; or workers are not at the same step.
        """
        with self._exchange("all_reduce_tree"):
            return all_reduce_tree(self._collective, self._detaching.given("all_reduce_tree", tree), op=op)

    def broadcast_tree(self, tree: Any, root: int = 0) -> Any:
        """The root's values of a tree of arrays, as a new tree: see `all_reduce_tree`. Leaves may be bools too."""
        with self._exchange("broadcast_tree"):
            return broadcast_tree(self._collective, self._detaching.given("broadcast_tree", tree), root=root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, in rank order; shapes may differ. None of them requires a gradient, as for all
        exchanges: none would come back from other workers."""
        with self._exchange("all_gather"):
            return self._collective.all_gather(self._detaching.given("all_gather", tensor))

    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        """Every worker's tensor, in rank order, on the root, None elsewhere; shapes may differ."""
        with self._exchange("gather"):
            return self._collective.gather(self._detaching.given("gather", tensor), root=root)

    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        """What the root gives for this worker; the root gives one tensor for each, the others None."""
        with self._exchange("scatter"):
            return self._collective.scatter(self._detaching.given("scatter", tensors), root=root)

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        """Reduce the i-th tensors of all workers for worker i; returns this worker's."""
        with self._exchange("reduce_scatter"):
            return self._collective.reduce_scatter(self._detaching.given("reduce_scatter", tensors), op=op)

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send the i-th tensor to worker i; returns what every worker sent here."""
        with self._exchange("all_to_all"):
            return self._collective.all_to_all(self._detaching.given("all_to_all", tensors))

    def send(self, tensor: Tensor, *, destination: int) -> None:
        """Send to one worker, which must `recv` a tensor of the same shape and dtype."""
        with self._exchange("send"):
            self._collective.send(self._detaching.given("send", tensor), destination=destination).wait()

    def recv(self, tensor: Tensor, *, source: int) -> Tensor:
        """Overwrite with what the source sent; returns the tensor."""
        with self._exchange("recv"):
            self._collective.recv(tensor, source=source).wait()
            return self._detaching.written("recv", tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's value, in rank order: plain data and tensors."""
        with self._exchange("all_gather_object"):
            return self._collective.all_gather_object(self._detaching.given("all_gather_object", value))

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        """The root's value: plain data and tensors."""
        with self._exchange("broadcast_object"):
            return self._collective.broadcast_object(self._detaching.given("broadcast_object", value), root=root)


def _finish_own_run(world: World) -> None:
    """At the end of a script that nobody launched: meet, evaluate, and say what came out."""
    worker = world.worker
    if worker is None or hasattr(sys, "last_value"):
        world.release()
        return  # nothing to finish, or the script ended with an exception
    for finish in world.at_end:
        finish()
    world.release()
    if worker.rank == 0 and worker.metrics:
        print(f"paceline: {summarise(worker.metrics)}", file=sys.stderr)
    world.context.collective.close()
