"""What scripts do that no table listed: found by a hunt, and kept."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tests.conformance.scripts import BATCH_SIZE, NUM_SAMPLES, loader_of, momentum, perceptron, samples

NUM_EPOCHS, AT = 2, 5


class Run:
    """What a script may do at its places."""

    def __init__(self, worker: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self.worker, self.model, self.optimizer = worker, model, optimizer
        self.loader: Any = None
        self.number = self.epoch = 0


Change = Callable[[Run], object]


def nothing(run: Run) -> None:
    pass


def train(
    worker: Any,
    *,
    model: Callable[[], nn.Module] = perceptron,
    optimizer: Callable[..., Optimizer] = momentum,
    loader: Callable[[Any], DataLoader[Any]] = lambda worker: loader_of(samples()),
    way: Callable[[Any], Iterable[Any]] = iter,
    before: Change = nothing,
    prepared: Change = nothing,
    backward: Change = nothing,
    stepped: Change = nothing,
    passed: Change = nothing,
    num_epochs: int = NUM_EPOCHS,
) -> nn.Module:
    """The usual loop, with a change before `prepare`, after it, between backward and step, after each step, or after
    each epoch."""
    network = model()
    run = Run(worker, network, optimizer(network.parameters()))
    before(run)
    network, updater, run.loader = worker.prepare(network, run.optimizer, loader(worker))
    run.optimizer = updater
    prepared(run)
    for run.epoch in range(num_epochs):
        for x, y, *_ in way(run.loader):
            run.number += 1
            run.optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            backward(run)
            run.optimizer.step()
            stepped(run)
        passed(run)
    return network


# --- models ---------------------------------------------------------------------------------------------------------


def initialise_anew(run: Run) -> None:
    """Of a rank's own generator."""
    if run.number == AT:
        run.model[3].reset_parameters()  # type: ignore[operator,index]


def widen(run: Run) -> None:
    """Numbers of another kind after `prepare`."""
    if run.number == AT:
        run.model.to(torch.float32)
        run.model.to(torch.float64)


def normalise(run: Run) -> None:
    """A parametrisation after `prepare`, which makes new parameters."""
    parametrizations.weight_norm(run.model[1])  # type: ignore[index,arg-type]


def prune_small(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(parameter.abs() > 1e-3)


# --- optimizers -----------------------------------------------------------------------------------------------------


def replace_optimizer(run: Run) -> None:
    if run.number == AT:
        run.optimizer = momentum(run.model.parameters())


def forget_state(run: Run) -> None:
    """A warm restart."""
    if run.number == AT:
        run.optimizer.state = defaultdict(dict)


def clear_state(run: Run) -> None:
    if run.number == AT:
        run.optimizer.state.clear()


def drop_parameter(run: Run) -> None:
    """It is to stay as it is from here on."""
    if run.number == AT:
        run.optimizer.param_groups[0]["params"].pop()


def add_group(run: Run) -> None:
    if run.number == AT:
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]})


def wrap_step(run: Run) -> None:
    """The optimizer's step, as the script has it, clips first."""
    own_step = run.optimizer.step

    def step(closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        return own_step()

    run.optimizer.step = step  # type: ignore[method-assign,assignment]


class Damped(SGD):
    """What it does depends on an attribute that is set after it was made."""

    damping = 1.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.damping)
        return super().step()


def damp(run: Run) -> None:
    run.optimizer.damping = 0.25  # type: ignore[attr-defined]


def own_momentum(run: Run) -> None:
    run.optimizer.param_groups[0]["momentum"] = 0.5 if run.number > AT else 0.9


def copy_optimizer(run: Run) -> None:
    copied = copy.deepcopy(run.optimizer.state_dict())
    assert copied["param_groups"][0]["lr"] == 0.05


# --- gradients ------------------------------------------------------------------------------------------------------


def zero_before_step(run: Run) -> None:
    if run.number == AT:
        run.optimizer.zero_grad()


def leave_layer(run: Run) -> None:
    for parameter in run.model[1].parameters():  # type: ignore[index]
        if run.number > AT:
            parameter.grad = None


def swap_gradients(run: Run) -> None:
    """Gradients of the step before, one step late."""
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        late = getattr(parameter, "late", torch.zeros_like(parameter))
        parameter.late = parameter.grad.clone()  # type: ignore[attr-defined]
        parameter.grad = late


# --- data -----------------------------------------------------------------------------------------------------------


def pairs(batches: Any) -> Iterator[Any]:
    """Two passes at once."""
    for first, second in zip(batches, batches, strict=False):
        yield first
        yield second


