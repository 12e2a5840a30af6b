"""Steps that scripts take, one function a kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.conformance.odd_models import Batch, loss_of
from tests.conformance.scripts import plain_step


def sharpness_step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    def closure() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)


def two_call_step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    loss_of(model, batch).backward()
    optimizer.first_step()
    loss_of(model, batch).backward()
    optimizer.second_step()


def set_gradients(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def set_and_clip(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def functional_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """Gradients of a function of the parameters."""
    parameters = dict(model.named_parameters())

    def loss(values: Any) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (batch[0],)), batch[1])

    gradients = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    optimizer.step()


def per_sample_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """Every sample's own gradient, divided by its norm."""

    def loss(values: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    values = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, batch[0], batch[1])
    for name, parameter in model.named_parameters():
        norms = gradients[name].flatten(1).norm(dim=1).view(-1, *[1] * parameter.dim())
        parameter.grad = (gradients[name] / norms).mean(0)
    optimizer.step()


def same_graph_twice(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def distilling_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    learnt, taught = model(batch[0])
    (F.cross_entropy(learnt, batch[1]) + (learnt - taught).square().mean()).backward()
    optimizer.step()


def averaging_step(model: Any, optimizer: Optimizer, batch: Batch) -> None:
    plain_step(model, optimizer, batch)
    with torch.no_grad():
        model.average.lerp_(torch.cat([p.flatten() for p in model.net.parameters()]), 0.1)
        model.averaged.update_parameters(model.net)


def two_losses_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    classes, value = model(batch[0])
    F.cross_entropy(classes, batch[1]).backward(retain_graph=True)
    value.square().mean().backward()
    optimizer.step()


def joint_losses_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    classes, value = model(batch[0])
    torch.autograd.backward([F.cross_entropy(classes, batch[1]), value.square().mean()])
    optimizer.step()


def penalised_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """With each sample's gradient in the loss."""
    optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    losses = F.cross_entropy(model(x), batch[1], reduction="none")
    (gradients,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    (losses + gradients.square().sum(dim=(1, 2, 3))).mean().backward()
    optimizer.step()


def graph_of_gradients_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    (penalty + model(batch[0]).square().mean()).backward()
    optimizer.step()


def autocast_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(batch[0].float()).float(), batch[1])
    loss.backward()
    optimizer.step()


def two_steps_a_gradient(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    plain_step(model, optimizer, batch)
    optimizer.step()


def never_zeroed_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    (loss_of(model, batch) * 0.1).backward()
    optimizer.step()


def microbatches_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    for x, y in zip(batch[0].split(2), batch[1].split(2), strict=True):
        (F.cross_entropy(model(x), y) * (len(x) / len(batch[0]))).backward()
    optimizer.step()


def adaptive_clip_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """Each tensor's gradient is bounded by its weights (Brock et al., 2021), in a tensor of its own."""
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * (0.1 * parameter.detach().norm() / parameter.grad.norm()).clamp(max=1.0)
    optimizer.step()


def detecting_anomalies_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain_step(model, optimizer, batch)


def summed_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    (F.cross_entropy(model(batch[0]), batch[1], reduction="sum")).backward()
    optimizer.step()


def summed_term_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """As variational autoencoders have it."""
    optimizer.zero_grad()
    output = model(batch[0])
    (F.cross_entropy(output, batch[1], reduction="sum") + 0.5 * output.square().sum()).backward()
    optimizer.step()


def summed_by_hand_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    (-F.log_softmax(model(batch[0]), dim=1).gather(1, batch[1][:, None]).sum()).backward()
    optimizer.step()


def divided_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    (F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(batch[0])).backward()
    optimizer.step()


def summed_penalty_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (loss_of(model, batch) + 1e-3 * penalty).backward()
    optimizer.step()
