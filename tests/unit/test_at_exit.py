"""What a script has Python do at exit is done when the script ends, as in a process of its own."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from paceline.engines.ray.at_exit import done_with_script

LOADED = ("paceline.training", "torch", "zmq", "__main__")


@pytest.fixture
def done() -> Iterator[list[object]]:
    register, unregister = atexit.register, atexit.unregister
    yield []
    assert (atexit.register, atexit.unregister) == (register, unregister)


def test_the_last_is_done_first_with_its_arguments(done: list[object]) -> None:
    with done_with_script(LOADED):
        atexit.register(done.append, 1)

        @atexit.register
        def second() -> None:
            done.append(2)

        atexit.register(lambda *, number: done.append(number), number=3)
        assert done == []
    assert done == [3, 2, 1]


def test_what_is_taken_back_is_not_done(done: list[object]) -> None:
    with done_with_script(LOADED):
        atexit.register(done.append, 1)
        atexit.register(done.append, 2)
        atexit.unregister(done.append)
    assert done == []


def test_what_is_asked_for_meanwhile_is_done_too(done: list[object]) -> None:
    with done_with_script(LOADED):
        atexit.register(lambda: atexit.register(done.append, 1))
    assert done == [1]


def test_a_failure_keeps_nobody_from_the_rest(done: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> None:
        raise error

    def script() -> None:
        atexit.register(done.append, 1)
        atexit.register(fail, ValueError("a full disk"))
        atexit.register(fail, SystemExit(3))
        raise KeyError("the script's own")

    with pytest.raises(KeyError, match="the script's own"), done_with_script(LOADED):
        script()
    assert done == [1]
    told = capsys.readouterr().err
    assert "ValueError: a full disk" in told
    assert "SystemExit" not in told


def asking_in(name: str) -> Callable[..., None]:
    """A function of a module of this name, which asks for what it is given."""
    module = ModuleType(name)
    exec("import atexit\ndef ask(*given):\n    atexit.register(*given)", module.__dict__)
    return module.ask  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name", ["multiprocessing.util", "torch.utils", "paceline.horovod.runtime", "zmq.utils.garbage"]
)
def test_what_the_process_needs_to_its_end_is_left_to_it(done: list[object], name: str) -> None:
    """ZeroMQ's collector of what has been sent would end, which the end of a run still sends by."""
    with done_with_script(LOADED):
        asking_in(name)(done.append, 1)
    assert done == []
    atexit.unregister(done.append)


@pytest.mark.parametrize("name", ["__main__", "a_logger.sdk"])
def test_scripts_and_their_libraries_ask_for_the_script(done: list[object], name: str) -> None:
    with done_with_script(LOADED):
        asking_in(name)(done.append, 1)
    assert done == [1]
