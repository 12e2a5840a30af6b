"""What a script has Python do at exit is done when the script ends, as in a process of its own."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from types import ModuleType

import pytest

from paceline.engines.ray.at_exit import closed_after_script, done_with_script

LOADED = ("paceline.training", "torch", "zmq", "__main__")


@pytest.fixture
def done() -> Iterator[list[object]]:
    before = atexit.register, atexit.unregister, weakref.finalize
    yield []
    assert (atexit.register, atexit.unregister, weakref.finalize) == before


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


def asking_in(name: str) -> ModuleType:
    """A module of this name that asks for what it is given."""
    module = ModuleType(name)
    text = """
import atexit, tempfile, weakref
def ask(*given): atexit.register(*given)
def finalize(*given): return weakref.finalize(*given)
def make_directory(): return tempfile.TemporaryDirectory()
"""
    exec(text, module.__dict__)
    return module


@pytest.mark.parametrize(
    "name", ["multiprocessing.util", "torch.utils", "paceline.horovod.runtime", "zmq.utils.garbage"]
)
def test_what_the_process_needs_to_its_end_is_left_to_it(done: list[object], name: str) -> None:
    """ZeroMQ's collector of what has been sent would end, which the end of a run still sends by."""
    with done_with_script(LOADED):
        asking_in(name).ask(done.append, 1)
    assert done == []
    atexit.unregister(done.append)


@pytest.mark.parametrize("name", ["__main__", "a_logger.sdk"])
def test_scripts_and_their_libraries_ask_for_the_script(done: list[object], name: str) -> None:
    with done_with_script(LOADED):
        asking_in(name).ask(done.append, 1)
    assert done == [1]


class Thing:
    """May be referred to weakly."""


def test_finalizers_that_are_left_are_called_the_last_first(done: list[object]) -> None:
    things, script = [Thing() for _ in range(5)], asking_in("__main__")
    with closed_after_script(LOADED):
        finalizers = [script.finalize(thing, done.append, number) for number, thing in enumerate(things)]
        finalizers[0].atexit = False
        finalizers[1]()
        finalizers[2].detach()
        assert done == [1]
    assert done == [1, 4, 3]
    assert isinstance(finalizers[0], weakref.finalize)


def test_a_finalizer_that_fails_keeps_nobody_from_the_rest(
    done: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    thing, script = Thing(), asking_in("__main__")
    with closed_after_script(LOADED):
        script.finalize(thing, done.append, 1)
        script.finalize(thing, int, "none")
        script.finalize(thing, script.finalize, thing, done.append, 2)
    assert done == [2, 1]
    assert "ValueError: invalid literal" in capsys.readouterr().err


def test_finalizers_of_the_process_are_left_to_it(done: list[object]) -> None:
    thing = Thing()
    before = weakref.finalize(thing, done.append, 1)
    with closed_after_script(LOADED):
        meanwhile = asking_in("paceline.comm.servers").finalize(thing, done.append, 2)
    assert done == []
    assert before.alive
    assert meanwhile.alive
    before.detach()
    meanwhile.detach()


@pytest.mark.parametrize(("name", "is_there"), [("__main__", False), ("torch.utils", True)])
def test_temporary_directories_go_with_the_script_that_has_made_them(name: str, is_there: bool) -> None:
    with closed_after_script(LOADED):
        directory = asking_in(name).make_directory()
        assert Path(directory.name).exists()
    assert Path(directory.name).exists() == is_there
    directory.cleanup()


def test_logging_handlers_of_the_script_are_flushed_and_closed(tmp_path: Path) -> None:
    """Those that were there before go on as they are."""
    kept = MemoryHandler(10, target=logging.FileHandler(tmp_path / "process.log"))
    with closed_after_script(LOADED):
        ours = MemoryHandler(10, target=logging.FileHandler(tmp_path / "script.log"))
        for handler in (kept, ours):
            handler.handle(logging.makeLogRecord({"msg": "a record", "levelno": logging.INFO}))
    assert (tmp_path / "script.log").read_text() == "a record\n"
    assert (tmp_path / "process.log").read_text() == ""
    assert ours.target is None
    kept.close()


def test_handlers_are_closed_after_finalizers_which_may_log(tmp_path: Path) -> None:
    thing, script = Thing(), asking_in("__main__")
    with closed_after_script(LOADED):
        handler = MemoryHandler(10, target=logging.FileHandler(tmp_path / "script.log"))
        script.finalize(thing, handler.handle, logging.makeLogRecord({"msg": "the last", "levelno": logging.INFO}))
    assert (tmp_path / "script.log").read_text() == "the last\n"
