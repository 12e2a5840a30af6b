"""Notices a loss that is a sum over its batch, where workers average gradients as if it were a mean."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.buckets import when_gradient_is_ready
from paceline.errors import UsageError
from paceline.hooks import Place, backward_calls, place_in_script
from paceline.training.bent import bent_among
from paceline.training.sums import multiplied_sum_among, sum_among, terms_in
from paceline.training.terms import Pass, Terms, pass_of

SURPRISES: tuple[type[Exception], ...] = (Exception,)
"""A graph that is not as these looks take it is no error of the script's."""


class _Pass(NamedTuple):
    """A backward pass under way."""

    begun: list[Any]
    """Nodes of what it begins at."""
    adds: Pass | None
    """What it adds up, if it is of losses: no gradients are given for what it begins at."""
    culprit: str | None
    """The name of a sum."""
    doubt: str | None
    """What it may be, in words."""


@final
class SummedLoss:
    """Looks at the losses of backward passes while it listens: before a pass, which frees what a graph has saved. The
    first gradient of the model tells that it is one of the model's. What a script divides is as it wants it.

    Args:
        num_samples: of the batch that the script has got last.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, rank: int, size: int, num_samples: Callable[[], int]
    ) -> None:
        self._rank, self._size, self._num_samples = rank, size, num_samples
        self._parameters = parameters
        self._hooks: list[RemovableHandle] = []
        self.is_listening = False
        self._has_told = False
        self.begin()

    def begin(self) -> None:
        """Look at the next step's losses."""
        self.has_looked = False
        self._under_way: _Pass | None = None
        self._terms = Terms()
        self._doubt: str | None = None
        self._place: Place | None = None  # of the last pass
        if not self._hooks:
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._hooks = [when_gradient_is_ready(parameter, self._take, 0) for parameter in trained]
            self.is_listening = bool(self._hooks)
            backward_calls.add(self)

    def close(self) -> None:
        backward_calls.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.is_listening = [], False

    def end_step(self) -> None:
        """The step's gradients are there. Warns, on rank 0, where its passes were of parts of a batch: it is no
        error, since the script may have divided the gradients. So it does of as many terms as samples that share
        nothing, which may be of a model each."""
        if self._rank != 0 or self._has_told:
            return
        num_samples = self._num_samples()
        if self._doubt is not None and self._place is not None:
            self._has_told = True
            self._place.warn(self._doubt)
        elif self._terms.are_parts(num_samples):
            what = "the script calls backward() for one part of a batch after the other"
            unless = "the gradients are divided afterwards; and where the script clips or changes the gradient of each "
            unless += "part, call these inside of `with worker.no_sync():`, or it changes the mean over workers' parts"
            self._warn(what, "parts", unless=unless)
        elif self._terms.are_apart(num_samples):
            what = f"the loss adds up {num_samples} terms, as many as samples"
            self._warn(what, "terms", unless="each is of a model of its own")

    def _warn(self, what: str, parts: str, *, unless: str) -> None:
        assert self._place is not None
        self._has_told = True
        self._place.warn(
            f"{what}, and nothing divides these losses: their gradients add up to a sum over the batch, and workers "
            f"average gradients as if it were a mean, so that a step is {self._size} times smaller than one process "
            f"would take with the same batches; divide each loss by the number of {parts}, unless {unless}"
        )

    def look(self, backward: Callable[..., Any], tensors: Any, *more: Any, **named: Any) -> Any:
        """The script calls `backward`; or a checkpoint does, inside of such a pass."""
        if isinstance(tensors, Iterator):
            tensors = tuple(tensors)
        gradients = more[0] if more else named.get("grad_tensors")
        losses = [each for each in _listed(tensors) if each.grad_fn is not None]
        num_samples = self._num_samples()
        begun = [each.grad_fn for each in losses]
        before, adds, culprit, doubt = self._under_way, None, None, None
        if num_samples > 1:
            with suppress(*SURPRISES):
                adds = pass_of(begun) if gradients is None else None
                culprit, doubt = self._found(losses, gradients, num_samples)
        self._under_way = _Pass(begun, adds, culprit, doubt)
        self._place = self._place if before else place_in_script()
        try:
            return backward(tensors, *more, **named)
        finally:
            self._under_way = before

    def _found(self, losses: Sequence[Tensor], gradients: Any, num_samples: int) -> tuple[str | None, str | None]:
        """The name of a sum that a backward pass begins at, and what else it may begin at, in words."""
        if gradients is not None:
            is_sum = not self.has_looked and _is_sum_of(_listed(gradients), num_samples)
            return ("backward(ones)" if is_sum else None), None
        for loss in losses:
            terms = terms_in(loss, num_samples, self._size)
            if culprit := sum_among(terms, num_samples):
                return culprit, None
            if self.has_looked:
                continue
            if bent := bent_among(terms, num_samples):
                return None, (
                    f"the loss is a function of sums or means over the batch that is not linear, or compares its "
                    f"samples ({bent}): workers average what each makes of its own batch, and one process would make "
                    "it of all their batches. Take it of each sample and then the mean, where it may be; "
                    "docs/script.md shows one of all batches"
                )
            if factor := multiplied_sum_among(terms, num_samples, self._size):
                return None, (
                    f"the loss, or a term of it, is {factor:g} times a sum over the batch, and workers average "
                    f"gradients as if it were a mean, so that a step is {self._size} times smaller than one process "
                    "would take with the same batches, unless the factor is to make up for it; take the mean, or "
                    "multiply by worker.size, too"
                )
        return None, None

    def _take(self, _: int) -> None:
        """A gradient of the model has come. Raises UsageError, if the pass began at a sum."""
        under_way, num_samples = self._under_way, self._num_samples()
        self.has_looked = True
        if under_way is None or not under_way.begun:
            return
        culprit = under_way.culprit
        self._doubt = self._doubt or under_way.doubt
        if under_way.adds is not None:
            self._terms.add_pass(under_way.adds)
        under_way.begun.clear()  # looked at
        if culprit is None and self._terms.are_one_a_sample(num_samples):
            culprit = f"{num_samples} terms, one a sample"
        if culprit is not None and num_samples > 1:
            raise UsageError(
                f"rank {self._rank}: the loss is a sum over the batch ({culprit}), and workers average gradients as if "
                f"it were a mean, so that a step would be {self._size} times smaller than one process would take with "
                "the same batches; take the mean (reduction='mean'), divide the sum by what it adds up (not each "
                "term), or multiply the loss by worker.size"
            )


def _is_sum_of(gradients: Sequence[Tensor], num_samples: int) -> bool:
    """Whether a pass that is given these to begin with adds up the samples' losses, each as much as the others, and
    more than a mean does."""
    of_samples = [each for each in gradients if each.shape[:1] == (num_samples,) and each.numel()]
    firsts = [(each, each.flatten()[0]) for each in of_samples]
    return any(bool((each == first).all()) and float(first.abs()) * num_samples > 1.001 for each, first in firsts)


def _listed(given: Any) -> list[Tensor]:
    return [each for each in ([given] if isinstance(given, Tensor) else given) if isinstance(each, Tensor)]
