"""The statuses that the command line ends with, besides 0."""

FAILED, USAGE = 1, 2
INTERRUPTED = 130
