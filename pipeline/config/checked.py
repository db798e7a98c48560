"""The types of settings, and the dataclasses that check them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from annotated_types import GroupedMetadata, Interval
from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, Strict, ValidationError
from pydantic_core import CoreSchema
from typing_extensions import dataclass_transform

from pipeline.config.mistakes import what_is_wrong
from pipeline.config.setting import MOST, X_KEY_ONLY
from pipeline.errors import ConfigError

Checked = TypeVar("Checked")
Element = TypeVar("Element")


def _number_in(value: Any) -> Any:
    """The number in a flag's text; YAML reads `1e-3` as text, too."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


class Between(GroupedMetadata):
    """A number within bounds, both included; no boolean, NaN or infinity.

    Args:
      low: Least value.
      high: Largest value; `MOST` if only the size of integers limits it.
    """

    def __init__(self, low: float, high: float = MOST):
        self._low = low
        self._high = high

    def __iter__(self) -> Iterator[object]:
        yield Strict()
        yield Interval(ge=self._low, le=self._high)
        yield BeforeValidator(_number_in)


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


class _OrOne:
    """Lets the JSON Schema accept one element without its list."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        array = handler(schema)
        return {"anyOf": [array["items"], array]} if handler.mode == "validation" else array


KEY_ONLY: Any = {"json_schema_extra": {X_KEY_ONLY: True}}  # for `setting` and `section`: no flag of the command line
Share = Annotated[float, Between(0.0, 1.0)]
Count = Annotated[int, Between(1)]
CountFrom0 = Annotated[int, Between(0)]
Threads = Annotated[int, Between(1, 1024)]  # a pool starts all of them at once
Switch = Annotated[bool, Strict()]  # not 1, 'on'
Text = Annotated[str, Strict()]  # not bytes
ListOf = Annotated[tuple[Element, ...], BeforeValidator(_listed), _OrOne()]
PairOf = Annotated[tuple[Element, Element], BeforeValidator(_listed)]


def setting(default: Any, help_text: str, **more: Any) -> Any:
    """A setting with its default, its one-line help, and what else pydantic's `Field` takes."""
    return Field(default=default, description=help_text, **more)


def foreign(help_text: str) -> Any:
    """A setting that describes a model which does not describe itself: a key of the config file only."""
    return setting(None, f"foreign models: {help_text}", **KEY_ONLY)


def section(declared: Any, help_text: str | None = None, **more: Any) -> Any:
    """A key with settings below it; each of them has its own default."""
    return Field(default_factory=declared, description=help_text, **more)


@dataclass_transform(frozen_default=True)
def checked(cls: type[Checked]) -> type[Checked]:
    """Makes a frozen dataclass whose constructor raises a `ConfigError` of one line."""
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    check = made.__init__

    @functools.wraps(check)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            check(self, *args, **kwargs)
        except ValidationError as err:
            raise ConfigError(what_is_wrong(err, made, cls.__name__)) from err

    made.__init__ = init
    checked_class: type[Checked] = made
    return checked_class
