"""What a checkpoint holds of each worker, and what becomes of it elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.outer import Outer
from paceline.server.state import export_state, import_state
from paceline.strategies.replica import Replica

OUTER = "outer."
"""What the state of an outer optimizer, which all workers have alike, is known by."""
Fate = Literal["average", "sum", "reset", "same"]
"""What becomes of a worker's state with another number of workers, or under another strategy that has a state of the
same name: every worker gets the mean, or an equal part of the sum, or none. What is the same on all workers stays so;
checkpoints hold it once. When a worker dies, its own is lost, but for what is the same on all."""


class OwnState(NamedTuple):
    """One tensor that a worker has for itself."""

    tensor: Tensor
    fate: Fate = "reset"


def carried_over(
    everyone: Sequence[Mapping[str, OwnState]], *, wanted: Mapping[str, OwnState], size: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What each of `size` workers begins with, and what became of every state, by its name.

    Args:
        everyone: the saved states of all workers.
        wanted: the states that the present strategy keeps.
    """
    tensors: dict[str, Tensor] = {}
    fates: dict[str, str] = {}
    for name in sorted({name for states in everyone for name in states}):
        saved = [states[name] for states in everyone if name in states]
        shapes = {state.tensor.shape for state in saved}
        fate = saved[0].fate
        is_complete = fate == "same" or len(saved) == len(everyone)
        fits = name in wanted and is_complete and shapes == {wanted[name].tensor.shape}
        if not fits or fate == "reset":
            fates[name] = "reset"
            continue
        if fate == "same":
            tensors[name], fates[name] = saved[0].tensor, "kept"
            continue
        total = torch.stack([state.tensor.to(torch.float64) for state in saved]).sum(0)
        tensors[name] = (total / (len(saved) if fate == "average" else size)).to(saved[0].tensor.dtype)
        fates[name] = {"average": "averaged", "sum": "summed"}[fate]
    return tensors, fates


def for_joiners(own: Mapping[str, OwnState]) -> dict[str, OwnState]:
    """What one who joins takes over from a worker: what is the same on all, and what stands for the mean of all. Of a
    sum it has nothing, since the others keep theirs."""
    return {name: state for name, state in own.items() if state.fate in ("average", "same")}


def taken_up(
    outer: Outer, own: Mapping[str, Tensor], *, tell: Callable[[str, Mapping[str, Any]], None] | None
) -> dict[str, Tensor]:
    """The state that the outer optimizer goes on with. One that another kind has left begins anew, which is told."""
    saved = {name.removeprefix(OUTER): tensor for name, tensor in own.items() if name.startswith(OUTER)}
    fitting = outer.fitting(saved)
    if tell is not None and len(fitting) < len(saved):
        tell("carried_over", {f"{OUTER}{name}": "reset" for name in saved})
    return fitting


def of_replica(replica: Replica) -> dict[str, OwnState]:
    """A worker's parameters and optimizer state, for strategies under which workers differ."""
    parameters = {f"parameters.{index}": parameter.data for index, parameter in enumerate(replica.parameters)}
    optimizer = export_state(replica.optimizer, replica.parameters)
    state = {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
    return {name: OwnState(tensor, "average") for name, tensor in {**parameters, **state}.items()}


def load_replica(replica: Replica, own: Mapping[str, Tensor]) -> None:
    """Take up what `of_replica` gave, as far as it is there."""
    with torch.no_grad():
        for index, parameter in enumerate(replica.parameters):
            if (saved := own.get(f"parameters.{index}")) is not None:
                parameter.copy_(saved)
    prefix = "optimizer."
    state = {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
    if state:
        import_state(replica.optimizer, replica.parameters, state)
