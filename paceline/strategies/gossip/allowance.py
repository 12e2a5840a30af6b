"""How many gradients each worker may still apply before all meet, so that nobody has to count for all."""

from collections.abc import Sequence


def dealt(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total`: one for each while there are enough, and the rest in proportion to weights,
    which are above 0.

    >>> dealt(10, [1, 3])
    [3, 7]
    >>> dealt(1, [1, 3])
    [1, 0]
    """
    firsts = [int(place < total) for place in range(len(weights))]
    rest = total - sum(firsts)
    shares = [first + rest * weight // sum(weights) for first, weight in zip(firsts, weights, strict=True)]
    left = total - sum(shares)
    return [share + int(place < left) for place, share in enumerate(shares)]
