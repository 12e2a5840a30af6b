"""Where tensors lie in a flat buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.layout import ALIGNMENT_BYTES, NUM_FLAGS, Layout, TensorSpec, by_group, in_buckets

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.just("p"),
        st.lists(st.integers(0, 6), max_size=3).map(tuple),
        st.sampled_from(DTYPES),
        st.integers(0, 1),
    ),
    max_size=12,
)
LAYOUTS: list[Callable[[Sequence[TensorSpec]], Layout]] = [
    by_group,
    lambda specs: in_buckets(specs, bucket_bytes=1),
    lambda specs: in_buckets(specs, bucket_bytes=200, first_bucket_bytes=50),
    lambda specs: in_buckets(specs, bucket_bytes=10**9),
]


@given(specs=SPECS, lay_out=st.sampled_from(LAYOUTS))
def test_views_are_aligned_and_never_overlap(
    specs: list[TensorSpec], lay_out: Callable[[Sequence[TensorSpec]], Layout]
) -> None:
    layout = lay_out(specs)
    assert layout.num_bytes % ALIGNMENT_BYTES == 0
    assert layout.specs == specs
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert [(tuple(view.shape), view.dtype) for view in views] == [(spec.shape, spec.dtype) for spec in specs]
    owners = torch.zeros(layout.num_bytes, dtype=torch.int64)
    for view in views:
        start = view.data_ptr() - buffer.data_ptr()
        assert view.numel() == 0 or start % ALIGNMENT_BYTES == 0
        owners[start : start + view.numel() * view.itemsize] += 1
    for segment in layout.segments:
        assert segment.start_bytes % ALIGNMENT_BYTES == 0
        end = segment.start_bytes + segment.num_bytes
        owners[end - segment.tail * segment.dtype.itemsize : end] += 1
        assert {slot.spec.dtype for slot in segment.slots} == {segment.dtype}
    assert bool((owners <= 1).all())
    spans = [(segment.start_bytes, segment.start_bytes + segment.num_bytes) for segment in layout.segments]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= layout.num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_of_any_number_of_tensors_lie_behind_them(dtype: torch.dtype) -> None:
    for num_tensors in range(1, 70):
        (segment,) = in_buckets([TensorSpec("p", (64,), dtype)] * num_tensors, bucket_bytes=10**6).segments
        assert segment.slots[-1].stop <= segment.num_elements - segment.tail
        assert segment.num_bytes % ALIGNMENT_BYTES == 0


@given(specs=SPECS)
def test_by_group_has_one_segment_for_each_group_and_dtype_in_the_given_order(specs: list[TensorSpec]) -> None:
    layout = by_group(specs)
    keys = [(segment.group, segment.dtype) for segment in layout.segments]
    assert keys == list(dict.fromkeys((spec.group, spec.dtype) for spec in specs))
    for segment in layout.segments:
        expected = [i for i, s in enumerate(specs) if (s.group, s.dtype) == (segment.group, segment.dtype)]
        assert [slot.index for slot in segment.slots] == expected
        assert segment.tail == 0


@given(specs=SPECS, bucket_bytes=st.integers(1, 2000), first=st.none() | st.integers(1, 2000))
def test_in_buckets_is_in_reverse_and_as_large_as_asked(
    specs: list[TensorSpec], bucket_bytes: int, first: int | None
) -> None:
    layout = in_buckets(specs, bucket_bytes=bucket_bytes, first_bucket_bytes=first)
    for dtype in DTYPES:
        order = [slot.index for s in layout.segments for slot in s.slots if s.dtype == dtype]
        assert order == [i for i in reversed(range(len(specs))) if specs[i].dtype == dtype]
    for number, segment in enumerate(layout.segments):
        assert segment.tail == NUM_FLAGS + len(segment.slots)
        limit = bucket_bytes if number else min(first or bucket_bytes, bucket_bytes)
        # Closed as soon as it is full: without its last tensor it was not.
        assert sum(slot.spec.num_bytes for slot in segment.slots[:-1]) < limit


def test_in_buckets_fills_each_bucket_before_the_next() -> None:
    specs = [TensorSpec(str(i), (25,), torch.float32) for i in range(7)]  # 100 bytes each
    layout = in_buckets(specs, bucket_bytes=300, first_bucket_bytes=100)
    assert [[slot.index for slot in segment.slots] for segment in layout.segments] == [[6], [5, 4, 3], [2, 1, 0]]
