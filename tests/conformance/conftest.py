"""One Ray for all tests of a module that run on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.engines.ray.nodes import connected


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A local Ray, as a run would start it; runs inside use it."""
    with connected(None):
        yield
