"""Paths in settings: plain, with `~`, or as a `file:///…` URI; and the files of settings."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote

import yaml

from pipeline.errors import ConfigError

_FILE = "file://"


def local_path(text: str) -> str:
    """The plain path of a text; other URIs, such as `gs://…`, stay as they are.

    >>> local_path("file:///data/a%20b.jpg"), local_path("gs://bucket/~"), local_path("out/")
    ('/data/a b.jpg', 'gs://bucket/~', 'out/')

    Raises:
      ValueError: It is a `file:` URI of another machine.
    """
    if text.startswith("~"):
        return os.path.expanduser(text)
    if not text.lower().startswith(_FILE):
        return text
    path = text[len(_FILE) :].removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"expected file:/// and an absolute path, got {text!r}")
    return path if "{date" in path else unquote(path)  # strftime's directives look like escapes


class _RepeatedKeyError(Exception):
    """A section has a key twice, of which PyYAML drops the first one without a word."""


class _EachKeyOnce(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                raise _RepeatedKeyError(f"{name[:200]!r} stands in lines {lines[name]} and {line}; leave one of them")
            lines[name] = line
        return node


def read_yaml(what: str, path: str) -> dict[Any, Any]:
    """The keys of a YAML or JSON file; messages say `what` it is.

    Raises:
      ConfigError: It cannot be read, or has no keys.
    """
    try:
        with open(local_path(path), encoding="utf-8") as file:
            tree = yaml.load(file, _EachKeyOnce)  # noqa: S506  a SafeLoader
    except OSError as err:
        raise ConfigError(f"{what} {path}: cannot be read ({err.strerror}); give the path of a YAML file") from err
    except _RepeatedKeyError as err:
        raise ConfigError(f"{what} {path}: {err}") from err
    except yaml.scanner.ScannerError as err:
        line = (err.problem_mark.line + 1) if err.problem_mark else 0
        if "character '\\t'" in str(err):
            raise ConfigError(
                f"{what} {path}: line {line} has a tab where YAML takes spaces only; indent it with spaces"
            ) from err
        raise ConfigError(f"{what} {path}: is no YAML: {' '.join(str(err).split())}") from err
    except Exception as err:  # PyYAML's constructors raise anything: a KeyError for !!bool x, a ValueError for 2001-99-99
        raise ConfigError(f"{what} {path}: is no YAML: {' '.join(str(err).split())}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} {path}: expected 'key: value' lines, got {type(tree).__name__}")
    return tree
