"""Merges config file and flags into one checked config."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.config.mistakes import what_is_wrong
from pipeline.config.paths import read_yaml
from pipeline.config.sections import Config, DetectConfig, ModelConfig, MonitoringConfig, settings
from pipeline.config.setting import is_own_engine
from pipeline.errors import ConfigError

_JOBS = {"batch": "batch job", "streaming": "stream"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_CONFIGS = (os.path.join(_PACKAGE, "configs"), os.path.join(os.path.dirname(_PACKAGE), "configs"))  # installed, checkout


def load_config(paths: Sequence[str], overrides: Mapping[str, Any]) -> Config:
    """Reads config files, of which later ones win, and lays values over them, by dotted key such as `detect.score_threshold`.

    If `configs/<name>.yaml` or `<name>` does not exist, the project's own file is read.

    Raises:
      ConfigError: The file is unreadable or no YAML mapping, or has an unknown key or a wrong value.
    """
    tree = _laid_over(_read(paths), overrides)
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as err:
        flags = {setting.key: setting.flag for setting in settings() if setting.key in overrides}
        raise ConfigError(what_is_wrong(err, " and ".join(paths) or "the flags", flags, settings())) from err


def check_applies(config: Config) -> None:
    """Refuses a setting that the job would not use, since its user wants something by it.

    Raises:
      ConfigError: One has another value than its default, and jobs of this mode do not use it.
    """
    tree = config.as_dict()
    for setting in settings():
        section, _, name = setting.key.rpartition(".")
        value = (tree[section] if section else tree)[name]
        if setting.applies not in ("", config.mode) and value != setting.default:
            raise ConfigError(
                f"{setting.key}: expected --mode {setting.applies}, since a {_JOBS[config.mode]} does not use it; leave it out"
            )


def check_model_is_named(model: ModelConfig, detect: DetectConfig) -> None:
    """Refuses a model without a path: the bundled one instead would publish digits as results.

    Raises:
      ConfigError: No model is named.
    """
    if not model.path and not is_own_engine(detect.engine):
        raise ConfigError(
            "no model: expected --model with a SavedModel or a folder of versions; --model digits is the bundled one"
        )


def load_monitoring(paths: Sequence[str], overrides: Mapping[str, Any]) -> MonitoringConfig:
    """The section `monitoring` of a config whose other keys may be wrong; the defaults if it is wrong itself."""
    tree = {}
    with contextlib.suppress(ConfigError):
        tree = _read(paths)
    try:
        return TypeAdapter(MonitoringConfig).validate_python(_laid_over(tree, overrides).get("monitoring") or {})
    except ValidationError:
        return MonitoringConfig()


def _read(paths: Sequence[str]) -> dict[Any, Any]:
    """The trees of all files in one; a key of a later file wins."""
    merged: dict[Any, Any] = {}
    for path in paths:
        for key, part in read_yaml("config", _found(path)).items():
            both = (part is None or isinstance(part, Mapping)) and isinstance(merged.get(key), Mapping)
            merged[key] = {**merged[key], **(part or {})} if both else part
    return merged


def _laid_over(tree: Mapping[Any, Any], overrides: Mapping[str, Any]) -> dict[Any, Any]:
    """The file's tree with the overrides; a section without keys is empty, not null."""
    sections = {setting.key.rpartition(".")[0] for setting in settings()} | {"beam_options"}
    merged = {key: {} if part is None and key in sections else part for key, part in tree.items()}
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        if not section:
            merged[name] = value
        elif isinstance(under := merged.get(section, {}), Mapping):  # pydantic refuses anything else
            merged[section] = {**under, name: value}
    return merged


def _found(path: str) -> str:
    """The file of a path; if there is none, the project's own config of that name."""
    folder, name = os.path.split(path)
    if os.path.exists(path) or folder not in ("", "configs"):
        return path
    own = [os.path.join(configs, name if name.endswith(".yaml") else f"{name}.yaml") for configs in _OWN_CONFIGS]
    return next(filter(os.path.isfile, own), path)
