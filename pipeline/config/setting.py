"""What a setting is, for those who show or offer it: the command line, messages, tests. Taken from the classes' JSON Schema."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

MOST = 2**31 - 1  # whole numbers reach TensorFlow, Pub/Sub and the system with 32 bits; waits of more seconds overflow, too


class Setting(NamedTuple):
    """One setting.

    Attributes:
      key: Its place: `detect.score_threshold`. The last part is unique among all settings of a job.
      default: As JSON has it.
      schema: The JSON Schema of its value (None aside), with its help as `description`.
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
        """Its flag on the command line."""
        return "--model" if self.key == "model.path" else "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """What it is, in one line."""
        return str(self.schema["description"])

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Least and largest number, of each element in a list; None where it is no number."""
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
