"""A worker's state at one place of its script: taken for a checkpoint, and taken up again from one."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpoint, WorkerState, plain_script
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.seeding import random_state, set_random_state
from paceline.strategies.own_state import OwnState
from paceline.strategies.replica import hyperparameters
from paceline.training.extra_states import NAME
from paceline.training.sharding import Place

_PAIRS = "complex128"


@dataclass(frozen=True)
class Snapshot:
    """Everything that a script moves on between two steps, the model's parameters and the optimizer's state apart."""

    worker: WorkerState
    groups: list[dict[str, Any]]
    """Hyperparameters of the optimizers' groups, which schedulers change."""
    extra: dict[str, Any]


def take(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    place: Place,
    extra: Mapping[str, Any],
    *,
    steps: int,
    samples: int,
    beside: dict[str, tuple[int, int, Any]],
) -> Snapshot:
    worker = WorkerState(
        steps=steps,
        samples=samples,
        epoch=place.epoch,
        num_batches_done=place.num_batches_done,
        stream=place.state,
        random_state=random_state(),
        buffers={name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()},
        beside=beside,
    )
    groups = [dict(group) for optimizer in optimizers for group in hyperparameters(optimizer)]
    return Snapshot(worker, groups, {name: thing.state_dict() for name, thing in extra.items()})


def with_own_state(snapshot: Snapshot, own: Mapping[str, OwnState], *, is_first: bool) -> Snapshot:
    """The snapshot, with what the strategy keeps for this worker; what all have the same is the first one's to keep."""
    own = {name: state for name, state in own.items() if is_first or state.fate != "same"}
    tensors = {name: state.tensor.detach().cpu().clone() for name, state in own.items()}
    fates = {name: state.fate for name, state in own.items()}
    return replace(snapshot, worker=replace(snapshot.worker, own=tensors, fates=fates))


def with_own_script(snapshot: Snapshot) -> Snapshot:
    """The snapshot, with what the script has moved on by this worker's own steps."""
    script = {"groups": snapshot.groups, "extra": snapshot.extra}
    return replace(snapshot, worker=replace(snapshot.worker, script=script))


def gather_workers(collective: Collective, snapshot: Snapshot) -> list[WorkerState]:
    """Every worker's part, in rank order, on rank 0; elsewhere none. Collective call.

    One takes 6 ms to read: on a simulated cluster of 200 workers, all of them on all took four minutes.

    Raises:
        UsageError: on rank 0, a worker's script has brought something that a checkpoint cannot hold. The others do not
            raise, since rank 0 waits for their parts.
    """
    gathered = collective.gather_object(_part_of(snapshot.worker))
    if gathered is None:
        return []
    for rank, (_, fault) in enumerate(gathered):
        if fault:
            raise UsageError(f"rank {rank}: {fault}")
    workers = [WorkerState(**state) for state, _ in gathered]
    first = {"groups": snapshot.groups, "extra": snapshot.extra}
    return [replace(worker, script=None) if _are_alike(worker.script, first) else worker for worker in workers]


def _part_of(worker: WorkerState) -> tuple[dict[str, Any], str]:
    """A copy of the worker's fields, and why a checkpoint cannot hold what is then left out, its script."""
    content, fault = dict(vars(worker)), ""
    if worker.script is not None:
        try:
            content["script"] = plain_script(**worker.script)
        except UsageError as error:
            content["script"], fault = None, str(error)
    return copy.deepcopy(content), fault


