"""What an input names: files, folders, globs and manifests become `ImageRef`s, without an image being opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import InputError
from pipeline.read.manifests import is_manifest, read_manifest
from pipeline.records import ImageRef
from pipeline.storage.globs import expand_pattern, is_folder
from pipeline.storage.results import is_result

_PATTERNS_AT_ONCE = 16  # each waits for storage
_HINT = "check the path (quote globs so that the shell leaves them alone); --allow-empty makes it no error"


def list_images(pattern: str, exclude: str = "") -> Iterator[ImageRef]:
    """All images that one input names, in order of their names.

    A manifest's lines are taken as they are; whether they can be read shows when they are. Everything else is listed now. A
    folder stands for all files below it but hidden ones.

    Raises:
      InputError: A manifest cannot be understood.
    """
    refs = read_manifest(pattern) if is_manifest(pattern) else _list_files(pattern)
    for ref in refs:
        if not (exclude and is_result(ref.uri, exclude)):
            yield ref


def check_inputs(inputs: Mapping[str, Sequence[str]], allow_empty: bool = False) -> None:
    """Makes sure that each input names something, looking no further than its first file.

    Args:
      inputs: Each input, with the patterns that it stands for, of which one must name something.
      allow_empty: An input may name nothing.

    Raises:
      InputError: One does not, or cannot be listed.
    """
    if not inputs:
        raise InputError("no input: expected --input with a file, folder, glob, gs:// pattern or manifest")
    with ThreadPoolExecutor(_PATTERNS_AT_ONCE, "check-input") as pool:
        for name, patterns in inputs.items():
            looked = [pool.submit(_names_something, pattern) for pattern in patterns]
            try:
                found = any(look.result() for look in looked)
            except Exception as err:
                raise InputError(f"input {name}: cannot be listed: {' '.join(str(err).split())[:300]}") from err
            finally:
                for look in looked:
                    look.cancel()
            if not (found or allow_empty):
                days = f" on any of {len(patterns)} days or hours" if len(patterns) > 1 else ""
                raise InputError(f"input {name}: no file matches{days}; {_HINT}")


def _names_something(pattern: str) -> bool:
    if os.path.isfile(pattern):
        return True
    return any(FileSystems.match([variant], limits=[1])[0].metadata_list for variant in expand_pattern(pattern))


def _list_files(pattern: str) -> Iterator[ImageRef]:
    if os.path.isfile(pattern):  # also when its name has characters that would mean something in a glob
        yield ImageRef(pattern.removeprefix("./"), size_bytes=os.path.getsize(pattern))
        return
    matches = FileSystems.match(expand_pattern(pattern))
    found = {entry.path.removeprefix("./"): entry.size_in_bytes for match in matches for entry in match.metadata_list}
    folder = os.path.normpath(pattern) if os.path.isdir(pattern) else pattern.removeprefix("./").rstrip("/")
    above = 0 if folder == "." else len(folder)
    for path in sorted(found):
        hidden = is_folder(pattern) and any(part.startswith(".") for part in path[above:].split("/"))
        if not (hidden or path.endswith("/") or os.path.isdir(path)):
            yield ImageRef(path, size_bytes=found[path] or 0)
