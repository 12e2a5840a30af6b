"""The statuses that the command line ends with, besides 0."""

from __future__ import annotations

FAILED, USAGE = 1, 2
INTERRUPTED = 130
