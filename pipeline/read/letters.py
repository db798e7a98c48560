"""Dead letters as input: the images that they name, and those that they carry.

An image that is named travels as any other, by its name. One that came within a message, and a message that was refused, are in
the dead letter itself: it travels under a name that is made of what it carries, with its place, `<file>@<start>-<end>`, and is
opened where images are read, so that no bytes pass a shuffle, and what failed again and again is tried once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeline.read.fetch import RETRY_SECONDS, open_file
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.files import read_lines
from pipeline.storage.ledger import RowsFile, list_files_of_rows
from pipeline.storage.results import DEAD_LETTERS

_NAME = re.compile(r"dead-letter:[0-9a-f]{32}")
_PLACE = re.compile(r"(.*)@(\d+)-(\d+)", re.DOTALL)


class Asked(NamedTuple):
    """What a dead letter asks for.

    Attributes:
      images: Those that are to be tried again, named or with their bytes.
      dead: What cannot be tried even now.
      carried: What the dead letter carries of a message or image; empty where it just names one.
    """

    images: tuple[ImageRef | EncodedImage, ...]
    dead: tuple[DeadLetter, ...] = ()
    carried: bytes = b""


AskAgain = Callable[[bytes], Asked]  # a line of a file of dead letters


def is_letter(name: str) -> bool:
    """Whether a name is that of a dead letter that carries its image."""
    return _NAME.fullmatch(name) is not None


def named_in(file: RowsFile, ask: AskAgain) -> Iterator[ImageRef]:
    """The images that a file of dead letters names, and the dead letters that carry theirs."""
    start = 0
    for line in read_lines(file.path):
        end = start + len(line)
        asked = ask(line)
        yield from (image for image in asked.images if isinstance(image, ImageRef))
        if asked.dead or any(isinstance(image, EncodedImage) for image in asked.images):
            digest = hashlib.blake2b(asked.carried, digest_size=16).hexdigest()
            yield ImageRef(f"dead-letter:{digest}", extra=f"{file.path}@{start}-{end}")
        start = end


def letters_in(output: str, ask: AskAgain) -> Iterator[ImageRef]:
    """The same of all dead letters in a results folder."""
    for file in list_files_of_rows(output):
        if file.kind == DEAD_LETTERS:
            yield from named_in(file, ask)


def images_of_letter(
    letter: ImageRef, ask: AskAgain, retry_seconds: float = RETRY_SECONDS
) -> Iterator[EncodedImage | DeadLetter]:
    """The images that a dead letter carries, and what cannot be tried even now."""
    found = _PLACE.fullmatch(letter.extra)
    if not found:
        raise ValueError(f"expected the place of a dead letter, got {letter.extra!r}")
    path, start, end = found[1], int(found[2]), int(found[3])
    with open_file(path, retry_seconds) as file:
        file.seek(start)
        asked = ask(file.read(end - start))
    yield from (image for image in asked.images if isinstance(image, EncodedImage))
    yield from asked.dead
