"""Calling the script's evaluation, so that training goes on as if it had not been called."""

import ast
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from paceline.config import Target
from paceline.errors import UsageError, unknown
from paceline.seeding import preserved_random_state
from paceline.strategies.several import models_of
from paceline.training.unchanged import unchanged

Evaluation = Callable[..., Mapping[str, float]]
"""The script's function. It is given the models that were prepared, in their order, and returns metrics."""


@dataclass(frozen=True)
class Findings:
    """What one evaluation returned."""

    metrics: dict[str, float]
    duration_s: float


def evaluate(
    function: Evaluation,
    model: nn.Module,
    *,
    target: Target | None,
    now_s: Callable[[], float] = time.perf_counter,
    is_put_back: bool = False,
) -> Findings:
    """Call `function` with the model, or with each of several, in evaluation mode and without gradients; the model, its
    modes and the random state are as before afterwards.

    Args:
        is_put_back: the caller puts the model's tensors back, and so no copy of them is needed here.

    Raises:
        UsageError: it returns something else than numbers by name, or not the target's metric.
    """
    began_s = now_s()
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with nullcontext() if is_put_back else unchanged(model), preserved_random_state(), torch.no_grad():
            returned = function(*models_of(model))
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(returned, Mapping):
        raise UsageError(f"the evaluation returned {type(returned).__name__}; it must return a dict of numbers")
    metrics = {str(name): _number(name, value) for name, value in returned.items()}
    if target is not None and target.metric not in metrics:
        raise unknown("target metric", target.metric, metrics)
    return Findings(metrics, now_s() - began_s)


def metrics_in(source: str) -> set[str] | None:
    """The metrics that a script's evaluation returns, as far as its text says so; none where it does not.

    It does where the function under `@worker.evaluation` returns nothing but dicts with literal names.
    """
    names: set[str] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(map(_is_evaluation, function.decorator_list)):
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            if not all(isinstance(value, ast.Dict) for value in returned):
                return None
            keys = [key for value in returned if isinstance(value, ast.Dict) for key in value.keys]
            if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                return None
            names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return names or None


def _is_evaluation(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Attribute) and decorator.attr == "evaluation"


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"the evaluation's {name!r} is {type(value).__name__}; it must be a number") from None
