"""The parameter server by itself: values by key on servers, for programs that are no training script."""

from paceline.errors import DeadlineExceeded, UsageError
from paceline.kv.filters import Filter, SignificantlyModified, kkt
from paceline.kv.range_clocks import RangeClock
from paceline.kv.serving import Group, Server, serve
from paceline.kv.spec import Function, Pairs, Spec
from paceline.kv.store import Store

__all__ = [
    "DeadlineExceeded",
    "Filter",
    "Function",
    "Group",
    "Pairs",
    "RangeClock",
    "Server",
    "SignificantlyModified",
    "Spec",
    "Store",
    "UsageError",
    "kkt",
    "serve",
]
