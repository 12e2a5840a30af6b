"""Filters: what a worker leaves out of a push, because it matters little (Li et al., OSDI 2014, sections 3.4 and 5.1).

Each is a function from what is to be pushed to what is pushed.
"""

from collections.abc import Callable
from typing import final

from torch import Tensor

from paceline.kv.rows import Rows
from paceline.kv.spec import Pairs

Filter = Callable[[Pairs], Pairs]


@final
class SignificantlyModified:
    """Sends the change of each key's values since they were last sent, where one is larger than a threshold.

    Args:
        threshold: absolute, of the key's number that has changed most; with 0, whatever has changed is sent.
        increments: what is pushed is itself a change, of which the part that is not sent adds to the next one; else
            it is the present value, and the server is to add up changes.
    """

    def __init__(self, threshold: float, *, increments: bool = False) -> None:
        if not threshold >= 0:
            raise ValueError(f"the threshold must be at least 0, not {threshold}")
        self.threshold, self._increments = threshold, increments
        self._kept: Rows | None = None

    def __call__(self, pushed: Pairs) -> Pairs:
        keys, values = pushed
        if self._kept is None:
            self._kept = Rows(values.shape[1], values.dtype)
        kept = self._kept.read(keys)
        change = values + kept if self._increments else values - kept
        is_sent = ~(change.abs().amax(dim=1) <= self.threshold)  # NaN is sent, too
        if self._increments:
            self._kept.write(keys, change.masked_fill(is_sent.unsqueeze(1), 0))
        else:
            self._kept.write(keys[is_sent], values[is_sent])
        return Pairs(keys[is_sent], change[is_sent])


def kkt(weights: Tensor, *, l1: float, scale: float, margin: float = 0.0) -> Filter:
    """Leaves out gradients that leave an L1-regularised weight of 0 where it is, as far as this worker can tell.

    By the optimality conditions (Karush, Kuhn and Tucker) a weight of 0 stays while its gradient is at most `l1`.

    Args:
        weights: of the keys that will be pushed, as last pulled; shape (keys, dim), or (keys,) where dim is 1.
        scale: what this worker's gradient times this one takes for everybody's: the number of workers, if they have
            about equal shares of the data.
        margin: how much below `l1` the gradient has to be.
    """

    def filtered(pushed: Pairs) -> Pairs:
        is_set = weights.reshape(pushed.values.shape) != 0
        matters = (is_set | ((pushed.values * scale).abs() > l1 - margin)).any(dim=1)
        return Pairs(pushed.keys[matters], pushed.values[matters])

    return filtered
