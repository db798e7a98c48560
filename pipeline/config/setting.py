"""`Setting`: a setting's key, flag, default and help, read from the JSON Schema of the config, for command line and messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

MOST = 2**31 - 1  # TensorFlow, Pub/Sub and the system take integers of 32 bits; longer waits in seconds overflow, too


X_KEY_ONLY = "x-key-only"  # marks, in the JSON Schema, a key of the config file that is no flag


class Setting(NamedTuple):
    """One setting.

    Attributes:
      key: Its dotted key, `detect.score_threshold`. The last part is unique among all settings.
      default: Its default, as JSON.
      schema: The JSON Schema of its value without null, with its help as `description`.
    """

    key: str
    default: Any
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """Its flag on the command line; empty where it is a key of the config file only."""
        if X_KEY_ONLY in self.schema:
            return ""
        return "--model" if self.key == "model.path" else "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """Its help, in one line."""
        return str(self.schema["description"])

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Least and largest number, of each element in a list; None if it is no number."""
        parts = (self.schema, self.schema.get("items", {}), *self.schema.get("prefixItems", ()))
        return next(((part["minimum"], part["maximum"]) for part in parts if "minimum" in part), None)


@functools.cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """All settings of a class and of its sections, in the order of their declaration."""
    schema = TypeAdapter(cls).json_schema(mode="serialization")
    return tuple(_leaves(schema["properties"], schema.get("$defs", {}), ""))


def _leaves(properties: Mapping[str, Any], classes: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    for name, part in properties.items():
        if "$ref" in part:
            yield from _leaves(classes[part["$ref"].rpartition("/")[2]]["properties"], classes, f"{prefix}{name}.")
            continue
        options = [option for option in part.get("anyOf", ()) if option != {"type": "null"}]
        yield Setting(prefix + name, part.get("default"), {**(options[0] if options else {}), **part})
