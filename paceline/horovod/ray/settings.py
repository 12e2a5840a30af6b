"""What Horovod's settings on Ray say that has no effect here."""

import warnings


def has_no_effect(**given: object) -> None:
    """Warn of what was given: Ray starts the workers, and has the addresses."""
    for name, value in given.items():
        if value is not None:
            warnings.warn(f"{name} has no effect: Ray starts the workers, and has their addresses", stacklevel=3)
