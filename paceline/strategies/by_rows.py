"""Which parameters move by rows: weights of `nn.Embedding(sparse=True)` whose optimizer updates rows alone."""

import torch
from torch import nn

from paceline.server.tables.row_optimizers import SGD, Adagrad, Adam, RowOptimizer
from paceline.strategies.replica import Replica

_NEVER = ("momentum", "weight_decay", "lr_decay", "maximize", "differentiable", "fused")
"""Settings with which an optimizer takes no sparse gradients, or changes rows without one, or servers cannot do as it
does."""


def moved_by_rows(replica: Replica) -> frozenset[int]:
    """The places, among the replica's parameters, of the weights whose rows move."""
    layers = (module for module in replica.model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    weights = {id(layer.weight) for layer in layers if layer.sparse}
    return frozenset(
        index
        for index, parameter in enumerate(replica.parameters)
        if id(parameter) in weights and parameter.numel() and row_optimizer_of(replica, index) is not None
    )


def row_optimizer_of(replica: Replica, index: int) -> RowOptimizer | None:
    """What updates rows of this parameter as its optimizer does; none: nothing does."""
    kind, group = type(replica.optimizer), replica.optimizer.param_groups[replica.specs[index].group]
    if any(group.get(name) for name in _NEVER) or not replica.parameters[index].is_floating_point():
        return None
    lr = float(group["lr"])
    if kind is torch.optim.SGD:
        return SGD(lr)
    if kind is torch.optim.Adagrad:
        return Adagrad(lr, float(group["initial_accumulator_value"]), float(group["eps"]))
    if kind is torch.optim.SparseAdam:
        beta1, beta2 = map(float, group["betas"])
        return Adam(lr, beta1, beta2, float(group["eps"]))
    return None
