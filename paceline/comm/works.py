"""Works that hand on what they are asked."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar, final

from paceline.comm.base import Work

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Owner(Protocol[T_contra]):
    def poll(self, operation: T_contra, /) -> bool: ...

    def wait(self, operation: T_contra, /) -> None: ...


@final
class OwnedWork(Work, Generic[T]):
    def __init__(self, owner: Owner[T], operation: T) -> None:
        self._owner = owner
        self._operation = operation

    def poll(self) -> bool:
        return self._owner.poll(self._operation)

    def wait(self) -> None:
        self._owner.wait(self._operation)


@final
class GuardedWork(Work):
    """Another work, asked under a guard that may change its errors. Once over, it stays over."""

    def __init__(self, work: Work, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._work: Work | None = work
        self._guard = guard

    def poll(self) -> bool:
        if self._work is not None:
            with self._guard():
                if self._work.poll():
                    self._work = None
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            with self._guard():
                self._work.wait()
            self._work = None


@final
class WhenWaitedFor(Work):
    """Runs where it is waited for, and blocks there."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def poll(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        if self._run is not None:
            self._run()
        self._run = None
