"""Weights of a model whose parameters share one buffer, to and from Accelerate's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils.constants import SAFE_MODEL_NAME, WEIGHTS_NAME
from accelerate.utils.modeling import load_state_dict
from torch import Tensor, nn

from paceline.errors import UsageError


def apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same, each tensor in memory of its own; tied weights stay one tensor."""
    copies: dict[tuple[int, Any], Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return copies.setdefault(_place(value), value.detach().clone())

    return {name: copied(value) for name, value in state.items()}


def load_weights(model: nn.Module, directory: Path, number: int) -> None:
    """Set the model of this number to what `save_state` has written.

    Raises:
        UsageError: the directory has no weights of it, or those of another model.
    """
    suffix = f"_{number}" if number else ""
    stem, _, ending = WEIGHTS_NAME.rpartition(".")
    paths = [directory / f"{SAFE_MODEL_NAME}{suffix}.safetensors", directory / f"{stem}{suffix}.{ending}"]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise UsageError(f"{directory} has no {paths[0].name}: it is not what accelerator.save_state has written")
    saved = load_state_dict(str(path))
    own = {name: _place(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    known = {own[name] for name in saved if name in own}  # of tied weights files hold one
    strange = [name for name in saved if name not in own] + [name for name in own if own[name] not in known]
    if strange:
        raise UsageError(f"{path} is of another model: only one of the two has {strange[0]!r}")
    model.load_state_dict(saved, strict=False)


def _place(tensor: Tensor) -> tuple[int, Any]:
    return tensor.data_ptr(), tuple(tensor.shape)
