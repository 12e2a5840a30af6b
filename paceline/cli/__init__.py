"""The command line: one file a command."""

import importlib
import sys
from types import ModuleType

from paceline.cli import exit_codes
from paceline.threads import let_idle_threads_sleep


def main() -> None:
    """Run the command line, or say which package keeps it from running."""
    let_idle_threads_sleep()
    try:
        load("paceline.cli.app").main()
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)


def load(name: str) -> ModuleType:
    """A module by its full name; where a package is missing that it needs, the program ends and says which."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"bad  {error.name or 'a package'}: {error}", file=sys.stderr)
        print("     remedy: pip install -c constraints.txt . in Paceline's checkout", file=sys.stderr)
        sys.exit(exit_codes.FAILED)
