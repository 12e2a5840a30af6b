"""Chooses a codec for a run from what its first steps, or rounds, take."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import final

import torch

from paceline.codec import Auto, Chosen, Codec, JointCodec, Shape, TensorCodec, chosen
from paceline.codec.costs import Speed, coding_s, message_coding_s, operation_s
from paceline.codec.joining import sent_bytes
from paceline.strategies.base import Context
from paceline.strategies.bucket_size import LARGE_BYTES, MIN_BYTES, measured
from paceline.strategies.bucketing import allocated

_SAMPLE_ELEMENTS = 1 << 18
_NUM_SAMPLES = 5


@final
class Choosing:
    """Watches steps without a codec, until it can tell what each candidate would make of them.

    Args:
        taken_s: what an exchange would take with a codec that codes so fast.
        what: is watched: a step, or a round.
    """

    def __init__(
        self, codec: Auto, context: Context, taken_s: Callable[[Codec, Speed], float], *, what: str = "step"
    ) -> None:
        self._codec, self._context, self._taken_s, self._what = codec, context, taken_s, what
        self._steps_s: list[float] = []
        self._exchanges_s: list[float] = []
        self._last = self._now()

    def step_ended(self) -> Chosen | None:
        """What was chosen, and why, once all workers have seen enough steps; the same on every one."""
        now = self._now()
        self._steps_s.append(now[0] - self._last[0])
        self._exchanges_s.append(now[1] - self._last[1])
        self._last = now
        if len(self._steps_s) < self._codec.after:
            return None
        candidates = self._codec.candidates
        taken_s = [self._taken_s(codec, self._speed(codec)) for codec in candidates]
        mine = [statistics.median(self._steps_s[1:]), statistics.median(self._exchanges_s[1:]), *taken_s]
        slowest = torch.tensor(mine, dtype=torch.float64, device=self._context.device)
        self._context.collective.all_reduce(slowest, op="max").wait()
        step_s, exchange_s, *taken_s = slowest.tolist()
        steps_s = {codec: step_s - exchange_s + each_s for codec, each_s in zip(candidates, taken_s, strict=True)}
        return chosen(step_s, steps_s, what=self._what)

    def _speed(self, codec: Codec) -> Speed:
        """On this worker; as codec and cluster say where time is simulated."""
        if self._context.pacing.is_simulated:
            return Speed.said(codec, operation_s=self._context.pacing.operation_s)
        edge = int(_SAMPLE_ELEMENTS**0.5)
        sample = torch.randn(edge, edge, device=self._context.device, generator=torch.Generator(self._context.device))
        encode, decode = [], []
        for _ in range(_NUM_SAMPLES):
            began_s = time.perf_counter()
            if isinstance(codec, TensorCodec):
                payload = codec.encode(sample, seed=0)
                encode.append(time.perf_counter() - began_s)
                codec.decode(payload, sample, seed=0)
            elif isinstance(codec, JointCodec):
                kept = codec.begin([(edge, edge)], sample, seed=0)
                codec.average([sample.clone()], kept, out=[sample], mean=lambda tensor: None)
                encode.append(time.perf_counter() - began_s)
            decode.append(time.perf_counter() - began_s - encode[-1])
        gbytes = sample.nbytes / 1e9
        return Speed(min(encode) / gbytes, min(decode) / gbytes, operation_s(codec, self._context.device))

    def _now(self) -> tuple[float, float]:
        return self._context.pacing.now_s(), self._context.collective.timing.communication_s


@final
class LinkSpeed:
    """What exchanges take here, as averages without a codec have shown at the start. Collective call.

    Args:
        among_hosts: only what leaves a host is coded.
        num_bytes: about as large as exchanges are.
    """

    def __init__(self, context: Context, *, among_hosts: bool, num_bytes: int) -> None:
        # Hosts may have unlike numbers of workers: rounded up, there are two or more.
        self._num_coding = -(-context.size // context.local_size) if among_hosts else context.size
        self._found = measured(
            context.collective,
            lambda flat: context.collective.all_reduce(flat, op="mean"),
            allocated(context, min(max(num_bytes, MIN_BYTES), LARGE_BYTES)),
            now_s=context.pacing.now_s,
        )

    def average_s(self, codec: Codec, speed: Speed, *, shapes: Sequence[Shape], num_exchanges: int = 1) -> float:
        """Time of an average of tensors of these shapes through a codec, in so many parts."""
        size = self._num_coding
        link_bytes_per_s = self._found.bytes_per_s * 2 * (size - 1) / size
        count = sum(torch.Size(shape).numel() for shape in shapes)
        moved_s = sent_bytes(codec, shapes, size) / link_bytes_per_s
        latency_s = 2 * num_exchanges * self._found.latency_s
        coded_s = coding_s(codec, count, size, speed=speed, shapes=shapes, num_exchanges=num_exchanges)
        return coded_s + moved_s + latency_s

    def messages_s(self, codec: Codec, speed: Speed, *, shape: Shape, num_messages: int) -> float:
        """Time to move a tensor of this shape to and from so many neighbours, who share an estimate of it."""
        size = self._num_coding
        link_bytes_per_s = self._found.bytes_per_s * 2 * (size - 1) / size
        encode_s, decode_s = message_coding_s(codec, speed, 4 * torch.Size(shape).numel())
        moved_s = num_messages * codec.num_bytes(shape) / link_bytes_per_s
        return encode_s + (1 + num_messages) * decode_s + moved_s + self._found.latency_s
