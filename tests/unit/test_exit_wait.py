"""Threads that an interpreter waits for before it ends, for a while."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.comm import exit_wait

ENDING = """
import runpy, time
start = runpy.run_path({path!r})["start_thread"]
start(lambda: (time.sleep({seconds}), print("has ended", flush=True)), name="a thread")
"""


@pytest.mark.parametrize(("seconds", "said"), [(0.3, "has ended\n"), (600, "")])
def test_an_interpreter_waits_for_such_a_thread_for_a_while(seconds: float, said: str) -> None:
    script = ENDING.format(path=exit_wait.__file__, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == said
