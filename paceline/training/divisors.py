"""Notices a loss that each rank divides by what its own batch weighs, where workers average such losses."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, final

from torch import Tensor

from paceline.hooks import Place, backward_calls, place_in_script
from paceline.training.nodes import (
    MEAN,
    PASSED_THROUGH,
    SUM,
    TELLS_PACKED,
    is_packed,
    number_in,
    saved_by,
    shape_after,
    stacked_in,
)
from paceline.training.sums import FACTORS
from paceline.training.terms import is_cut_from

_NOT_GIVEN = -100 % 2**64  # of `ignore_index`, as nodes keep it
_WEIGHTS, _NUMBER = "the weights of the classes", "the number of samples without ignore_index"
_WEIGHTS_LEFT = f"{_WEIGHTS} without ignore_index"
_FORMULAS = {
    "": "own",
    _WEIGHTS: "weight[labels].sum()",
    _NUMBER: "(labels != ignore_index).sum()",
    _WEIGHTS_LEFT: "weight[labels[labels != ignore_index]].sum()",
}
_MOST_TERMS = 16
_ROUNDING = 1e-5
"""By which processors of different kinds may differ."""


class _Divisor(NamedTuple):
    value: float
    """NaN where nothing tells."""
    factor: float
    """What the script multiplies the quotient by, as a whole; NaN where nothing tells."""
    what: str
    """What it is of the batch, where one of torch's own losses has it; else empty."""
    node: Any
    """The graph's node of the sum or mean."""
    by_script: float = 1.0
    """The number by which the script divides the sum or mean."""


class _Pass(NamedTuple):
    values: list[float]
    """The samples of its batch, and what each term of its loss is multiplied and divided by."""
    what: str
    """As a divisor's."""
    place: Place
    """Where it was called."""


@final
class Divisors:
    """Looks, while it listens, at what the losses are divided by that backward passes begin at. What a mean divides by
    counts, as does what the script divides by itself. What it multiplies by counts as a sum: who mixes up samples draws
    factors of each rank's own, which add up to one.

    Args:
        num_samples: of the batch that the script has got last.
    """

    def __init__(self, *, is_first: bool, num_samples: Callable[[], int]) -> None:
        self._is_first, self._num_samples = is_first, num_samples
        self._passes: list[_Pass] = []
        self._said: list[_Pass] = []
        self._is_the_models = self._has_told = False

    def begin(self) -> None:
        """Look at the next backward passes."""
        self._passes = []
        if TELLS_PACKED:
            backward_calls.add(self)

    def take(self) -> None:
        """The pass under way brings a gradient of the model."""
        self._is_the_models = True

    def close(self) -> None:
        backward_calls.remove(self)

    def look(self, backward: Callable[..., Any], tensors: Any, *more: Any, **named: Any) -> Any:
        """The script calls `backward`. The pass frees what its graph has saved, so this is read before it."""
        if any(given is not None for given in (*more[:1], named.get("grad_tensors"))):
            return backward(tensors, *more, **named)  # no loss: of activations that are computed anew, too
        if isinstance(tensors, Iterator):
            tensors = tuple(tensors)
        begun = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        num_samples = self._num_samples()
        found = _divisors_in([each.grad_fn for each in begun if isinstance(each, Tensor)])
        if len(found) >= min(num_samples, _MOST_TERMS):
            found = [_of_batch(each, num_samples) for each in found]
        self._is_the_models = False
        result = backward(tensors, *more, **named)
        if self._is_the_models:
            values = [num_samples, *chain.from_iterable((each.factor, each.value) for each in found)]
            what = next((each.what for each in found if each.what), "")
            self._passes.append(_Pass(values, what, place_in_script()))
        return result

    def said(self) -> list[list[float]]:
        """What this rank tells the others in a pause."""
        self._said = self._passes
        return [each.values for each in self._said]

    def compare(self, everyone: Sequence[Sequence[Sequence[float]]]) -> None:
        """Warn, once, on rank 0, if ranks have divided losses of equally many samples by different numbers, or the loss
        is one of torch's that divides by what its batch weighs, and no factors make up for it.

        It is no error: such a mean may be as the script wants it.
        """
        if not self._is_first or self._has_told:
            return
        is_known = len(set(map(len, everyone))) == 1
        by_pass = zip(*everyone, strict=True) if is_known else repeat(())
        pairs = zip(self._said, by_pass, strict=False)
        told = next(((one, found) for one, ranks in pairs if (found := _to_tell(one.what, ranks))), None)
        if told is None:
            return
        self._has_told = True
        (_, kind, place), (values, is_factor) = told
        if is_factor and not kind:
            self._tell_of_factors(place, values)
            return
        what = f"{kind} of each worker's own batch" if kind else "what each worker's own batch weighs"
        if values and not is_factor:
            what += f" ({_by_rank(values)})"
        means = "" if kind else ", `own` what it weighs, such as mask.sum(),"
        place.warn(
            f"the loss at {place} is divided by {what}, and workers average such losses; one process would divide "
            f"once, by that of all their batches. For the same, with x the batch{means} and `summed` its loss before "
            f"it is divided, or with reduction='sum': total, num = worker.all_reduce_tree([{_FORMULAS[kind]}, len(x)], "
            "op='sum'); loss = summed / total * num / len(x). For strategies that refuse this in the loop, and need it "
            "not, let it depend on worker.strategy.traits.lock_step, as docs/script.md shows"
        )

    def _tell_of_factors(self, place: Place, factors: Sequence[float]) -> None:
        place.warn(
            f"the loss at {place} is multiplied by a number of each worker's own ({_by_rank(factors)}), and workers "
            "average such losses; one process would multiply once. Take a number that is the same on all: "
            "worker.all_reduce(torch.tensor(factor), op='mean')"
        )


