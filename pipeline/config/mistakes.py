"""pydantic's errors in one line: the expected value, the given one, and for an unknown key the nearest known one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.setting import MOST, Setting, settings_of
from pipeline.config.synonyms import near_names, synonym_of
from pipeline.secrets import MASK, is_secret

_EXPECTED = {  # by pydantic's type of error: https://docs.pydantic.dev/latest/errors/validation_errors/
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a section with keys",
    "dataclass_type": "a section with keys",
}


def what_is_wrong(err: ValidationError, cls: type, source: str, flags: Mapping[str, str] | None = None) -> str:
    """The first error in one line.

    Args:
      err: pydantic's error.
      cls: The checked class.
      source: Where its values came from.
      flags: Key to flag, for values that came from the command line instead.
    """
    first = err.errors(include_url=False, include_context=False)[0]
    line = _unknown_key(first, cls, source) or _wrong_value(first, cls, source, flags or {})
    return " ".join(line.splitlines())


def _unknown_key(error: ErrorDetails, cls: type, source: str) -> str | None:
    keys = [setting.key for setting in settings_of(cls)]
    match error["type"]:
        case "unexpected_keyword_argument":
            path = error["loc"]
        case "invalid_key":  # not even text
            path = (*error["loc"][:-1], str(error["input"]))
        case "string_unicode" if _key(error) not in keys:  # a key that no UTF-8 can hold
            path = (*error["loc"], error["input"])
        case _:
            return None
    known = {key.rpartition(".")[2]: key for key in keys}
    if len(path) == 1:
        known = {section: section for section, dot, _ in (key.partition(".") for key in keys) if dot} | known
    hint = _hint(str(path[-1]), known, {setting.flag: setting.key for setting in settings_of(cls)})
    return f"{source}: unknown key {_shown('.'.join(map(str, path)))}; {hint}"


def _hint(name: str, known: Mapping[str, str], keys_of_flags: Mapping[str, str]) -> str:
    """The key that a user may have meant; `known`: key by its last part."""
    if synonym := synonym_of(name):
        flag = synonym.split()[0].rstrip(",")
        return f"here it is {keys_of_flags.get(flag) or synonym}"
    if near := near_names(name, known):
        *others, last = (f"'{known[each]}'" for each in near)
        return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return "python -m pipeline.run --help lists all settings"


def _wrong_value(error: ErrorDetails, cls: type, source: str, flags: Mapping[str, str]) -> str:
    key = _key(error)
    setting = next((setting for setting in settings_of(cls) if setting.key == key), None)
    got = MASK if key.startswith("beam_options.") and is_secret(key) else _shown(error["input"])
    said = error["input"]
    synonym = synonym_of(f"{key.rpartition('.')[2]}-{said}") if isinstance(said, str) else None
    hint = f"; here it is {synonym}" if synonym else ""
    return f"{flags.get(key) or f'{source}: {key}'}: expected {_expected(error, setting)}, got {got}{hint}"


def _key(error: ErrorDetails) -> str:
    """The setting's key, without pydantic's marks for elements of lists and keys of mappings."""
    return ".".join(part for part in error["loc"] if isinstance(part, str) and part != "[key]")


def _expected(error: ErrorDetails, setting: Setting | None) -> str:
    match error["type"]:
        case "greater_than_equal" | "less_than_equal" | "finite_number" if setting and setting.bounds:
            return _within(*setting.bounds, error["input"])
        case "literal_error" | "string_unicode" if setting:
            return " or ".join(map(repr, (setting.schema.get("items") or setting.schema)["enum"]))
        case "missing" | "too_long" if setting:
            return f"{setting.schema['maxItems']} values"
        case kind:
            return _EXPECTED.get(kind, error["msg"])


def _within(low: float, high: float, number: float) -> str:
    if high < MOST:
        return f"a number between {low} and {high}"
    return f"a number at most {high}" if number > high else f"a number at least {low}"


def _shown(value: Any) -> str:
    """The value, shortened; Python refuses to write very long integers."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 500
    try:
        return short.repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to show"
