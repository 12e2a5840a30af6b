"""What codecs take of a core on tensors that are small, beyond what they say of bytes."""

import statistics
import time

from paceline.codec import Int8
from paceline.codec.costs import alone, coding_s, num_operations
from paceline.probing.timing import CacheEmptier

_NUM_ELEMENTS, _NUM_WORKERS, _NUM_AVERAGES = 1 << 17, 8, 20
"""Of an average: half a megabyte, which workers cut into parts of 64 KiB."""


def operation_s() -> float:
    """Processor time of one of a codec's operations, besides its bytes; caches hold other things, as after a training
    step."""
    codec, shapes = Int8(), [(_NUM_ELEMENTS,)]
    exchange, emptier, taken_s = alone(codec, shapes, _NUM_WORKERS), CacheEmptier(), []
    for _ in range(_NUM_AVERAGES):
        emptier()
        began_s = time.thread_time()
        exchange()
        taken_s.append(time.thread_time() - began_s)
    bytes_s = coding_s(codec, _NUM_ELEMENTS, _NUM_WORKERS)
    return max(0.0, statistics.median(taken_s) - bytes_s) / num_operations(codec, shapes, _NUM_WORKERS)
