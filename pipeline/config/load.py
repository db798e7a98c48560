"""File and flags become one checked config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from pipeline.config.mistakes import what_is_wrong
from pipeline.config.sections import Config, settings
from pipeline.errors import ConfigError


def load_config(path: str | None, overrides: Mapping[str, Any]) -> Config:
    """Reads a config file and lays flags over it.

    Args:
      path: YAML file; None for the defaults.
      overrides: Dotted key (`detect.score_threshold`) to value; a number may be text, as on the command line.

    Raises:
      ConfigError: The file is unreadable, no YAML mapping, or has an unknown key or a wrong value.
    """
    tree = _laid_over(_read_yaml(path) if path else {}, overrides)
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as err:
        flags = {setting.key: setting.flag for setting in settings() if setting.key in overrides}
        raise ConfigError(what_is_wrong(err, Config, path or "the flags", flags)) from err


def _laid_over(tree: Mapping[Any, Any], overrides: Mapping[str, Any]) -> dict[Any, Any]:
    """The file's tree with the overrides in their places; a section of nothing but comments is an empty one."""
    sections = {setting.key.rpartition(".")[0] for setting in settings()} | {"beam_options"}
    merged = {key: {} if part is None and key in sections else part for key, part in tree.items()}
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        if not section:
            merged[name] = value
        elif isinstance(under := merged.get(section, {}), Mapping):  # what else stands there is refused as a whole
            merged[section] = {**under, name: value}
    return merged


def _read_yaml(path: str) -> Mapping[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as err:
        raise ConfigError(
            f"config {path}: cannot be read ({err.strerror}); give the path of a YAML file, e.g. configs/batch_local_direct.yaml"
        ) from err
    except Exception as err:  # PyYAML lets out whatever its constructors meet: of !!bool x a KeyError, of 2001-99-99 a ValueError
        raise ConfigError(f"config {path}: is no YAML: {' '.join(str(err).split())}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected 'key: value' lines, got {type(tree).__name__}")
    return tree
