"""What a script gives to `prepare`, told apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.errors import UsageError

_PLACES = ("model", "optimizer", "loader")


@final
@dataclass(frozen=True)
class Given:
    """Everything by its name, in the order given."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    loaders: dict[str, DataLoader[Any]]
    extra: dict[str, Any]
    """What else a checkpoint is to hold."""
    names: tuple[str, ...]
    """The names of all but the extra."""

    @property
    def optimizer_names(self) -> list[str]:
        """As a checkpoint keeps them: none where there is nothing to be told apart."""
        return list(self.optimizers) if len(self.optimizers) > 1 else []


def told_apart(given: Sequence[Any], named: Mapping[str, Any]) -> Given:
    """One model, optimizer and loader, by place or by these names, and extras; or any number of each by other names.

    Raises:
        UsageError: something is missing, or cannot be kept in a checkpoint.
    """
    if len(given) > len(_PLACES):
        raise UsageError("prepare takes a model, an optimizer and a loader; give several of a kind by name")
    everything = dict(zip(_PLACES, given, strict=False))
    twice = everything.keys() & named.keys()
    if twice:
        raise UsageError(f"prepare was given {min(twice)!r} twice, by place and by name")
    everything |= named
    if given or everything.keys() >= set(_PLACES):
        return _one_of_each(everything)
    kinds = {name: _kind_of(thing) for name, thing in everything.items()}
    found = Given(
        models={name: everything[name] for name, kind in kinds.items() if kind == "model"},
        optimizers={name: everything[name] for name, kind in kinds.items() if kind == "optimizer"},
        loaders={name: everything[name] for name, kind in kinds.items() if kind == "loader"},
        extra={name: everything[name] for name, kind in kinds.items() if kind == "extra"},
        names=tuple(name for name, kind in kinds.items() if kind != "extra"),
    )
    for kind in _PLACES:
        if kind not in kinds.values():
            raise UsageError(f"prepare was given no {kind}; it takes at least a model, an optimizer and a DataLoader")
    _require_savable(found.extra)
    return found


def _one_of_each(everything: dict[str, Any]) -> Given:
    missing = [place for place in _PLACES if place not in everything]
    if missing:
        raise UsageError(f"prepare was given no {missing[0]}; it takes a model, an optimizer and a DataLoader")
    extra = {name: thing for name, thing in everything.items() if name not in _PLACES}
    for name, thing in extra.items():
        if isinstance(thing, torch.optim.Optimizer | DataLoader):
            raise UsageError(
                f"prepare({name}=...) is a second {_kind_of(thing)}: give all by name, as in prepare(generator=..., "
                "discriminator=..., optimizer_g=..., optimizer_d=..., data=...)"
            )
    _require_savable(extra)
    model, optimizer, loader = (everything[place] for place in _PLACES)
    return Given({"model": model}, {"optimizer": optimizer}, {"loader": loader}, extra, _PLACES)


def _kind_of(thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    return "loader" if isinstance(thing, DataLoader) else "extra"


def _require_savable(extra: Mapping[str, Any]) -> None:
    for name, thing in extra.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(f"prepare({name}=...) takes things with state_dict and load_state_dict")