def cached(batches: Any, *, kept: dict[str, Any]) -> Iterator[Any]:
    """Reads once, and trains on what it has kept."""
    if "all" not in kept:
        kept["all"] = list(batches)
    yield from kept["all"]


def cycled(batches: Any) -> Iterator[Any]:
    yield from itertools.islice(itertools.cycle(batches), NUM_SAMPLES // BATCH_SIZE)


def judged_between(batches: Any) -> Iterator[Any]:
    """A pass to look, then one to train."""
    for _ in batches:
        pass
    yield from batches


class Growing(Dataset[Any]):
    """Has more samples from one epoch to the next."""

    def __init__(self) -> None:
        self.all, self.count = samples(), NUM_SAMPLES // 2

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.all[index]


def growing(worker: Any) -> DataLoader[Any]:
    return DataLoader(Growing(), batch_size=BATCH_SIZE)


def grow(run: Run) -> None:
    run.loader.dataset.count = NUM_SAMPLES


def larger_batches(run: Run) -> None:
    run.loader.batch_sampler.batch_size = 2 * BATCH_SIZE


def split_already(worker: Any) -> DataLoader[Any]:
    """As scripts for DistributedDataParallel have it."""
    data = samples()
    sampler: Any = DistributedSampler(data, num_replicas=worker.size, rank=worker.rank)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)


def without_bad(items: list[Any]) -> list[Tensor]:
    """A collation that leaves samples out."""
    kept = [item for item in items if int(item[2]) % 3] or items[:1]
    return [torch.stack([item[place] for item in kept]) for place in range(3)]


def filtering(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, collate_fn=without_bad)


class Fewer(Sampler[int]):
    """Says that it has more than it gives."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES - 20))


def short(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=Fewer())


class Varying(Sampler[list[int]]):
    """Batches of 2, 4 and 6."""

    def __len__(self) -> int:
        return NUM_SAMPLES // 4

    def __iter__(self) -> Iterator[list[int]]:
        numbers = iter(range(NUM_SAMPLES))
        for size in itertools.cycle((2, 4, 6)):
            batch = list(itertools.islice(numbers, size))
            if not batch:
                return
            yield batch


def varying(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_sampler=Varying())


def leave_alone(run: Run) -> None:
    """One rank's script ends in the middle, as if all were well."""
    if run.number == AT and run.worker.rank:
        raise SystemExit(0)


def trained_twice_inside(batches: Any) -> Iterator[Any]:
    """A pass within a pass."""
    for number, batch in enumerate(batches):
        yield batch
        if number == 2:
            yield from itertools.islice(iter(batches), 3)


def train_on_kept(worker: Any) -> nn.Module:
    return train(worker, way=partial(cached, kept={}))


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "initialised anew": partial(train, stepped=initialise_anew),
    "to other numbers and back": partial(train, stepped=widen),
    "parametrised late": partial(train, prepared=normalise),
    "small weights to zero": partial(train, stepped=prune_small),
    "another optimizer": partial(train, stepped=replace_optimizer),
    "state forgotten": partial(train, stepped=forget_state),
    "state cleared": partial(train, stepped=clear_state),
    "a parameter dropped": partial(train, stepped=drop_parameter),
    "a group added": partial(train, stepped=add_group),
    "step wrapped before": partial(train, before=wrap_step),
    "step wrapped after": partial(train, prepared=wrap_step),
    "an attribute of the optimizer": partial(train, optimizer=partial(Damped, lr=0.05), before=damp),
    "an attribute of the optimizer, after": partial(train, optimizer=partial(Damped, lr=0.05), prepared=damp),
    "momentum in the loop": partial(train, stepped=own_momentum),
    "settings copied": partial(train, stepped=copy_optimizer),
    "zeroed before the step": partial(train, backward=zero_before_step),
    "a layer left out": partial(train, backward=leave_layer),
    "a step late": partial(train, backward=swap_gradients),
    "two passes at once": partial(train, way=pairs),
    "kept batches": train_on_kept,
    "cycled": partial(train, way=cycled),
    "a pass to look": partial(train, way=judged_between),
    "data that grow": partial(train, loader=growing, passed=grow),
    "larger batches": partial(train, passed=larger_batches),
    "split already": partial(train, loader=split_already),
    "collation that filters": partial(train, loader=filtering),
    "fewer than said": partial(train, loader=short),
    "batches of three sizes": partial(train, loader=varying),
    "ends alone": partial(train, stepped=leave_alone),
    "a pass within a pass": partial(train, way=trained_twice_inside),
}
