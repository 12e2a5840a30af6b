"""How long a request to a server keeps the worker that sends it, or the server that answers it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import final

from paceline.cluster.description import Cluster


@dataclass(frozen=True)
class RequestCost:
    """Of one request."""

    duration_s: float = 0.0
    core_s: float = 0.0
    """The part that needs a core, where hosts share cores."""

    def of_core_s(self, *, is_beside: bool) -> float:
        """Half as much between processes of one host, as nothing passes a socket there: an assumption."""
        return self.core_s / 2 if is_beside else self.core_s


@final
class RequestCosts:
    """What each request takes one end. Those about rows take more or less by chance, around their mean.

    Args:
        variation: of requests about rows, their standard deviation over the mean; they are log-normal.
        random: what they are drawn from; needed with a variation.
    """

    def __init__(
        self,
        plain: RequestCost = RequestCost(),
        about_rows: RequestCost | None = None,
        *,
        variation: float = 0.0,
        random: Random | None = None,
    ) -> None:
        self._plain, self._about_rows = plain, plain if about_rows is None else about_rows
        self._sigma = math.sqrt(math.log1p(variation**2))
        self._random = random

    def next(self, *, about_rows: bool) -> RequestCost:
        if not about_rows:
            return self._plain
        if self._random is None or not self._sigma:
            return self._about_rows
        factor = math.exp(self._random.gauss(-(self._sigma**2) / 2, self._sigma))
        return RequestCost(self._about_rows.duration_s * factor, self._about_rows.core_s * factor)

    def core_s(self, cost: RequestCost, is_beside: Sequence[bool]) -> float:
        """Returns how long a worker's request keeps a core busy, which goes to several servers, on its host or not.

        One about rows finds its code in the caches from the second one on, and then needs what any request does.
        """
        first = is_beside.index(False) if False in is_beside else 0
        costs = (cost if number == first else self._plain for number in range(len(is_beside)))
        return sum(each.of_core_s(is_beside=beside) for each, beside in zip(costs, is_beside, strict=True))


def of_workers(cluster: Cluster, random: Random) -> RequestCosts:
    """Of the end that asks."""
    costs = cluster.communication
    return _costs(cluster, costs.request_s, costs.row_request_s, random)


def of_servers(cluster: Cluster, random: Random) -> RequestCosts:
    """Of the end that answers."""
    return _costs(cluster, cluster.servers.request_s, cluster.servers.row_request_s, random)


def _costs(cluster: Cluster, request_s: float, row_request_s: float, random: Random) -> RequestCosts:
    costs = cluster.communication
    return RequestCosts(
        RequestCost(request_s, costs.request_core_us * 1e-6 / 2),
        RequestCost(row_request_s, costs.row_request_core_s / 2),
        variation=costs.row_request_variation,
        random=random,
    )
