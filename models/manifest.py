"""The manifest of a SavedModel, `assets.extra/files.json`: its files with their sizes in bytes, by which a partial copy shows.

    {"saved_model.pb": 237098, "variables/variables.index": 2011, …}

It is written last. Files that it does not list are allowed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "assets.extra/files.json"


def write_manifest(saved_model_dir: str | os.PathLike[str]) -> None:
    """Lists the files of a SavedModel on this machine, but for hidden ones; replaces an earlier manifest atomically."""
    folder = Path(saved_model_dir)
    path, unfinished = folder / MANIFEST, folder / "assets.extra" / ".files.json"
    files = {each.relative_to(folder).as_posix(): each for each in sorted(folder.rglob("*")) if each.is_file() and each != path}
    sizes = {name: each.stat().st_size for name, each in files.items() if "/." not in f"/{name}"}
    path.parent.mkdir(exist_ok=True)
    unfinished.write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def missing_file(manifest: bytes, sizes: Mapping[str, int]) -> str:
    """The first listed file that is not there in its full size; empty if all are. Larger ones were edited since.

    Args:
      manifest: The content of the manifest.
      sizes: Of the files that are there, by path in the SavedModel.

    >>> missing_file(b'{"a": 3, "b": 4}', {"a": 3, "b": 2, "c": 9}), missing_file(b'{"a":', {})
    ('b', 'assets.extra/files.json')
    """
    try:
        listed = json.loads(manifest)
        return next((name for name, size in listed.items() if sizes.get(name, -1) < size), "")
    except (ValueError, TypeError, AttributeError):
        return MANIFEST  # it is being copied, too
