"""What a script of Horovod's does by itself, as one strategy among others in records and reports."""

from dataclasses import dataclass
from typing import final

from paceline.errors import UsageError
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Traits


@final
@dataclass(frozen=True, kw_only=True)
class Horovod(Strategy):
    """The script calls `hvd.init()` and exchanges through `paceline.horovod.torch`, which records its steps.

    >>> Horovod().traits.by_script
    True
    """

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=False, by_script=True)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        raise UsageError(
            "strategy horovod is for scripts that call hvd.init() and exchange by themselves; one that calls "
            "worker.prepare takes another: --strategy all-reduce runs it"
        )
