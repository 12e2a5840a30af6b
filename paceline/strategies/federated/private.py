"""Which of a model's layers stay with their client."""

from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import UsageError
from paceline.strategies.replica import named_parameters_of

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)


def private_names(model: nn.Module, layers: str) -> frozenset[str]:
    """The names of the layers' parameters and buffers.

    Args:
        layers: patterns with commas between them, such as `head.*`, that names begin with; `norm` stands for all
            normalisation layers, and `last` for the last layer that has parameters.

    Raises:
        UsageError: a pattern fits nothing, or all parameters are private.
    """
    names = [name for name, _ in (*named_parameters_of(model), *model.named_buffers())]
    found: set[str] = set()
    for pattern in filter(None, layers.split(",")):
        wanted = _prefixes(model, pattern)
        fitting = {name for name in names if any(_fits(name, prefix) for prefix in wanted)}
        if not fitting:
            raise UsageError(f"private={layers}: the model has no layer {pattern!r}; it has {', '.join(names)}")
        found |= fitting
    if all(name in found for name, _ in named_parameters_of(model)):
        raise UsageError(f"private={layers} leaves no parameter for clients to share")
    return frozenset(found)


def _fits(name: str, prefix: str) -> bool:
    return fnmatchcase(name, prefix) or fnmatchcase(name, f"{prefix}.*")


def _prefixes(model: nn.Module, pattern: str) -> list[str]:
    if pattern == "norm":
        return [name for name, module in model.named_modules() if isinstance(module, _NORMS)]
    if pattern == "last":
        return [name for name, module in model.named_modules() if module._parameters][-1:]
    return [pattern]
