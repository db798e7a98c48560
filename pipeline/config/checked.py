"""What the declaration of a setting means: types of values, and classes that check them."""

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
from pipeline.config.setting import MOST
from pipeline.errors import ConfigError

Checked = TypeVar("Checked")
Element = TypeVar("Element")


def _number_in(value: Any) -> Any:
    """The number that a flag's text holds; in a file, YAML takes `1e-3` for text."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


class Between(GroupedMetadata):
    """A number within bounds, both included; booleans, NaN and infinity are none.

    Args:
      low: Least value.
      high: Largest value; `MOST` where nothing but its size speaks against a larger one.
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
    """In a file, one element may stand without its list."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        array = handler(schema)
        return {"anyOf": [array["items"], array]} if handler.mode == "validation" else array


Share = Annotated[float, Between(0.0, 1.0)]
Count = Annotated[int, Between(1)]
CountFrom0 = Annotated[int, Between(0)]
Threads = Annotated[int, Between(1, 1024)]  # all of a pool's are started at once
Switch = Annotated[bool, Strict()]  # not 1, 'on'
Text = Annotated[str, Strict()]  # not bytes
ListOf = Annotated[tuple[Element, ...], BeforeValidator(_listed), _OrOne()]
PairOf = Annotated[tuple[Element, Element], BeforeValidator(_listed)]


def setting(default: Any, help_text: str, **more: Any) -> Any:
    """A setting with its default, its one-line help, and what else pydantic's `Field` takes."""
    return Field(default=default, description=help_text, **more)


def section(declared: Any, help_text: str | None = None) -> Any:
    """Settings that stand together under one key; by default, each has its own default."""
    return Field(default_factory=declared, description=help_text)


@dataclass_transform(frozen_default=True)
def checked(cls: type[Checked]) -> type[Checked]:
    """Makes a frozen dataclass of a class with settings, whose constructor raises `ConfigError` in one line."""
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
