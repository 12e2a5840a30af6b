"""Objects as YAML that programs of YAML 1.1 and of 1.2 read alike, since Kubernetes' own is neither."""

from collections.abc import Sequence
from typing import Any, final

import yaml

from paceline.errors import UsageError


def documents(objects: Sequence[Any]) -> str:
    """One document an object, of dicts, lists, text, whole numbers and booleans.

    Raises:
        UsageError: some text is not Unicode, as an argument that was typed in another encoding.
    """
    return str(
        yaml.dump_all(
            objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), explicit_start=True
        )
    )


@final
class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # published without types
    def ignore_aliases(self, data: Any) -> bool:
        """What is there twice is written twice: a reader should not have to look for it."""
        return True


def _represent(dumper: Any, text: str) -> Any:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end + 20]
        raise UsageError(f"{near!r} is not Unicode, and YAML takes nothing else") from None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))


def _style(text: str) -> str | None:
    """Lines as they are; in quotes what some version of YAML would change, or take for a number or a truth (1e3, y)."""
    if not all(character == "\n" or character.isprintable() for character in text):
        return '"'
    if "\n" in text:
        return "|"
    return None if len(text) > 1 and text[0].isascii() and text[0].isalpha() else '"'


_Dumper.add_representer(str, _represent)
