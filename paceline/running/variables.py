"""Environment variables of workers and servers that a command names."""

import os
from collections.abc import Iterable

from paceline.errors import UsageError


def variables(given: Iterable[str]) -> dict[str, str]:
    """By name, of texts such as `NAME=VALUE`, or `NAME` for the value here. Raises UsageError for one that has no name
    or value."""
    found = {}
    for text in given:
        name, is_set, value = text.partition("=")
        if not name:
            raise UsageError(f"--env {text!r} is not as in NAME=VALUE")
        if not is_set and name not in os.environ:
            raise UsageError(f"--env {name}: it is not set here; give its value, as in --env {name}=VALUE")
        found[name] = value if is_set else os.environ[name]
    return found
