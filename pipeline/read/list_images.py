"""What an input names: files, folders, globs and manifests become `ImageRef`s, without an image being opened."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pipeline.errors import InputError
from pipeline.read.allowed import may_name
from pipeline.read.manifests import is_manifest, is_manifest_of_rows, read_manifest
from pipeline.read.tfrecords import file_of
from pipeline.records import ImageRef
from pipeline.storage.globs import has_wildcard, overlap
from pipeline.storage.listing import AT_ONCE, divided, files_in, files_in_all, place_of
from pipeline.storage.places import Place
from pipeline.storage.results import DEAD_LETTERS, is_result, kind_of_rows

NOT_ALLOWED = -1  # as the size of an image that a list names which was found, and which may not name it
_PIECES = 64  # of all inputs together, so that they can be listed side by side
_HINT = "check the path (quote globs so that the shell leaves them alone); --allow-empty makes it no error"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A list of images, as a place where images can be found; `found` by a wildcard, not named by the user."""

    path: str
    found: bool = False


Piece = Place | Manifest


def pieces_of(patterns: Iterable[str]) -> Iterator[Piece]:
    """Where the images of inputs lie, in pieces that can be listed side by side.

    Raises:
      InputError: An input cannot be listed.
    """
    places = []
    for pattern in patterns:
        if not is_manifest(pattern):
            places.append(place_of(pattern))
        elif os.path.isfile(pattern):
            yield Manifest(pattern)
        else:
            paths = sorted(file.path for file in files_in(place_of(pattern)))
            yield from (Manifest(path, found=path != pattern) for path in paths)
    yield from divided(places, _PIECES)


def folders_of(patterns: Iterable[str]) -> tuple[str, ...]:
    """The folders that inputs name. A list that is found there may name what lies below one of them."""
    folders = (
        place_of(pattern).folder or "./"
        for pattern in patterns
        if not os.path.isfile(pattern) and (has_wildcard(pattern) or not is_manifest(pattern))
    )
    return tuple(dict.fromkeys(folders))


def folders_in_manifests(patterns: Iterable[str]) -> set[str]:
    """The folders of what the manifests name that the user has named.

    Raises:
      InputError: A manifest cannot be read or understood.
    """
    named = (piece.path for piece in pieces_of(filter(is_manifest, patterns)) if isinstance(piece, Manifest) and not piece.found)
    return {os.path.dirname(file_of(ref.uri)) + "/" if "/" in ref.uri else "./" for path in named for ref in read_manifest(path)}


def list_pieces(
    pieces: Sequence[Piece],
    exclude: str = "",
    count_left_out: Callable[[], None] | None = None,
    allowed: Sequence[str] = (),
) -> Iterator[ImageRef]:
    """All images, and files of images, in these pieces, as they come.

    A manifest's lines are taken as they are; whether they can be read shows when they are. Everything else is listed now, with
    the generation that it has. A `.jsonl` in a folder is a manifest if its first line is one of a manifest, as dead letters are;
    rows of detections are left out.

    Args:
      pieces: Where to look.
      exclude: An output folder; what this program wrote there is left out.
      count_left_out: Called for each file that is left out for that.
      allowed: Folders below which a manifest may name images that nobody named, but that was found; any other image that it
        names has the size `NOT_ALLOWED`.

    Raises:
      InputError: It cannot be listed, or a manifest cannot be understood.
    """

    def is_input(ref: ImageRef) -> bool:
        is_ours = bool(exclude) and is_result(ref.uri, exclude)
        if is_ours and count_left_out:
            count_left_out()
        return not is_ours

    def bounded(ref: ImageRef) -> ImageRef:
        return ref if may_name(ref.uri, allowed) else dataclasses.replace(ref, size_bytes=NOT_ALLOWED)

    for piece in pieces:
        if isinstance(piece, Manifest):
            named = filter(is_input, read_manifest(piece.path))
            yield from map(bounded, named) if piece.found else named
    places = [piece for piece in pieces if isinstance(piece, Place)]
    is_near = any(overlap(place.here, exclude) for place in places if exclude)
    for file in files_in_all(places):
        ref = ImageRef(file.path, file.generation, file.size_bytes)
        if is_near and not is_input(ref):
            continue
        rows = kind_of_rows(ref.uri)
        if rows == DEAD_LETTERS if rows else is_manifest_of_rows(ref.uri):
            yield from map(bounded, filter(is_input, read_manifest(ref.uri)))
        elif not rows:
            yield ref


def list_images(pattern: str, exclude: str = "", allowed: Sequence[str] = ()) -> Iterator[ImageRef]:
    """All images that one input names; see `list_pieces`. What lists may name that are found there: `allowed`, and its folder."""
    return list_pieces(list(pieces_of([pattern])), exclude, allowed=(*allowed, *folders_of([pattern])))


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
    with ThreadPoolExecutor(AT_ONCE, "check-input") as pool:
        for name, patterns in inputs.items():
            looked = [pool.submit(_names_something, pattern) for pattern in patterns]
            try:
                found = any(look.result() for look in looked)
            finally:
                for look in looked:
                    look.cancel()
            if not (found or allow_empty):
                if name.startswith("projects/"):
                    raise InputError(f"input {name}: no file; a subscription is read in --mode streaming")
                days = f" on any of {len(patterns)} days or hours" if len(patterns) > 1 else ""
                raise InputError(f"input {name}: no file matches{days}; {_HINT}")


def _names_something(pattern: str) -> bool:
    return any(True for _ in files_in(place_of(pattern)))
