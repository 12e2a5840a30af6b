"""A strategy as a study names it: `ps-bsp`, or with options `ps-bsp:servers=2:combine=server`."""

import re
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.strategies import STRATEGIES, build, name_of, settings_of
from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class Variant:
    text: str
    """As on the command line, and in tables and figures. The same for the same strategy: `ps-async:servers=1` is
    `ps-asp`."""
    strategy: Strategy

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Read `NAME` or `NAME:OPTION=VALUE:...`. Raises UsageError if one is unknown or comes twice."""
        return cls.of(build(text))

    @classmethod
    def of(cls, strategy: str | Strategy) -> "Variant":
        """Make a variant of a text as `parse` reads it, or of a strategy such as `ParameterServer(servers=2)`. Raises
        UsageError as `parse`; also if it is neither, or a strategy of no name."""
        if isinstance(strategy, str):
            return cls.parse(strategy)
        if not isinstance(strategy, Strategy):
            raise UsageError(f"a strategy is a name or a Strategy, not {strategy!r}")
        name = name_of(strategy)
        if name not in STRATEGIES:
            raise UsageError(f"{name} has no name in studies: give it one with paceline.strategies.register")
        text = ":".join([name, *(f"{key}={value}" for key, value in settings_of(strategy).items())])
        if not _reads_as(text, strategy):
            raise UsageError(f"{text} does not say all of the strategy, so that no study can take it up again; use run")
        return cls(text, strategy)

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.=+-]", "_", self.text)


def _reads_as(text: str, strategy: Strategy) -> bool:
    try:
        return build(text) == strategy
    except UsageError:
        return False
