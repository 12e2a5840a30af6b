"""Torch's labels for profilers, made only while a profiler runs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function


@contextmanager
def only_where_seen() -> Iterator[None]:
    """Make no labels while no profiler runs.

    Each takes 50 us right after a gradient, which has emptied the caches, and a step of about 6 ms has three at least.
    """
    enter: Any = record_function.__enter__

    @functools.wraps(enter)  # TorchScript looks for the method's name and source
    def enter_where_seen(label: record_function) -> Any:
        # The first profiles a thread, the second all of them.
        is_seen = torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled
        label.run_callbacks_on_exit = is_seen  # without one, leaving it does nothing either
        return enter(label) if is_seen else label

    # Only the method is replaced: torch.compile looks for the class.
    record_function.__enter__ = enter_where_seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        record_function.__enter__ = enter  # type: ignore[method-assign]
