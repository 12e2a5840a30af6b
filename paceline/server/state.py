"""Optimizer state in one form, however many servers hold it: full tensors keyed `<parameter index>.<state name>`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.layout import Layout, Slot
from paceline.messages import Raw, WireError, from_frames, to_frames
from paceline.server.ranges import KeyRange, Piece

# States of torch.optim that are one number a tensor, which a parameter without dimensions cannot tell by its shape.
_SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
_NAME = re.compile(r"\d+\..+", re.ASCII)
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def pack(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[memoryview]]:
    """A message's body and payload that hold these tensors."""
    described = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in state.items()]
    return {"tensors": described}, to_frames(list(state.values()))


def unpack(body: Mapping[str, Any], payload: Sequence[Raw]) -> dict[str, Tensor]:
    """Raises WireError if this is nothing that `pack` gives."""
    try:
        described = body["tensors"]
        if not all(_NAME.fullmatch(name) for name, _, _ in described):
            raise ValueError("a name has no index")
        state = {name: torch.empty(shape, dtype=_DTYPES[dtype]) for name, dtype, shape in described}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WireError(f"refused an optimizer state that cannot be read: {error}") from None
    from_frames(payload, list(state.values()))
    return state


def export_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], *, first_piece: int = 0
) -> dict[str, Tensor]:
    """One shard's state, keyed `<piece index>.<state name>`. LBFGS's, which is made of lists, is not exported.

    Args:
        first_piece: index, in its server's range, of the piece that `parameters` begin with.

    Raises:
        UsageError: a state is neither tensor nor number, and would be lost.
    """
    exported: dict[str, Tensor] = {}
    if isinstance(optimizer, torch.optim.LBFGS):
        return exported
    for index, parameter in enumerate(parameters, first_piece):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor | int | float):
                # SGD's momentum is sparse where its gradients are.
                exported[f"{index}.{name}"] = torch.as_tensor(value).detach().to_dense().cpu().contiguous()
            elif value is not None:
                kind = type(optimizer).__name__
                raise UsageError(
                    f"{kind} keeps a {type(value).__name__} in its state {name!r}; a checkpoint holds "
                    "tensors and numbers only"
                )
    return exported


def import_state(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    exported: Mapping[str, Tensor],
    *,
    first_piece: int = 0,
) -> None:
    """Replace one shard's state by what `export_state` gave; what `exported` has of other shards is passed over.
    Raises UsageError if the optimizer's state is not kept in checkpoints."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS's history is not kept in checkpoints, so a run with it cannot be resumed")
    optimizer.state.clear()
    for key, value in exported.items():
        number, name = key.split(".", 1)
        index = int(number) - first_piece
        if not 0 <= index < len(parameters):
            continue
        parameter = parameters[index]
        if name == "step" and isinstance(optimizer, torch.optim.SparseAdam):
            # It counts in a number, whose powers are float64; a tensor's would be float32.
            optimizer.state[parameter][name] = int(value)
            continue
        # As torch does on loading: step counts stay where they are, all else goes to the parameter's device.
        device = value.device if name == "step" else parameter.device
        optimizer.state[parameter][name] = value.clone().to(device)


def join(layout: Layout, ranges: Sequence[KeyRange], exported: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All servers' states as full tensors, keyed by parameter."""
    full: dict[str, Tensor] = {}
    for pieces, states in zip(ranges, exported, strict=True):
        for key, value in states.items():
            number, name = key.split(".", 1)
            piece = pieces[int(number)]
            for slot, inside in _overlaps(layout, piece):
                target = f"{slot.index}.{name}"
                if not _is_per_element(piece, value):
                    full[target] = value
                    continue
                if target not in full:
                    full[target] = torch.zeros(slot.spec.shape, dtype=value.dtype)
                start = inside.start - slot.offset
                count = inside.stop - inside.start
                offset = inside.start - piece.start
                full[target].view(-1)[start : start + count] = value.reshape(-1)[offset : offset + count]
    return full


def split(layout: Layout, ranges: Sequence[KeyRange], full: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The inverse of `join`: each server's part, keyed by its pieces."""
    parts: list[dict[str, Tensor]] = []
    for pieces in ranges:
        part: dict[str, Tensor] = {}
        for number, piece in enumerate(pieces):
            for slot, inside in _overlaps(layout, piece):
                for name, value in _of_slot(full, slot):
                    target = f"{number}.{name}"
                    is_scalar = name in _SCALAR_STATES or tuple(value.shape) != slot.spec.shape
                    if is_scalar or piece.shape is not None:
                        part[target] = value.clone()  # pieces of one tensor have one each
                        continue
                    if target not in part:
                        part[target] = torch.zeros(piece.stop - piece.start, dtype=value.dtype)
                    start = inside.start - piece.start
                    count = inside.stop - inside.start
                    offset = inside.start - slot.offset
                    part[target][start : start + count] = value.reshape(-1)[offset : offset + count]
        parts.append(part)
    return parts


def _of_slot(full: Mapping[str, Tensor], slot: Slot) -> Iterable[tuple[str, Tensor]]:
    prefix = f"{slot.index}."
    return [(key[len(prefix) :], value) for key, value in full.items() if key.startswith(prefix)]


def _overlaps(layout: Layout, piece: Piece) -> Iterator[tuple[Slot, range]]:
    """The slots that the piece touches, each with the segment's elements that both hold."""
    for slot in layout.segments[piece.segment].slots:
        inside = range(max(slot.offset, piece.start), min(slot.stop, piece.stop))
        if inside:
            yield slot, inside


def _is_per_element(piece: Piece, value: Tensor) -> bool:
    return piece.shape is None and value.dim() == 1 and value.numel() == piece.stop - piece.start
