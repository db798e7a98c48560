"""Lists inputs: files, folders, globs and manifests become `ImageRef`s, without opening an image."""

from __future__ import annotations

import glob
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.image_formats import HEAD_BYTES, format_by_start
from pipeline.listing.allowed import may_name, refusal
from pipeline.listing.manifests import is_manifest, read_manifest
from pipeline.listing.names import CONTROL, bad_name, file_of, is_of_macos, kind_of, names_image
from pipeline.records import DeadLetter, ImageRef
from pipeline.results.layout import kind_of_rows, own_files
from pipeline.storage.fetch import failure_of
from pipeline.storage.globs import fixed_beginning, has_wildcard, real_path
from pipeline.storage.listing import MAX_PARALLEL, Location, divided, files_in, files_in_all, location_of
from pipeline.storage.store import RETRY_SECONDS, FoundFile, retried
from pipeline.storage.stores import store_of
from pipeline.storage.waiting import waiting_for
from pipeline.storage.web import is_web

OWN = "this program's own"  # the kind of files that this program wrote
_ESCAPED = re.compile(r"\[([*?[])\]")
_LINK_BACK = "link to a folder above"
_CHECKS_AHEAD = 4 * MAX_PARALLEL
PIECES = 64  # of all inputs together, so that they can be listed side by side
_HINT = "check the path (quote globs so that the shell leaves them alone); --allow-empty makes it no error"


class Manifest(NamedTuple):
    """A list of images; `found` by a pattern, not named by the user."""

    path: str
    found: bool = False


Piece = Location | Manifest


def pieces_of(patterns: Iterable[str]) -> Iterator[Piece]:
    """The places and manifests of inputs, in pieces that can be listed side by side.

    Raises:
      InputError: An input cannot be listed.
    """
    places = []
    for pattern in patterns:
        if not is_manifest(pattern):
            places.append(location_of(pattern))
        elif os.path.isfile(pattern):
            yield Manifest(real_path(pattern))
        else:
            paths = sorted(file.path for file in files_in(location_of(pattern)))
            yield from (Manifest(path, found=path != pattern) for path in paths)
    yield from divided(places, PIECES)


def folders_of(patterns: Iterable[str]) -> tuple[str, ...]:
    """The folders of inputs; lists that a pattern finds there may name images below them."""
    folders = (
        location_of(pattern).folder
        for pattern in patterns
        if not os.path.isfile(pattern) and (has_wildcard(pattern) or not is_manifest(pattern))
    )
    return tuple(dict.fromkeys(folders))


def are_disjoint(patterns: Iterable[str], *, remote: bool) -> bool:
    """Whether no image is named by two inputs, or by two parts of their listing, so that no doubles need be dropped.

    Args:
      patterns: The inputs.
      remote: Whether several processes list. Then links on a disk may lead two of them to one file.

    Raises:
      InputError: An input names nothing that can be read.
    """
    patterns = list(patterns)
    if any(map(is_manifest, patterns)):
        return False
    places = [location_of(pattern) for pattern in patterns]
    if any((is_web(place.folder) and len(places) > 1) or (remote and "://" not in place.folder) for place in places):
        return False
    beginnings = sorted(place.folder + fixed_beginning("/".join(place.parts)) for place in places)
    return not any(later.startswith(earlier) for earlier, later in pairwise(beginnings))


def folders_in_manifests(patterns: Iterable[str]) -> set[str]:
    """The folders of all images in the manifests that the user named.

    Raises:
      InputError: A manifest cannot be read.
    """
    named = (piece.path for piece in pieces_of(filter(is_manifest, patterns)) if isinstance(piece, Manifest) and not piece.found)
    refs = (ref for path in named for ref in read_manifest(path))
    return {os.path.dirname(file_of(_uri(ref))) + "/" for ref in refs if not isinstance(ref, DeadLetter)}


def _uri(found: ImageRef | FoundFile) -> str:
    return found.path if isinstance(found, FoundFile) else found.uri


