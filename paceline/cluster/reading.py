"""Reading a cluster from its TOML file; what is wrong with it is said with its line."""

import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.cluster.description import Cluster
from paceline.errors import UsageError, suggest

_SUFFIX = ".toml"
_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_-]+)\s*\]\]?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def shipped() -> dict[str, Path]:
    """The clusters that come with the package, by name."""
    folder = Path(str(resources.files("paceline.cluster").joinpath("shipped")))
    return {path.stem: path for path in sorted(folder.glob("*" + _SUFFIX))}


def load(name: str | Path) -> Cluster:
    """The cluster in a file, or one that comes with the package, by its name. Raises UsageError that names the line and
    the remedy if there is no such file or name, or the file is wrong."""
    path, text = read(name)
    return parse(text, where=str(path))


def read(name: str | Path) -> tuple[Path, str]:
    """The file that a path or a shipped cluster's name stands for, and its text. Raises UsageError if there is no
    such file or name, or it is no text."""
    known = shipped()
    path = known.get(str(name), Path(name))
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = suggest(str(name), known)
        raise UsageError(f"cannot read the cluster {name}: {reason}; give a TOML file or a name{hint}") from None


def parse(text: str, *, where: str) -> Cluster:
    """As `load`, for a file's text."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}") from None
    cluster: Cluster = _Reader(text, where).read(Cluster, content, table="", number=0)
    return cluster


class _Reader:
    """Makes dataclasses of tables, and finds lines for complaints."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._lines = _lines_of(text)

    def read(self, kind: type[Any], content: Mapping[str, Any], *, table: str, number: int) -> Any:
        """Read the table of this name and number as a dataclass; an empty name is the whole file's."""
        place = (table, number)
        known = {field.name: field for field in fields(kind)}
        hints = get_type_hints(kind)
        values: dict[str, Any] = {}
        for key, value in content.items():
            if key not in known:
                raise self._error(place, key, f"unknown key {key!r}{suggest(key, known)}")
            values[key] = self._value(known[key], hints[key], value, place)
        for name, field in known.items():
            if name not in values and field.default is MISSING:
                raise self._error(place, None, f"{name} is missing: {field.metadata['doc']}")
        try:
            return kind(**values)
        except UsageError as error:
            raise self._error(place, None, str(error)) from None

    def _value(self, field: Field[Any], hint: Any, value: Any, place: tuple[str, int]) -> Any:
        hint = _without_none(hint)
        if get_origin(hint) is tuple:
            item = get_args(hint)[0]
            if not isinstance(value, list):
                raise self._error(place, field.name, f"{field.name} must be a list, or tables [[{field.name}]]")
            if is_dataclass(item):
                return tuple(self._table(item, part, field.name, index) for index, part in enumerate(value))
            return tuple(self._scalar(field, item, part, place) for part in value)
        if is_dataclass(hint):
            return self._table(hint, value, field.name, 0)
        return self._scalar(field, hint, value, place)

    def _table(self, kind: Any, content: Any, name: str, number: int) -> Any:
        if not isinstance(content, dict):
            raise self._error(("", 0), name, f"{name} must be a table")
        return self.read(kind, content, table=name, number=number)

    def _scalar(self, field: Field[Any], hint: Any, value: Any, place: tuple[str, int]) -> Any:
        name, least, above = field.name, field.metadata["least"], field.metadata["above"]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                known = ", ".join(f'"{one}"' for one in get_args(hint))
                raise self._error(place, name, f"{name} must be one of {known}, not {value!r}")
            return value
        if hint is float and type(value) is int:
            value = float(value)
        if type(value) is not hint:
            kind = {float: "a number", int: "a whole number", str: "text in quotes"}[hint]
            raise self._error(place, name, f"{name} must be {kind}, not {value!r}: {field.metadata['doc']}")
        if (least is not None and not value >= least) or (above is not None and not above < value < float("inf")):
            bound = f"at least {least:g}" if least is not None else f"above {above:g}"
            raise self._error(place, name, f"{name} must be {bound}, not {value!r}")
        return value

    def _error(self, place: tuple[str, int], key: str | None, message: str) -> UsageError:
        places = ((*place, key), (key or "", 0, None), (*place, None))
        line = next((self._lines[each] for each in places if each in self._lines), 1)
        return UsageError(f"{self._where}, line {line}: {message}")


def _lines_of(text: str) -> dict[tuple[str, int, str | None], int]:
    """The line of each table, and of each key in it."""
    found: dict[tuple[str, int, str | None], int] = {}
    counts: dict[str, int] = {}
    table, number = "", 0
    for line, content in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(content):
            table = header[2]
            number = counts.get(table, 0) if header[1] == "[[" else 0
            counts[table] = number + 1
            found[table, number, None] = line
        elif key := _KEY.match(content):
            found.setdefault((table, number, key[1]), line)
    return found


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint
