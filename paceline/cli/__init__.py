"""The command line: one file a command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say which package keeps it from running."""
    try:
        # Here, because it imports torch and Ray, which may be what is missing, and takes a second or two.
        from paceline.cli.app import main as run_app
    except ImportError as error:
        print(f"bad  {error.name or 'a package'}: {error}", file=sys.stderr)
        print("     remedy: pip install -c constraints.txt . in Paceline's checkout", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    run_app()
