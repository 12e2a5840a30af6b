"""What every model needs to know of its input."""

from paceline.errors import UsageError

ImageShape = tuple[int, int, int]
"""Channels, height and width, in pixels."""


def require_pixels(shape: ImageShape, *, at_least: int, model: str) -> None:
    """Raise UsageError where an image is so small that the model's poolings would leave nothing of it."""
    _, height, width = shape
    if min(height, width) < at_least:
        raise UsageError(f"{model} needs images of at least {at_least}x{at_least} pixels, not {height}x{width}")
