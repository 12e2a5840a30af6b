"""A cluster as the text of a TOML file, which `cluster_file` reads."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import tomli_w

from paceline.cluster.description import Cluster, Hosts


def as_toml(cluster: Cluster) -> str:
    """The file's text: what is not as by default, and of hosts everything, as that is what readers change."""
    return tomli_w.dumps(_plain(cluster))


def _plain(part: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        is_default = field.default is not MISSING and value == field.default
        if value in (None, "") or (is_default and not isinstance(part, Hosts)):
            continue
        if is_dataclass(value):
            table[field.name] = _plain(value)
        elif isinstance(value, tuple):
            table[field.name] = [_plain(item) if is_dataclass(item) else item for item in value]
        else:
            table[field.name] = value
    return table
