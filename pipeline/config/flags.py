"""A flag for each setting that has one, for the commands that take a job's settings."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.sections import settings

_METAVARS = {"integer": "N", "number": "X"}


def add_setting_flags(parser: argparse.ArgumentParser, *, every: bool = False) -> None:
    """Adds the flags; `overrides` reads them. The help shows every one, by its section, or none."""
    for section, of_section in itertools.groupby(settings(), key=lambda setting: setting.key.rpartition(".")[0]):
        group = parser.add_argument_group(f"{section or 'job'} settings") if every else parser
        for setting in filter(lambda setting: setting.flag, of_section):
            shown = "" if setting.default in (None, "", [], False) else f" (default: {setting.default})"
            help_text = (setting.help + shown).replace("%", "%%") if every else argparse.SUPPRESS
            group.add_argument(
                setting.flag, **_argument(setting.schema), dest=setting.key, default=argparse.SUPPRESS, help=help_text
            )


def overrides(flags: argparse.Namespace) -> dict[str, Any]:
    """The given flags by dotted key; splits lists at commas, except file names."""
    given = vars(flags)
    return {
        setting.key: _parts(value) if isinstance(value, list) and setting.key != "input" else value
        for setting in settings()
        if (value := given.get(setting.key)) is not None
    }


def _argument(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting; the config checks its value."""
    kind = schema.get("type")
    if kind == "boolean" and "anyOf" in schema:  # or a folder
        return {"nargs": "?", "const": True, "metavar": "FOLDER"}
    if kind == "boolean":
        return {"action": argparse.BooleanOptionalAction}
    if kind == "array":
        return {"action": "extend", "nargs": "+", "metavar": _options(schema.get("items", {})) or "VALUE"}
    return {"metavar": _options(schema) or _METAVARS.get(str(kind), "TEXT")}


def _options(schema: Mapping[str, Any]) -> str:
    return "{" + ",".join(schema["enum"]) + "}" if "enum" in schema else ""


def _parts(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
