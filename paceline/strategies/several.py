"""Several models and optimizers of one script: how they are told apart, and seen as one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.strategies.replica import Replica, describe, named_parameters_of


@final
class Models(nn.ModuleDict):
    """The models that a script has given by name, as one: `generator` has its parameters `generator.0.weight`."""


def as_one(models: Mapping[str, nn.Module]) -> nn.Module:
    """One model as it is; several as one, whose names have theirs in front. Raises UsageError if one is given twice, or
    a name cannot be one."""
    if len(models) == 1:
        return next(iter(models.values()))
    names: dict[int, str] = {}
    for name, model in models.items():
        if names.setdefault(id(model), name) != name:
            raise UsageError(f"{names[id(model)]!r} and {name!r} are the same model; prepare it once")
        if "." in name or hasattr(Models, name):
            raise UsageError(
                f"a model cannot be called {name!r}, which torch has a use for; prepare it by another name"
            )
    return Models(dict(models))


def models_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """What the script calls: the inverse of `as_one`."""
    return tuple(model.values()) if isinstance(model, Models) else (model,)


def describe_each(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Replica]:
    """A replica for each optimizer; the first also stands for what no optimizer trains.

    Raises:
        UsageError: as `describe`, and if two optimizers hold the same parameter.
    """
    if len(optimizers) == 1:
        return [describe(model, optimizer) for optimizer in optimizers.values()]
    replicas: list[Replica] = []
    holders: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        try:
            replicas.append(replace(describe(model, optimizer), is_first=not replicas))
        except UsageError as error:
            raise UsageError(f"prepare({name}=...): {error}") from None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if holders.setdefault(id(parameter), name) != name:
                    culprit = next(own for own, each in named_parameters_of(model) if each is parameter)
                    raise UsageError(
                        f"{holders[id(parameter)]!r} and {name!r} both hold the parameter {culprit!r}, whose "
                        "gradient would be exchanged twice; give it to one of them, or prepare one optimizer with all"
                    )
    beside = frozenset(id(parameter) for replica in replicas[1:] for parameter in replica.parameters)
    return [replace(replicas[0], beside=beside), *replicas[1:]]


def whole_of(replicas: Sequence[Replica]) -> Replica:
    """All parameters in one, with the first optimizer."""
    if len(replicas) == 1:
        return replicas[0]
    return replace(
        replicas[0],
        parameters=tuple(parameter for replica in replicas for parameter in replica.parameters),
        specs=tuple(spec for replica in replicas for spec in replica.specs),
    )


def require_one_of_each(replica: Replica, what: str) -> None:
    """Raises UsageError if the script has prepared several models or optimizers."""
    if replica.beside or not replica.is_first or isinstance(replica.model, Models):
        raise UsageError(f"{what} needs a script that prepares one model and one optimizer")
