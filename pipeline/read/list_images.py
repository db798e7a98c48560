"""What an input names: files, folders, globs and manifests become `ImageRef`s, without an image being opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import InputError
from pipeline.read.manifests import is_manifest, is_manifest_of_rows, read_manifest
from pipeline.records import ImageRef
from pipeline.storage.globs import expand_pattern, is_folder
from pipeline.storage.results import DEAD_LETTERS, is_result

_PATTERNS_AT_ONCE = 16  # each waits for storage
# as `results` names them
_OUR_ROWS = re.compile(r"(^|/)(?P<kind>detections|dead_letters)-([^/]*-)?\d{5}-of-\d{5}\.(jsonl|parquet)$")
_HINT = "check the path (quote globs so that the shell leaves them alone); --allow-empty makes it no error"


def list_images(pattern: str, exclude: str = "") -> Iterator[ImageRef]:
    """All images, and files of images, that one input names, in order of their names.

    A manifest's lines are taken as they are; whether they can be read shows when they are. Everything else is listed now. A
    folder stands for all files below it but hidden ones. A `.jsonl` in it is a manifest if its first line is one of a manifest,
    as dead letters are; rows of detections are left out.

    Raises:
      InputError: It cannot be listed, or a manifest cannot be understood.
    """

    def is_input(ref: ImageRef) -> bool:
        return not (exclude and is_result(ref.uri, exclude))

    if is_manifest(pattern):
        for path in [pattern] if os.path.isfile(pattern) else sorted(_matching(pattern)):
            yield from filter(is_input, read_manifest(path))
        return
    for ref in filter(is_input, _list_files(pattern)):
        ours = _OUR_ROWS.search(ref.uri)
        if ours["kind"] == DEAD_LETTERS if ours else is_manifest_of_rows(ref.uri):
            yield from filter(is_input, read_manifest(ref.uri))
        elif not ours:
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
            finally:
                for look in looked:
                    look.cancel()
            if not (found or allow_empty):
                days = f" on any of {len(patterns)} days or hours" if len(patterns) > 1 else ""
                raise InputError(f"input {name}: no file matches{days}; {_HINT}")


def _names_something(pattern: str) -> bool:
    return os.path.isfile(pattern) or bool(_matching(_with_slash_where_folder(pattern), most=1))


def _list_files(pattern: str) -> Iterator[ImageRef]:
    if os.path.isfile(pattern):  # also when its name has characters that would mean something in a glob
        yield ImageRef(pattern.removeprefix("./"), size_bytes=os.path.getsize(pattern))
        return
    pattern = _with_slash_where_folder(pattern)
    found = {path.removeprefix("./"): size for path, size in _matching(pattern).items()}
    folder = os.path.normpath(pattern) if os.path.isdir(pattern) else pattern.removeprefix("./").rstrip("/")
    above = 0 if folder == "." else len(folder)
    for path in sorted(found):
        hidden = is_folder(pattern) and any(part.startswith(".") for part in path[above:].split("/"))
        if not (hidden or path.endswith("/") or os.path.isdir(path)):
            yield ImageRef(path, size_bytes=found[path])


def _with_slash_where_folder(pattern: str) -> str:
    """Object storage has no folders to look at: a plain name is one where there is no object of that name."""
    plain = "://" in pattern and not (is_folder(pattern) or re.search(r"[*?\[]", pattern))
    return pattern + "/" if plain and not _matching(pattern, most=1) else pattern


def _matching(pattern: str, most: int | None = None) -> dict[str, int]:
    """Files that a pattern matches, with their sizes.

    Raises:
      InputError: They cannot be listed.
    """
    try:
        matches = [FileSystems.match([variant], limits=[most])[0] for variant in expand_pattern(pattern)]
    except Exception as err:
        said = " ".join(str(err).split())[:300]
        scheme = pattern.partition("://")[0]
        if "://" in pattern and scheme != "gs":
            said = (
                f"expected files on this machine or on Cloud Storage (gs://bucket/folder/); {scheme}:// is read only where Beam "
                f"is set up for it, so copy the images first ({said})"
            )
        raise InputError(f"input {pattern}: cannot be listed: {said}") from err
    return {entry.path: entry.size_in_bytes or 0 for match in matches for entry in match.metadata_list}
