"""CHOCO-SGD: neighbours hear, through a codec, how each model differs from what they already believe of it.

Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed communication",
ICML 2019, algorithm 2, and algorithm 6 for its memory: of all neighbours' estimates their weighted sum is kept alone.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec import Payload, SharedEstimate, TensorCodec, as_bytes
from paceline.codec.costs import Speed, message_coding_s
from paceline.codec.joining import Region, form_of
from paceline.layout import Segment
from paceline.seeding import derive
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.parcel import Parcel
from paceline.topology import Topology

_MEMORY = SharedEstimate()


@final
class CodedMessage:
    """Payloads one behind the other, as bytes."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer


@final
class SharedEstimates(Mixer):
    """x <- x + g (sum_j w_ij e_j - e_i), where e are the estimates, the same wherever they are known, and g is the
    consensus step. Whatever the codec leaves out, the mean of all models stays.

    Args:
        codec: one that contracts.
        seed: of the run; what a codec draws derives from it, the sender and the step.
        consensus_step: 1 takes the weighted mean of the estimates; less is needed the more a codec leaves out.
    """

    missing_messages: ClassVar[str] = (
        "with each, a neighbour's estimate differs from the sender's for ever; leave the codec out"
    )

    def __init__(
        self,
        topology: Topology,
        own: Parcel,
        *,
        rank: int,
        size: int,
        codec: TensorCodec,
        seed: int,
        consensus_step: float,
    ) -> None:
        super().__init__(topology, own, rank=rank, size=size)
        self._codec, self._seed, self._consensus_step = codec, seed, consensus_step
        self._regions = [
            (place, region) for place, segment in enumerate(own.layout.segments) for region in _regions(codec, segment)
        ]
        self._forms = [form_of(codec, region.shape) for _, region in self._regions]
        self._estimate, self._heard, self._next = own.alike(), own.alike(), own.alike()
        self._num_bytes = 4 * sum(region.num_elements for _, region in self._regions)
        num_bytes = sum(form.num_bytes for form in self._forms)
        self._sent = CodedMessage(own.buffer.new_empty(num_bytes))
        self._came = {
            sender: CodedMessage(own.buffer.new_empty(num_bytes)) for sender in sorted(self.near(0).receives_from)
        }

    def outgoing(self, step: int) -> Mapping[int, CodedMessage]:
        payloads: list[Tensor] = []
        for number, (place, region) in enumerate(self._regions):
            before = region.of(self._estimate.values[place])
            encoded = _MEMORY.encode(
                self._codec, region.of(self.own.values[place]), before, seed=self._draw(step, self.rank, number)
            )
            assert encoded.memory is not None
            region.of(self._next.values[place]).copy_(encoded.memory)
            payloads += encoded.payload
        self._sent.buffer.copy_(as_bytes(tuple(payloads)))
        return dict.fromkeys(self.near(step).sends_to, self._sent)

    def incoming(self, step: int) -> Mapping[int, CodedMessage]:
        return self._came

    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        assert not lost
        self._estimate.buffer.copy_(self._next.buffer)
        weights = self.near(step).receives_from
        for sender, message in self._came.items():
            for number, (place, region) in enumerate(self._regions):
                heard = region.of(self._heard.values[place])
                seed = self._draw(step, sender, number)
                change = self._codec.decode(self._payload(message, number), heard, seed=seed)
                heard.add_(change, alpha=weights[sender])
        for values, heard, estimate in zip(self.own.values, self._heard.values, self._estimate.values, strict=True):
            change = torch.sub(heard, estimate, alpha=sum(weights.values()))
            values.add_(change, alpha=self._consensus_step)
        for segment, values in zip(self.own.layout.segments, self.own.values, strict=True):
            segment.zero_padding(values)  # a codec may write there, and checkpoints hold the parameters alone

    def state(self) -> dict[str, Tensor]:
        return {"estimate": self._estimate.buffer, "heard": self._heard.buffer}

    def coding_s(self, step: int, *, operation_s: float) -> tuple[float, float]:
        speed = Speed.said(self._codec, operation_s=operation_s)
        encode_s, decode_s = message_coding_s(self._codec, speed, self._num_bytes, num_tensors=len(self._regions))
        return encode_s + decode_s, len(self._came) * decode_s

    def _draw(self, step: int, sender: int, number: int) -> int:
        return derive(self._seed, "gossip", step, sender, number)

    def _payload(self, message: CodedMessage, number: int) -> Payload:
        start = sum(form.num_bytes for form in self._forms[:number])
        return self._forms[number].read(message.buffer[start : start + self._forms[number].num_bytes])


def _regions(codec: TensorCodec, segment: Segment) -> list[Region]:
    """What is encoded by itself: everything, or tensor by tensor for a codec that looks at their shapes."""
    if codec.shaped:
        return [Region(slot.offset, slot.spec.shape) for slot in segment.slots]
    return [Region(0, (segment.num_elements,))]