def list_pieces(
    pieces: Sequence[Piece],
    exclude: str,
    leave_out: Callable[[str], None],
    allowed: Sequence[str],
    new: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> Iterator[ImageRef | DeadLetter]:
    """All images and containers in these pieces, and dead letters of the lines of manifests that name none.

    The images of a manifest are not checked; all others are listed with their generation. Skipped are this program's own files
    (see `own_files`), and objects of an inventory and matches of a pattern that are no images by name or first bytes: a list
    within a folder is not read. A file that an input names exactly is an image, whatever it holds. A name with control characters
    is a dead letter, and so is a folder that cannot be listed.

    Args:
      pieces: Where to check.
      exclude: The job's output folder.
      leave_out: Called with the kind of each skipped file.
      allowed: Folders below which a found manifest may name images; its other images are dead letters.
      new: Leaves out what is done, of listed files before anything else is asked of them, and of what manifests name.

    Raises:
      InputError: A place cannot be listed, or a manifest that an input names cannot be read.
    """
    places = [piece for piece in pieces if isinstance(piece, Location)]
    own = own_files(exclude, (place.folder for place in places))
    named = {name for place in places for name in _exact_names(place.pattern)}
    in_manifests = (_named_in(piece, allowed) for piece in pieces if isinstance(piece, Manifest))
    for found in chain.from_iterable(
        _sorted_out(new(files), own, named) for files in chain(in_manifests, [files_in_all(places)])
    ):
        if isinstance(found, str):
            leave_out(found)
            continue
        if not isinstance(found, FoundFile):
            yield found
            continue
        ref = ImageRef(found.path, generation=found.generation, size_bytes=found.size_bytes)
        failure = bad_name(ref.uri) if CONTROL.search(ref.uri) else failure_of(ref.uri, found.fault) if found.fault else None
        yield failure.dead_letter(ref) if failure else ref


def _named_in(manifest: Manifest, allowed: Sequence[str]) -> Iterator[ImageRef | FoundFile | DeadLetter]:
    for found in read_manifest(manifest.path):
        if manifest.found and not isinstance(found, DeadLetter) and not may_name(uri := _uri(found), allowed):
            yield refusal(uri, allowed).dead_letter(ImageRef(uri) if isinstance(found, FoundFile) else found)
        else:
            yield found


def list_images(
    patterns: Sequence[str], exclude: str = "", leave_out: Callable[[str], None] = lambda _kind: None, allowed: Sequence[str] = ()
) -> Iterator[ImageRef | DeadLetter]:
    """All images that inputs name, in one process; `ReadImages` divides the same listing among workers. See `list_pieces`.

    Lists that a pattern finds may name images below `allowed` and below the folders of the inputs.
    """
    return list_pieces(list(pieces_of(patterns)), exclude, leave_out, (*allowed, *folders_of(patterns)))


def _sorted_out(
    files: Iterable[FoundFile | ImageRef | DeadLetter], own: Callable[[str], bool], named: Collection[str]
) -> Iterator[FoundFile | ImageRef | DeadLetter | str]:
    """Images, and the kinds of files that are none: by their names, of others by the first bytes, a few side by side."""
    checks: deque[Future[FoundFile | str]] = deque()
    with ThreadPoolExecutor(MAX_PARALLEL, "check-file") as pool:
        for file in files:
            if not isinstance(file, FoundFile):
                yield file
            elif own(file.path) or kind_of_rows(file.path):
                yield OWN
            elif file.path in named or file.fault:
                yield file
            elif is_of_macos(file.path):
                yield kind_of(file.path)
            elif names_image(file.path):
                yield file
            else:
                checks.append(pool.submit(by_content, file))
                if len(checks) > _CHECKS_AHEAD:
                    yield checks.popleft().result()
        yield from (check.result() for check in checks)


def _exact_names(pattern: str) -> set[str]:
    """The paths that an input names exactly; local names with wildcard characters are escaped (see `location_of`)."""
    folder, slash, escaped = pattern.rpartition("/")
    name = _ESCAPED.sub(r"\1", escaped)
    return {pattern, f"{folder}{slash}{name}"} if glob.escape(name) == escaped else {pattern}


def by_content(file: FoundFile, retry_seconds: float = RETRY_SECONDS) -> FoundFile | str:
    """A file that begins like an image, else its kind; a file that cannot be read is left to its reader, which says why."""
    if file.generation and not file.size_bytes:
        return kind_of(file.path)
    try:
        start = retried(store_of(file.path).read_range, retry_seconds)(file.path, 0, HEAD_BYTES)
    except FileNotFoundError:
        return kind_of(file.path)
    except Exception as err:  # noqa: BLE001  whatever is wrong with it becomes its dead letter
        return _LINK_BACK if isinstance(err, IsADirectoryError) and os.path.islink(file.path) else file
    return file if format_by_start(start) else kind_of(file.path)


def check_inputs(inputs: Mapping[str, Sequence[str]], allow_empty: bool = False) -> None:
    """Checks that each input names something; stops at its first file.

    Args:
      inputs: Each input with its patterns, one of which must name something.
      allow_empty: An input may name nothing.

    Raises:
      InputError: An input names nothing, or cannot be listed.
    """
    if not inputs:
        raise InputError("no input: expected --input with a file, folder, glob, gs:// pattern or manifest")
    with ThreadPoolExecutor(MAX_PARALLEL, "check-input") as pool:
        for name, patterns in inputs.items():
            found = any(pool.map(_names_something, patterns))  # the first one ends the others
            if not (found or allow_empty):
                if name.startswith("projects/"):
                    raise InputError(f"input {name}: no file; a subscription is read in --mode streaming")
                days = f" on any of {len(patterns)} days" if len(patterns) > 1 else ""
                raise InputError(f"input {name}: no file matches{days}; {_HINT}")


def _names_something(pattern: str) -> bool:
    with waiting_for(f"input {pattern}"):
        return any(True for _ in files_in(location_of(pattern)))
