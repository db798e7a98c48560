"""Names of files for pictures, of names that may be hostile."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable

from pipeline.read.videos import video_of
from pipeline.records import identity_hash
from pipeline.storage.web import without_query
from pipeline.write.write_labels import short_name

_UNSAFE = re.compile(r'^[.-]|[/\\:*?"<>|]')


def picture_names(uris: Iterable[str]) -> dict[str, str]:
    """A name without an ending for each image, safe as a file's; images whose names are alike get a hash of their URI.

    >>> list(picture_names(["a/1.jpg", "a/../..", "b/x.png", "c/X.jpg"]).values())
    ['1', '_.', 'x~2b6c8c034209632e', 'X~bf87598b87fbdd40']
    """
    names = {uri: safe_name(_stem(without_query(uri).rpartition("/")[2])) for uri in uris}
    times = Counter(name.casefold() for name in names.values())
    alike = {uri for uri, name in names.items() if times[name.casefold()] > 1 or "~" in name}
    return {uri: f"{name}~{identity_hash(uri):016x}" if uri in alike else name for uri, name in names.items()}


def _stem(name: str) -> str:
    """A name without its ending; that of a frame has its time.

    >>> _stem("a.b.jpg"), _stem("clip.mp4#t=12.480")
    ('a.b', 'clip-12.480')
    """
    video = video_of(name)
    return os.path.splitext(video)[0] + name[len(video) :].replace("#t=", "-")


def safe_name(name: str) -> str:
    """A name of one file in one folder, without what a shell, a terminal or another system takes for something else."""
    return short_name(_UNSAFE.sub("_", "".join(c if c.isprintable() else "_" for c in name)) or "_")
