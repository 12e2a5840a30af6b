"""What the servers run."""

from torch import Tensor


def step(rows: Tensor, pushed: Tensor, *, lr: float, l1: float) -> None:
    """One proximal step of every weight.

    Args:
        rows: weight, gradient and curvature of each key.
        pushed: by how much the gradient has changed.
        lr: step size, as a part of what the curvature allows without delays.
    """
    weights, gradients, curvatures = rows.unbind(dim=1)
    gradients += pushed[:, 0]
    sizes = lr / curvatures.clamp(min=1e-12)
    moved = weights - sizes * gradients
    weights.copy_(moved.sign() * (moved.abs() - sizes * l1).clamp(min=0))


def curve(rows: Tensor, pushed: Tensor) -> None:
    """More data, whose curvature adds up."""
    rows[:, 2] += pushed[:, 0]
