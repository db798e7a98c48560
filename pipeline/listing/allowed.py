"""Access rules: which images a message or a manifest found by a glob may name, since others than the job's user write these."""

from __future__ import annotations

import functools
import os
import re
import urllib.parse
from collections.abc import Iterable, Sequence

from pipeline.failures import Failure
from pipeline.listing.names import CONTROL, file_of

MAX_URI = 2048  # an object's name has at most 1024 bytes
_SHOWN = 5
_FILE = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)


def is_allowed(uri: str, prefixes: Iterable[str]) -> bool:
    """Whether a URI lies under one of the prefixes; each ends at a slash: `gs://photos` does not allow `gs://photos-secret/x`.

    Compared as written: `GS://…`, `..` (also percent-encoded) and endless names are refused. A local file must lie there after
    symbolic links are followed, too.
    """
    if len(uri) > MAX_URI:
        return False
    decoded = urllib.parse.unquote(urllib.parse.unquote(uri))
    if ".." in decoded and ".." in re.split(r"[/\\]", decoded):
        return False
    if not any(_is_under(uri, prefix) for prefix in prefixes):
        return False
    return "://" in uri or _lies_under(uri, prefixes)


def _is_under(uri: str, prefix: str) -> bool:
    return bool(prefix) and uri.startswith(prefix if prefix.endswith("/") else prefix + "/")


def _lies_under(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a local path lies under one of the prefixes after links are followed."""
    try:
        real = os.path.realpath(path)
    except ValueError:  # not a valid file name
        return False
    return any(_is_under(real, _real_folder(os.path.abspath(prefix))) for prefix in prefixes if prefix and "://" not in prefix)


@functools.lru_cache(maxsize=4096)
def _real_folder(prefix: str) -> str:
    return os.path.realpath(prefix)


def may_name(uri: str, folders: Iterable[str]) -> bool:
    """Whether a manifest found by a glob may name this image or part of a container: only below one of the folders.

    Local files count by their real paths, after links are followed.

    >>> [may_name(name, ["/photos/"]) for name in ("/photos/a.jpg", "/photos/x/../a.jpg", "/photos/../a.jpg", "gs://b/a.jpg")]
    [True, True, False, False]
    """
    if CONTROL.search(uri):
        return False
    path = file_of(uri)
    local = _FILE.sub("", path)
    if "://" in local:
        return is_allowed(path, folders)
    spellings = {local, urllib.parse.unquote(local)} if local != path else {local}
    return all(_lies_under(spelling, folders) for spelling in spellings)


def refusal(uri: str, folders: Sequence[str]) -> Failure:
    """The failure of an image that a manifest found by a glob may not name."""
    shown = ", ".join(folders[:_SHOWN]) + ", …" * (len(folders) > _SHOWN)
    message = f"{uri[:200]!r} is named in a file that was found; expected an image under {shown or 'a folder of --input'}"
    return Failure("read", "not_allowed", f"{message} (--input and --allow-uri-prefix say what else may be named)")
