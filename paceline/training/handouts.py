"""Which batch a script trains on: the one that it was handed last, unless it reads ahead or leaves batches out."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor

from paceline.buckets import Computed
from paceline.errors import UsageError
from paceline.strategies.progress import Progress
from paceline.strategies.replica import Replica
from paceline.strategies.several import models_of
from paceline.training.calls import Calls
from paceline.training.full_batches import FullBatches
from paceline.training.kept_batches import Copies, Handed, KeptBatches
from paceline.training.nodes import graph_of
from paceline.training.set_gradients import SetGradients
from paceline.training.sharding.contents import tensors_in
from paceline.training.sharding.part import Part, Place

_AHEAD, _LOOKS, _LEAVES_OUT, _UNEVEN, _OVER = "reads ahead", "inputs tell", "leaves out", "uneven", "the pass is over"


@final
class Handouts:
    """Gives every backward pass its own batch's weight, and every step its own batches' samples.

    A backward pass between two batches, or before a step, says that a batch was trained on. Which one is known while
    only one is out. With several out, the model's inputs tell, and which of its outputs goes backward: an input shares
    memory with a batch, or is as long. Where nothing tells, batches were read ahead if an epoch begins so, and left out
    otherwise; that is enough as long as all have the same weight.

    Batches that a script keeps are known by their memory when it trains on them again, and copies of batches by some of
    their values. Inputs are looked at only while the batches that it holds have different weights, or where the script
    trains on after a pass. Those of a model's parts, which a script may call by themselves, are looked at in the first
    case alone.

    Gradients that a script sets itself, without a backward pass, are of all batches since the step before.

    Args:
        set_weight: takes the weight of the batch that the next backward passes are of.
        is_averaged: workers average gradients.
        is_weighed: what workers find counts by the samples that it was found with.
        copies_from: the number of the batch from which on, in every epoch, copies of batches are to be known.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        rank: int,
        set_weight: Callable[[float], None],
        is_averaged: bool = False,
        is_weighed: bool = False,
        copies_from: float = math.inf,
    ) -> None:
        self._num_steps = self._num_batches = 0  # taken, and handed out in the script's own thread, so far
        self._replica, self._rank, self._set_weight = replica, rank, set_weight
        self._set_gradients = SetGradients(replica, rank=rank, is_averaged=is_averaged)
        self._copies, self._copies_from = Copies(), copies_from
        self._is_weighed = is_weighed
        # Why the script does not go batch by batch, as most do: it reads ahead; inputs are looked at; batches are left
        # out between steps, whose losses may yet go backward with that of another one; of the batches that it holds
        # some count more than others; the pass is over, and the script has kept what it trains on before the next one.
        self._odd: set[str] = set()
        self._set_by_script: set[float] | None = None  # weights of batches, once several were of one step
        self._out: deque[Handed] = deque()
        self._last: Handed | None = None  # trained on last
        self._kept = KeptBatches()  # trained on before that
        self._weight = math.nan  # of the batch that was handed out last
        self._known: Handed | None = None  # what the model is computing on
        self._full_batches = FullBatches(rank=rank)
        self._num_ahead: float | None = None  # batches that this epoch's script reads ahead, once it has trained
        self.num_samples = 0
        """Samples that were trained on since the last step."""
        self.fresh = Computed(replica.parameters)
        """Since the script was last seen to train."""
        self._is_computed = False  # a gradient was, since the last step
        self._calls = Calls(models_of(replica.model), on_inputs=self._on_forward, on_output=self._on_output)
        self._called: Handed | None = None  # the batch of the call that is under way
        self._made: dict[Any, Handed] = {}  # by its node: what calls have given, since the script trained
        self._backward = -1  # the backward pass that has reached what the model was seen to compute
        self._reached: set[Handed] = set()  # by it: the batches
        self._computed: set[Handed] = set()  # since the script trained: what the model was seen to compute on

    def hand_out(self, part: Part, place: Place, *, is_elsewhere: bool) -> None:
        """The script gets this batch.

        Args:
            is_elsewhere: in a thread of its own, so that nothing is known of what the script does meanwhile.
        """
        found = tensors_in(part.data)
        if self._is_weighed:
            self._full_batches.require(found, part.num_samples, place)
        handed = Handed(place, part.num_samples, part.weight, tuple(map(ref, found)))
        if place.num_batches_done >= self._copies_from:  # 10 us
            self._copies.add(handed, found)
        if is_elsewhere:
            self._num_ahead = math.inf
            self._odd.add(_AHEAD)
            self._out.append(handed)
            self._look_at_inputs()
            return
        self._num_batches += 1
        if self.fresh:
            self.look_back()
        self._known = None
        if place.num_batches_done == 0:
            self._num_ahead = None
            self._odd.discard(_AHEAD)
            self._kept.forget_dropped()
        self._odd.discard(_OVER)
        self._out.append(handed)
        if _UNEVEN in self._odd or part.weight != self._weight:
            self._compare_weights()
        self._weight = part.weight
        if len(self._out) > 1 or self._odd:
            self._weigh()
        elif self._is_weighed:
            self._set_weight(part.weight)

    def look_back(self, *, is_computed: bool = False) -> None:
        """The script is between two batches, or before a step: it may have trained. Where gradients are there before a
        step (`is_computed`), and no backward pass has computed them, the script has set them itself.

        Raises:
            UsageError: nobody can tell on which batch, and they have different weights; or what was set is not what
                workers can average.
        """
        if not self.fresh:
            if is_computed and not self._is_computed and self._out and not self._set_gradients.are_as_left():
                self._take_what_was_set()
            return
        self.fresh.clear()
        self._is_computed = True
        if len(self._out) != 1 or self._odd or self._computed or self._reached:
            self._train()
            return
        if self._last is not None:
            for weak in self._last.tensors:  # looked at here, since most scripts have dropped them
                if weak() is not None:
                    self._kept.add(self._last)
                    break
        self._last, self._num_ahead = self._out.popleft(), 0
        self.num_samples += self._last.num_samples

    def progress(self) -> Progress:
        """Steps taken, and batches handed out in the script's own thread."""
        return tuple.__new__(Progress, (self._num_steps, self._num_batches))  # without a call in Python

    def take_up(self, progress: Sequence[int]) -> None:
        """Count on from there."""
        self._num_steps, self._num_batches = progress

    @property
    def are_gradients_spent(self) -> bool:
        """Whether no gradient has come since the step before, computed by a backward pass or set by the script."""
        return (
            not self._is_computed
            and not self.fresh
            and (self._replica.parameters[0].grad is None or self._set_gradients.are_as_left())
        )

    @property
    def has_trained(self) -> bool:
        """Whether a batch was trained on."""
        return self._last is not None

    def _take_what_was_set(self) -> None:
        self._set_gradients.allow()
        out = list(self._out)  # another thread may read on meanwhile
        weights = {handed.weight for handed in out}
        if self._set_by_script is not None or len(out) > 1:
            self._set_by_script = weights | (self._set_by_script or set())
            if len(self._set_by_script) > 1:
                raise UsageError(self._dilemma(self._candidates()))
        self._set_weight(weights.pop())
        self.num_samples = sum(handed.num_samples for handed in out)
        self._last = out[-1]
        for _ in out:
            self._out.popleft()

    def end_step(self) -> int:
        """The samples that the step was made of. Raises UsageError as `look_back` does."""
        if self.fresh:  # the optimizer has computed gradients itself
            self.look_back()
        while self._num_ahead is not None and len(self._out) > self._num_ahead:
            self._kept.add(self._out.popleft())  # the script may come back to it
            self._odd.add(_LEAVES_OUT)
        if self._out or self._odd:
            self._weigh()
        self._num_steps += 1
        gradient = self._replica.parameters[0].grad
        self._is_computed = False
        self._set_gradients.left = None if gradient is None else (ref(gradient), gradient._version)
        num_samples, self.num_samples = self.num_samples, 0
        return num_samples

    def end_data(self) -> None:
        """The pass has no more batches."""
        self._odd.add(_OVER)
        if self._last is not None:
            self._kept.add(self._last)
        if self._kept:
            self._look_at_inputs()

    def end_pass(self) -> None:
        """Another pass begins: what the script has left out of the one before, it does not train on any more.

        Raises:
            UsageError: it reads ahead, and so is yet to train on the last ones.
        """
        if self._out and self._num_ahead:
            raise UsageError(
                f"rank {self._rank}: the script reads ahead, and asks for the next client's batches before it has "
                "trained on the last ones of this client's; ask for a batch when the one before is done "
                "(DataLoader(num_workers=...) reads ahead by itself)"
            )
        self._out.clear()

    @property
    def num_out(self) -> int:
        """Batches that were handed out, and are not known to have been trained on."""
        return len(self._out)

    def place(self, after: Place) -> Place:
        """Where the first batch is that is out, or else the next one, `after`."""
        return self._out[0].place if self._out else after

    def close(self) -> None:
        self.fresh.close()
        self._calls.close()

    def _candidates(self) -> list[Handed]:
        """What the script may train on next. One that reads ahead may use a batch twice before it takes the next."""
        return [*([self._last] if self._num_ahead and self._last else []), *self._out]

    def _compare_weights(self) -> None:
        """Compare what the script holds, where the newest batch counts otherwise than the one before, of which it may
        have a copy."""
        self._kept.forget_dropped()
        weights = {handed.weight for handed in [*self._held(), *self._out]}
        if self._copies and not math.isnan(self._weight):
            weights.add(self._weight)
        self._set_odd(_UNEVEN, len(weights) > 1)

    def _held(self) -> list[Handed]:
        """What was trained on, and the script still holds."""
        return [*([self._last] if self._last is not None and self._last.alive else []), *self._kept]

    def _set_odd(self, why: str, holds: bool) -> None:
        (self._odd.add if holds else self._odd.discard)(why)

    def _weigh(self) -> None:
        if len(self._out) < 2 and not self._odd:
            if self._is_weighed and self._out:
                self._set_weight(self._out[0].weight)
            return
        candidates = self._candidates()
        if len({handed.weight for handed in candidates}) == 1:
            self._set_weight(candidates[0].weight)
        if len(candidates) > 1 or self._odd & {_LEAVES_OUT, _UNEVEN} or (_OVER in self._odd and self._kept):
            self._look_at_inputs()
        elif _LOOKS in self._odd and self._num_ahead != math.inf:
            self._odd.discard(_LOOKS)
            self._calls.close()

    def _look_at_inputs(self) -> None:
        self._odd.add(_LOOKS)
        self._calls.listen(to_parts=_UNEVEN in self._odd)

    def _on_forward(self, is_part: bool, inputs: list[Tensor]) -> None:
        self._called = None
        if not torch.is_grad_enabled() or (is_part and torch._C._current_graph_task_id() >= 0):  # a checkpoint's
            return
        if self._num_ahead == math.inf:  # another thread asks for batches, so only this lies between two
            self.look_back()
        found = self._made_of(inputs) if is_part else None
        if is_part:
            inputs = [tensor for tensor in inputs if not tensor.requires_grad]
        if found is None and is_part and not inputs:
            return
        if found is None:
            found = self._found(inputs) if self._known is None else self._another(self._known, inputs)
        if found is not None and self._known not in (None, found):
            self.look_back()
        self._known = found or self._known
        handed = self._known or self._expected(self._out)
        if handed is not None:
            self._computed.add(handed)
            self._set_weight(handed.weight)
        self._called = self._known

    def _made_of(self, inputs: list[Tensor]) -> Handed | None:
        """The batch of which a model, or a part of it, has made these."""
        nodes = (node for tensor in inputs if tensor.grad_fn is not None for node in graph_of(tensor.grad_fn))
        return next((self._made[node] for node in nodes if node in self._made), None)

    def _on_output(self, output: Any) -> None:
        if self._called is None:
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # else a parameter, which outlives the batch
                tensor.register_hook(partial(self._on_reached, self._called))
                if _UNEVEN in self._odd:
                    self._made[tensor.grad_fn] = self._called

    def _on_reached(self, handed: Handed, _: Tensor) -> None:
        """A backward pass begins with what the model has computed on this batch, or comes to that."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self.look_back()
            self._backward, self._reached = backward, set()
        self._reached.add(handed)
        self._known = handed
        self._set_weight(handed.weight)

    def _found(self, inputs: list[Tensor]) -> Handed | None:
        sharing = self._sharing(inputs) or self._copied(inputs)
        if len(sharing) == 1:
            return sharing[0]
        as_long = _as_long(self._candidates(), inputs) or (_as_long(self._kept, inputs) if not self._out else [])
        if len({handed.weight for handed in as_long}) != 1:
            return None
        return self._expected([handed for handed in as_long if handed in self._out]) or as_long[0]

    def _another(self, known: Handed, inputs: list[Tensor]) -> Handed | None:
        """The batch that these are of, where it is another one that waits or is kept. Noise is of none, or as long as
        the one."""
        sharing = self._sharing(inputs) or self._copied(inputs)
        among = sharing or _as_long([known, *self._out], inputs)
        if known in among or len({handed.weight for handed in among}) != 1:
            return None
        return among[0]

    def _sharing(self, inputs: list[Tensor]) -> list[Handed]:
        """The batches in whose memory these are."""
        starts = [tensor.data_ptr() for tensor in inputs]
        last = [self._last] if self._last is not None else []
        return [
            handed
            for handed in dict.fromkeys([*last, *self._out, *self._kept.beside(inputs)])
            if any(start in memory for memory in handed.memory for start in starts)
        ]

    def _copied(self, inputs: list[Tensor]) -> list[Handed]:
        return self._copies.of(inputs) if self._copies else []

    def _expected(self, among: Sequence[Handed]) -> Handed | None:
        """What is trained on next where only the order tells."""
        if not among:
            return None
        return among[-1] if self._num_ahead == 0 else among[0]

    def _train(self) -> None:
        known, self._known = self._known, None
        reached, self._reached = self._reached, set()
        computed, self._computed = self._computed, set()
        self._made.clear()
        if len({handed.weight for handed in reached}) > 1:
            epoch = max(handed.place.epoch for handed in reached)
            raise UsageError(
                f"rank {self._rank}, epoch {epoch}: a loss goes backward that the script has made of batches "
                f"{_numbers(reached)}, and nothing tells how much of its gradient is of which; they count "
                "differently, since the last one holds fewer samples. Call backward() for each batch, whose gradients "
                "add up, or give the DataLoader drop_last=True or a batch size that divides the data evenly"
            )
        among = self._unknown() if known is None else reached or computed
        if len({handed.weight for handed in among}) > 1:
            raise UsageError(self._dilemma(among))
        handed = known or self._expected(self._out)
        if handed is None or handed is self._last:  # one more pass through the same batch
            return
        if self._last is not None:
            self._kept.add(self._last)
        is_first = handed in self._out
        if is_first:
            if self._num_ahead is None:
                self._num_ahead = len(self._out) - 1 - self._out.index(handed)
                self._set_odd(_AHEAD, self._num_ahead > 0)
            self._out.remove(handed)
        if is_first or _OVER in self._odd:
            self.num_samples += handed.num_samples
        self._last = handed

    def _unknown(self) -> Collection[Handed]:
        """What the script may have trained on where nothing tells: again on what it holds, if no other one is out."""
        if self._out or _UNEVEN not in self._odd:
            return self._candidates()
        return self._held()

    def _dilemma(self, among: Collection[Handed]) -> str:
        numbers, epoch = _numbers(among), max(handed.place.epoch for handed in among)
        return (
            f"rank {self._rank}, epoch {epoch}: the script asked for a batch before it had trained on the one before, "
            f"or has kept some, and nothing tells which of the batches {numbers} it trained on; they count "
            "differently, since the last one holds fewer samples. Ask for a batch when the one before is done "
            "(DataLoader(num_workers=...) reads ahead by itself), or give the DataLoader drop_last=True or a "
            "batch size that divides the data evenly"
        )


def _as_long(batches: Iterable[Handed], inputs: list[Tensor]) -> list[Handed]:
    lengths = {len(tensor) for tensor in inputs if tensor.dim()}
    return [handed for handed in batches if handed.num_samples in lengths]


def _numbers(batches: Iterable[Handed]) -> str:
    return ", ".join(str(number) for number in sorted(handed.place.num_batches_done + 1 for handed in batches))
