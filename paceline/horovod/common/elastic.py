"""What an elastic job keeps when workers come and go, and how its training function is called anew."""

import functools
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.horovod import line
from paceline.horovod import runtime as basics
from paceline.horovod.elastic_jobs.driver import REMOVED
from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

_Result = TypeVar("_Result")


class State:
    """What training needs to go on. `save`, `restore` and `sync` are its kind's own.

    Args:
        bcast_object: gives all ranks the first one's object.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these after each reset, when ranks and their number may be others."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Ranks have met anew."""
        self._host_messages = queue.Queue()
        launcher = line.current()
        if launcher is not None:
            launcher.remind(self)  # of what has come for the new membership already
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and look for changes of hosts. Collective call. Raises as `check_host_updates`."""
        self.save()
        if (recorder := basics.recorder()) is not None:
            recorder.commit()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Collective call.

        Raises:
            HostsUpdatedInterrupt: the first rank has heard that hosts have come or are to go; on all ranks.
        """
        before, last, update = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, what = self._host_messages.get()
            if timestamp > last:
                last = timestamp
                update |= what
        before, self._last_updated_timestamp, update = self._bcast_object((before, last, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(skip_sync=update == REMOVED)

    def save(self) -> None:
        """Keep the state as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over the first rank's state. Collective call."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks, before their states are brought together."""


class ObjectState(State):
    """Python objects, each an attribute by its name. Numbers, words, tensors and what lists, tuples, sets and
    dictionaries hold of them are kept by value, other objects as they are.

    Args:
        bcast_object, get_rank: as of `State`.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set_attrs()
        self._saved_state = _copy(kwargs)
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: _copy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, _copy(value))


def run_fn(func: Callable[..., _Result], reset: Callable[[], None]) -> Callable[..., _Result]:
    """A function of a state, which is called anew when workers have come or gone.

    HorovodInternalError sends the state back to its last commit; HostsUpdatedInterrupt keeps it as it is.

    Args:
        reset: leaves the old ranks, and meets the new.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        launcher = line.current()
        if launcher is not None:
            launcher.listen(state)
        is_new, is_synced = False, False
        try:
            while True:
                try:
                    if is_new:
                        reset()
                        is_synced = is_synced and not (launcher is not None and launcher.has_newcomers)
                        state.on_reset()
                        is_new = False
                    if not is_synced:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    if (recorder := basics.recorder()) is not None:
                        recorder.go_back()
                    is_new, is_synced = True, False
                except HostsUpdatedInterrupt as interrupt:
                    is_new, is_synced = True, interrupt.skip_sync
        finally:
            if launcher is not None:
                launcher.forget(state)

    return wrapper


def _copy(value: Any) -> Any:
    """By value, as far as it is plain."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {name: _copy(each) for name, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copy(each) for each in value)
    return value