def _by_rank(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g} on rank {rank}" for rank, value in enumerate(values))


def _to_tell(what: str, passes: Sequence[Sequence[float]]) -> tuple[Sequence[float], bool] | None:
    """What all terms were multiplied by on each rank, or one divided by, if it was not the same for as many samples and
    terms, and no term's factor makes up for its divisor; and whether it is the former. Empty, to tell of `what` alone.
    """
    silent: tuple[Sequence[float], bool] | None = ((), False) if what else None
    if len({(each[0], len(each)) for each in passes}) != 1:
        return silent
    columns = list(zip(*passes, strict=True))
    terms = list(zip(columns[1::2], columns[2::2], strict=True))
    unlike = [term for term in terms if not _are_shares_alike(*term)]
    added = [sum(factors) for factors in zip(*(factors for factors, _ in unlike), strict=True)]
    if all(math.isfinite(value) for _, values in unlike for value in values) and _differ(added):
        return added, True  # with divisors that nothing tells, factors may make up for them
    if differing := next((values for _, values in unlike if _differ(values)), None):
        return differing, False
    return None if any(_differ(values) for _, values in terms) else silent


def _are_shares_alike(factors: Sequence[float], divisors: Sequence[float]) -> bool:
    """Whether each rank's quotient is the first one's."""
    return all(
        math.isclose(factor * divisors[0], factors[0] * divisor, rel_tol=_ROUNDING)
        for factor, divisor in zip(factors, divisors, strict=True)
    )


def _differ(numbers: Sequence[float]) -> bool:
    """As far as all are known."""
    is_known = all(map(math.isfinite, numbers))
    return is_known and not all(math.isclose(number, numbers[0], rel_tol=_ROUNDING) for number in numbers)


def _divisors_in(roots: Sequence[Any]) -> list[_Divisor]:
    """The first sums and means that the losses with these graphs are made of by adding, multiplying and dividing."""
    left, seen, found = [(root, 1.0, 1.0) for root in reversed(roots)], set(), list[_Divisor]()
    while left and len(found) < _MOST_TERMS:
        node, divisor, factor = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = [inner for inner, _ in node.next_functions]
        if node.name() == "DivBackward0":
            if not any(inputs[1:]):  # else the quotient is no sum any more
                left.append((inputs[0], divisor * number_in(node, "other"), factor))
        elif node.name() in (*PASSED_THROUGH, *FACTORS):
            if node.name() in FACTORS:
                factor *= number_in(node, "other" if inputs[0] is not None else "self") if not all(inputs) else math.nan
            left += [(inner, divisor, factor) for inner in reversed(inputs)]
        elif (own := _own_divisor(node)) is not None and (stacked := stacked_in(inputs[0])):
            left += [(inner, divisor * own.value, factor) for inner in reversed(stacked)]
        elif own is not None:
            factor *= _weight_of_positives(node)
            found.append(own._replace(value=divisor * own.value, factor=factor, by_script=divisor))
    return found


def _of_batch(found: _Divisor, num_samples: int) -> _Divisor:
    """What the batch's loss is divided by. Where the script adds up what single samples lose, a weight or mean within
    one is that sample's and does not count."""
    is_one = num_samples > 1 and is_cut_from(found.node, num_samples)
    return _Divisor(found.by_script, 1.0, "", found.node) if is_one else found


def _own_divisor(node: Any) -> _Divisor | None:
    """What a sum or mean divides by itself; none if it is something else."""
    reduction, name = getattr(node, "_saved_reduction", None), node.name()
    if reduction == MEAN and hasattr(node, "_saved_ignore_index"):
        return _Divisor(number_in(node, "total_weight"), 1.0, _what_weighs(node), node)
    if reduction == MEAN or name.startswith("MeanBackward"):
        inner = next((inner for inner, _ in node.next_functions if inner is not None), None)
        return _Divisor(math.prod(shape_after(inner)), 1.0, "", node)
    if reduction == SUM or name.startswith(("SumBackward", "NansumBackward")) or name == "DotBackward0":
        return _Divisor(1.0, 1.0, "", node)
    return None


def _weight_of_positives(node: Any) -> float:
    """What `pos_weight` is in the mean, of a loss that has one for all samples."""
    weight = saved_by(node, "pos_weight")
    return float(weight.mean()) if isinstance(weight, Tensor) and weight.dim() < 2 else 1.0


def _what_weighs(node: Any) -> str:
    """What one of torch's losses divides by, if the script has asked for another number than that of the samples."""
    leaves_out = node._saved_ignore_index != _NOT_GIVEN
    if is_packed(node, "weight") or saved_by(node, "weight") is not None:
        return _WEIGHTS_LEFT if leaves_out else _WEIGHTS
    return _NUMBER if leaves_out else ""
