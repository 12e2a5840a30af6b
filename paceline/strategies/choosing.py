"""Chooses a codec for a run from what its first steps take."""

import statistics
import time
from collections.abc import Sequence
from typing import final

import torch

from paceline.codec import Auto, Codec, JointCodec, Shape, TensorCodec, chosen
from paceline.codec.joining import coding_s, sent_bytes
from paceline.strategies.base import Context
from paceline.strategies.bucket_size import BucketSize

_SAMPLE_ELEMENTS = 1 << 18
_NUM_SAMPLES = 5


@final
class Choosing:
    """Watches steps without a codec, until it can tell what each candidate would make of them.

    Args:
        exchange: what an average takes here, as measured at the start.
        shapes: of the gradients.
    """

    def __init__(self, codec: Auto, context: Context, exchange: BucketSize, shapes: Sequence[Shape]) -> None:
        self._codec, self._context, self._exchange, self._shapes = codec, context, exchange, shapes
        self._steps_s: list[float] = []
        self._exchanges_s: list[float] = []
        self._last = self._now()

    def step_ended(self) -> tuple[Codec | None, str] | None:
        """What was chosen, and why, once all workers have seen enough steps; the same on every one."""
        now = self._now()
        self._steps_s.append(now[0] - self._last[0])
        self._exchanges_s.append(now[1] - self._last[1])
        self._last = now
        if len(self._steps_s) < self._codec.after:
            return None
        candidates = self._codec.candidates
        speeds = [speed for codec in candidates for speed in self._speed(codec)]
        mine = [statistics.median(self._steps_s[1:]), statistics.median(self._exchanges_s[1:]), *speeds]
        slowest = torch.tensor(mine, dtype=torch.float64, device=self._context.device)
        self._context.collective.all_reduce(slowest, op="max").wait()
        step_s, exchange_s, *speeds = slowest.tolist()
        pairs = zip(candidates, zip(speeds[::2], speeds[1::2], strict=True), strict=True)
        return chosen(step_s, {codec: step_s - exchange_s + self._taken_s(codec, speed) for codec, speed in pairs})

    def _taken_s(self, codec: Codec, speed: tuple[float, float]) -> float:
        """For an average through a codec, on the links that an average without one has shown."""
        size = self._context.size // self._context.local_size if self._context.size > self._context.local_size else 1
        link_bytes_per_s = self._exchange.bytes_per_s * 2 * (size - 1) / size
        count = sum(torch.Size(shape).numel() for shape in self._shapes)
        moved_s = sent_bytes(codec, self._shapes, size) / link_bytes_per_s
        return coding_s(codec, count, size, seconds_per_gbyte=speed) + moved_s + 2 * self._exchange.latency_s

    def _speed(self, codec: Codec) -> tuple[float, float]:
        """Seconds for a GB, to encode and to decode, on this worker; as the codec says where time is simulated."""
        if self._context.pacing.is_simulated:
            return codec.seconds_per_gbyte
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
                codec.average([sample], kept, mean=lambda tensor: None)
                encode.append(time.perf_counter() - began_s)
            decode.append(time.perf_counter() - began_s - encode[-1])
        return min(encode) / sample.nbytes * 1e9, min(decode) / sample.nbytes * 1e9

    def _now(self) -> tuple[float, float]:
        return self._context.pacing.now_s(), self._context.collective.timing.communication_s
