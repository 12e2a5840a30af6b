"""What a launcher has to load before it trains nothing itself: no more than it needs."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

NOT_NEEDED = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "pandas", "scipy", "plotly")
"""What takes tenths of a second and more to load."""


def run(code: str) -> None:
    """In a program that has loaded nothing yet."""
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_launcher_loads_no_more_than_it_needs() -> None:
    run(
        f"""
        import sys
        from paceline.cli import commands
        commands.load("run")
        import paceline.running.launch
        from paceline.strategies import build
        build("fed-avg:clients=4"), build("local-sgd"), build("ps-bsp")
        loaded = [name for name in sys.modules if name.startswith({NOT_NEEDED!r})]
        assert not loaded, loaded
        """
    )