def _are_alike(one: Any, other: Any) -> bool:
    """Whether they are surely the same plain data and tensors."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return (one is None and other is None) or (isinstance(one, int | float | str) and bool(one == other))


def beside_the_first(workers: Sequence[WorkerState]) -> list[WorkerState]:
    """All as far in their data as the first, as synchronous strategies need it: their workers take the same global
    batches, and end together. Under ssp and asp, and with backup workers, some are behind."""
    first = max(workers, key=_place_of)
    return [
        worker
        if _place_of(worker) == _place_of(first)
        else replace(
            worker,
            epoch=first.epoch,
            num_batches_done=first.num_batches_done,
            stream=None,
            beside={name: (*place[:2], None) for name, place in first.beside.items()},
        )
        for worker in workers
    ]


def _place_of(worker: WorkerState) -> tuple[int, int]:
    return worker.epoch, worker.num_batches_done


def weights_of(model: nn.Module, *, copies: bool = True) -> dict[str, Tensor]:
    """The model's state as tensors of their own: parameters may be views of one buffer, tied weights share memory.
    Without `copies` parameters are the model's, and only buffers, which forward passes change, are copied."""
    state = model.state_dict()
    kept = set() if copies else {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value.detach().cpu() if name in kept else value.detach().cpu().clone()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def as_model_file(weights: Mapping[str, Tensor]) -> bytes:
    """The weights as a safetensors file, which has no complex128: such a tensor is stored as pairs of real numbers, and
    its name in the file's metadata."""
    wide = [name for name, tensor in weights.items() if tensor.dtype == torch.complex128]
    pairs = {name: torch.view_as_real(weights[name]) for name in wide}
    stored = {name: tensor.contiguous() for name, tensor in {**weights, **pairs}.items()}
    return safetensors.torch.save(stored, metadata={_PAIRS: json.dumps(wide)} if wide else None)


def read_model_file(path: Path) -> dict[str, Tensor]:
    """What `as_model_file` was given."""
    with safetensors.safe_open(path, framework="pt") as file:
        pairs = json.loads((file.metadata() or {}).get(_PAIRS, "[]"))
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    return {name: torch.view_as_complex(tensor) if name in pairs else tensor for name, tensor in stored.items()}


def put_in_place(model: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Give the model what `weights_of` gave earlier, in buffers that have another shape now as well. The name of a
    tensor that keeps it from that, if there is one: the model is as it was then."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    reshaped = {name for name, value in state.items() if name in weights and weights[name].shape != value.shape}
    strange = sorted((state.keys() ^ weights.keys()) | (reshaped - buffers))
    if strange:
        return strange[0]
    for name in reshaped:
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = weights[name].to(state[name].device, copy=True)
    model.load_state_dict({**model.state_dict(), **weights})
    return None


def load_model(model: nn.Module, checkpoint: Checkpoint, *, num_workers: int | None, seed: int) -> None:
    """Set the model to the checkpoint's. Raises UsageError if the checkpoint is of another model, or of a run that
    this one cannot go on with. `num_workers`: that it must have had; none: any."""
    if num_workers is not None and len(checkpoint.workers) != num_workers:
        raise UsageError(
            f"the checkpoint was taken with {len(checkpoint.workers)} workers, this run has {num_workers}; "
            "resume with as many"
        )
    if checkpoint.seed != seed:
        raise UsageError(f"the checkpoint was taken with --seed {checkpoint.seed}; resume with the same")
    load_weights(model, checkpoint)


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Set the model to the checkpoint's. Raises UsageError if that is of another model."""
    own = {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing = sorted(own ^ checkpoint.model.keys())
    if missing:
        raise UsageError(f"the checkpoint is of another model: only one of the two has {missing[0]!r}")
    try:
        model.load_state_dict({**model.state_dict(), **checkpoint.model})
    except RuntimeError as error:
        raise UsageError(f"the checkpoint is of another model: {error}") from None


def load_buffers(model: nn.Module, state: WorkerState) -> None:
    """Set what this worker alone has, such as running statistics of its own batches."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state.buffers:
                buffer.copy_(state.buffers[name])


def resume_script(
    checkpoint: Checkpoint,
    worker: WorkerState | None,
    optimizers: Iterable[torch.optim.Optimizer],
    extra: Mapping[str, Any],
) -> None:
    """The script has come to where the snapshot was taken: what it has moved on since it began goes back there.

    `worker`: whose random state is taken up, and whose script, where workers go their own ways; none: this one's stays.

    Raises:
        UsageError: the checkpoint lacks the state of something given to `prepare`, or has other parameter groups.
    """
    script = (worker.script if worker is not None else None) or {"groups": checkpoint.groups, "extra": checkpoint.extra}
    move_on(script["groups"], script["extra"], optimizers, extra)
    if worker is not None:
        set_random_state(worker.random_state)


def move_on(
    saved_groups: Sequence[Mapping[str, Any]],
    saved_extra: Mapping[str, Any],
    optimizers: Iterable[torch.optim.Optimizer],
    extra: Mapping[str, Any],
) -> None:
    """Hyperparameters, schedulers and what else the script has given to `prepare` are as they were saved. Raises
    UsageError as `resume_script`."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if len(groups) != len(saved_groups):
        raise UsageError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the script's optimizers {len(groups)}"
        )
    for group, saved in zip(groups, saved_groups, strict=True):
        group.update(saved)
    for name, thing in extra.items():
        if name not in saved_extra:
            what = "what modules give by get_extra_state" if name == NAME else f"prepare({name}=...)"
            raise UsageError(f"the checkpoint has no state for {what}; start a new run from its model.safetensors")
        thing.load_state_dict(saved_extra[name])
