"""Pieces that options name: `topology=torus`, and `topology.rows=2` for what the torus itself may be told.

A kind of piece is a subclass of `Piece`, such as `Topology`; a piece is a frozen dataclass below it with a name:

>>> class Shape(Piece): ...
>>> @dataclass(frozen=True)
... class Box(Shape, name="box"):
...     "Four corners."
...     width: int = 1
>>> read(Shape, "box:width=3"), read(Shape, "box", {"width": "3"}), str(Box(3)), str(Box())
(Box(width=3), Box(width=3), 'box:width=3', 'box')

A piece may hold another, whose settings follow it: `clip:norm=2:then=trimmed-mean:byzantine=1`.
"""

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import UsageError, unknown

P = TypeVar("P", bound="Piece")
_TRUTHS = {"true": True, "false": False}


class Piece:
    """What an option can name. Its text is its name with the fields that are not as by default."""

    name: ClassVar[str]
    """The name on the command line; none: the piece is for strategies of one's own."""

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        if name is not None:
            cls.name = name

    def __str__(self) -> str:
        return ":".join([name_of(self), *(f"{key}={value}" for key, value in settings_of(self).items())])


def name_of(piece: Piece) -> str:
    """The piece's name on the command line, or its class's if it has none there."""
    return type(piece).name if is_named(type(piece)) else type(piece).__name__


def is_named(kind: type) -> bool:
    """Whether the class itself has a name, rather than one that it inherits."""
    return "name" in vars(kind)


def named(kind: type[P]) -> dict[str, type[P]]:
    """Every piece of a kind by its name."""
    own = {kind.name: kind} if is_named(kind) else {}
    return own | {name: below for child in kind.__subclasses__() for name, below in named(child).items()}


def read(kind: type[P], text: str, settings: Mapping[str, Any] | None = None) -> P:
    """The piece of a text as `NAME` or `NAME:OPTION=VALUE:...`, with further settings.

    Raises:
        UsageError: no piece of the kind has the name, or it takes no such option, or none of that value; or an option
            comes twice, or the piece refuses its value.
    """
    name, _, rest = text.strip().partition(":")
    what = kind.__name__.lower()
    pieces = named(kind)
    if name not in pieces:
        raise unknown(what, name, pieces)
    hints = get_type_hints(pieces[name])
    texts = _texts(rest, hints)
    given: dict[str, Any] = {**parse_options(texts, where=f"{what} {text!r}:")}
    for key, value in (settings or {}).items():
        if key in given:
            raise UsageError(f"{what} {name}: {key} is given twice")
        given[key] = value
    known = {field.name: field for field in fields(pieces[name])}  # type: ignore[arg-type]  # pieces are dataclasses
    for key in given:
        if key not in known:
            raise unknown(f"option for {what} {name}", key, known)
    for key, field in known.items():
        if key not in given and _default(field) is MISSING:
            raise UsageError(f"{what} {name} needs {key}, as in {name}:{key}=...")
    values = {key: read_value(key, value, hints[key]) for key, value in given.items()}
    try:
        return pieces[name](**values)
    except ValueError as error:
        raise UsageError(f"{what} {name}: {error}") from None


def _texts(rest: str, hints: Mapping[str, Any]) -> list[str]:
    """The settings in a piece's text. One that is a piece itself takes all that follows."""
    texts = rest.split(":") if rest else []
    for index, text in enumerate(texts):
        if piece_in(hints.get(text.partition("=")[0])) is not None:
            return [*texts[:index], ":".join(texts[index:])]
    return texts


def settings_of(piece: Piece) -> dict[str, str]:
    """The texts of the fields that are not as by default."""
    values = {field: getattr(piece, field.name) for field in fields(piece)}  # type: ignore[arg-type]
    return {field.name: text_of(value) for field, value in values.items() if value != _default(field)}


def parse_options(texts: Iterable[str], *, where: str) -> dict[str, str]:
    """`option=value` texts as a dictionary. Raises UsageError if one has another form, or comes twice."""
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{where} {text!r} is not of the form option=value")
        if key in options:
            raise UsageError(f"{where} {key} is given twice")
        options[key] = value
    return options


def piece_in(hint: Any) -> type[Piece] | None:
    """The kind of piece that a field of this type holds, if it holds one."""
    return next((part for part in _parts(hint) if isinstance(part, type) and issubclass(part, Piece)), None)


def takes(hint: Any, text: Any, option: str) -> bool:
    """Whether a field of this type, with this text, holds a piece that has such an option."""
    kind = piece_in(hint)
    piece = named(kind).get(str(text).partition(":")[0]) if kind is not None else None
    return piece is not None and option in (field.name for field in fields(piece))  # type: ignore[arg-type]


def read_value(name: str, value: Any, hint: Any) -> Any:
    """Text as the type that an option has; other values as they are. Raises UsageError if it is none of these."""
    if not isinstance(value, str):
        return _whole(name, value) if isinstance(value, float) and _is_whole(hint) else value
    if (kind := piece_in(hint)) is not None:
        return read(kind, value)
    if get_origin(hint) in (Union, types.UnionType):
        if any(value in get_args(part) for part in get_args(hint)):
            return value
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise UsageError(f"{name} must be one of {', '.join(map(str, get_args(hint)))}, not {value!r}")
    if get_origin(hint) is Literal or hint is str:
        return value
    if hint is bool:
        if value not in _TRUTHS:
            raise UsageError(f"option {name}={value!r} is neither true nor false")
        return _TRUTHS[value]
    try:
        return hint(value)
    except ValueError:
        raise UsageError(f"option {name}={value!r} is not {'a whole number' if hint is int else 'a number'}") from None


def _is_whole(hint: Any) -> bool:
    """Whether a field of this type holds whole numbers, and no others."""
    parts = _parts(hint)
    return int in parts and float not in parts


def _whole(name: str, value: float) -> int:
    if not value.is_integer():
        raise UsageError(f"option {name}={value!r} is not a whole number")
    return int(value)


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types that a union is of, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def text_of(value: object) -> str:
    """A value as options are written on the command line."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default(field: "Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
