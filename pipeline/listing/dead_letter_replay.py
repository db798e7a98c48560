"""Dead-letter replay: which images a dead letter asks for, in a batch job (`--retry-dead`) and in a stream.

A dead letter that names its image is read again by that name. One that carries an image or a refused message is replayed from
what it carries. In a batch job all of these travel as one image ref, `<results>/dead_letters/`, as an archive does: the step that
opens it reads their rows again. Of equal ones one is tried.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from pipeline.extra_fields import extra_columns, extra_text
from pipeline.failures import FOR_GOOD, REASONS, ImageError, one_line
from pipeline.listing.allowed import may_name, refusal
from pipeline.records import INLINE, DeadLetter, EncodedImage, Image, ImageRef, row_bytes
from pipeline.results.layout import DEAD_LETTERS
from pipeline.results.reader import ResultsFolder
from pipeline.results.rows import json_rows
from pipeline.storage.files import warn_unreadable

_MOST_VALUES = 200_000  # in a message's JSON; each takes at most 240 bytes of memory
_ROWS_AT_ONCE = 64  # each may carry a message of 10 MB


# An image to try again, named or with its bytes, or the dead letter of what cannot be tried.
Replayed = Image | DeadLetter


@dataclasses.dataclass(frozen=True)
class DeadLetterReplay:
    """Replays the dead letters of a results folder.

    Anyone who can write to the folder can write such a file, so a dead letter may only name images below `folders`; local files
    count by their real paths. An image of a TFRecord file is read again where it lies in that file. What is no dead letter
    ends its part of a shard with a line on standard error.

    Args:
      output: The results folder.
      folders: Folders below which a dead letter may name images.
      parse: Parses a dead letter as a stream's message that may name these; see `pipeline.stream.messages.replay_message`.
      again: Whether messages that are refused for good are tried, too: each replay would give them new dead letters.
    """

    output: str
    folders: Sequence[str]
    parse: Callable[[bytes, Sequence[str]], Iterable[Replayed]]
    again: bool = False

    def refs_in_results(self) -> Iterator[ImageRef]:
        """The images that the dead letters name; last, if any carries its image, a ref for all that do."""
        carries = False
        for each in self._in_results():
            if isinstance(each, ImageRef):
                yield each
            else:
                carries = True
        if carries:
            yield ImageRef(f"{self.output}/{DEAD_LETTERS}/")

    def open(self) -> Iterator[EncodedImage | DeadLetter]:
        """The images that dead letters carry, each once, and dead letters of what cannot be tried.

        The last ref of `refs_in_results` stands for them.
        """
        seen = set[bytes]()
        for each in self._in_results():
            if isinstance(each, ImageRef):
                continue
            ref, payload = each.ref, each.payload if isinstance(each, DeadLetter) else b""
            digest = hashlib.blake2b(row_bytes([ref.record or ref.uri, ref.generation]) + payload, digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield each

    def _in_results(self) -> Iterator[Replayed]:
        """What all dead letters ask for; again from the first one if a compaction has taken a shard away."""
        try:
            for shard, batch in ResultsFolder(self.output, (DEAD_LETTERS,)).batches(rows=_ROWS_AT_ONCE):
                try:
                    for letter in json_rows(batch, DEAD_LETTERS):
                        yield from self.replay(letter)
                except (ValueError, TypeError, KeyError, RecursionError) as err:
                    warn_unreadable(shard.path, one_line(err))
        except FileNotFoundError:
            yield from self._in_results()

    def replay(self, letter: dict[str, Any]) -> Iterable[Replayed]:
        """What a row of dead letters asks for.

        Raises:
          ValueError: It is no dead letter.
        """
        if not is_dead_letter(letter):
            raise ValueError(f"expected dead letters of an earlier run or of a stream, got {row_bytes(letter)[:80]!r}")
        if letter["reason"] in ("bad_line", "bad_name"):  # its manifest or folder is read again, not this place in it
            return ()
        uri, record = _text(letter["image"].get("uri")), _text(letter.get("record"))
        name = record or uri
        if not name or letter["stage"] == "message" or "payload_base64" in letter:
            parsed = self.parse(row_bytes(letter), self.folders)
            return parsed if self.again else [each for each in parsed if not _is_refused_for_good(each)]
        ref = ImageRef(name, extra=extra_text(extra_columns((), {"extra": letter.get("extra")})))
        allowed = may_name(name, self.folders) and not are_letters(name)
        return (ref if allowed else refusal(name, self.folders).dead_letter(replace(ref, uri=uri, record=record)),)


def _is_refused_for_good(each: Replayed) -> bool:
    return isinstance(each, DeadLetter) and each.stage == "message" and each.reason in FOR_GOOD


def are_letters(name: str) -> bool:
    """Whether a name is that of the dead letters that carry their images."""
    return name.endswith(f"/{DEAD_LETTERS}/")


def is_dead_letter(row: Any) -> bool:
    """Whether a JSON value is a dead letter of this program."""
    if not (isinstance(row, dict) and isinstance(row.get("image"), dict)):
        return False
    stage, reason = row.get("stage"), row.get("reason")
    return isinstance(stage, str) and isinstance(reason, str) and reason in REASONS.get(stage, ())


def load_json(data: bytes) -> Any:
    """Parses JSON of a bounded number of values.

    Raises:
      ImageError: The data has more values, or is no JSON.
    """
    values = 1 + sum(map(data.count, (b",", b"[", b"{")))  # at least as many as it has: each begins behind one of these
    if values > _MOST_VALUES:
        raise ImageError("message", "too_many_images", f"expected JSON of at most {_MOST_VALUES} values, got up to {values}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as err:
        raise ImageError("message", "bad_json", f"the JSON cannot be parsed: {str(err)[:200]}") from err


def original_message(data: bytes) -> bytes:
    """The refused message in a dead letter, also through several layers; any other message itself.

    Raises:
      ImageError: The payload of a dead letter is damaged.
    """
    while b'"payload_base64"' in data and data.lstrip()[:1] == b"{":
        try:
            row = load_json(data)
        except ImageError:
            return data
        if not is_dead_letter(row) or _text(row["image"].get("uri")).startswith(INLINE):
            return data
        data = _decoded(row.get("payload_base64"))
    return data


def image_entry(letter: dict[str, Any]) -> dict[str, Any]:
    """The image of a dead letter as an entry of a message: `{"uri"}`, or `{"content", "name"}` with its bytes.

    The entry names no generation: the newest one may be readable.

    Raises:
      ImageError: The dead letter has no image that could be read again.
    """
    uri = _text(letter["image"].get("uri"))
    extra = {"extra": letter["extra"]} if "extra" in letter else {}
    if uri.startswith(INLINE) and "payload_base64" in letter:
        return {"content": _decoded(letter["payload_base64"]), "name": uri.removeprefix(INLINE), **extra}
    if not uri or uri.startswith(INLINE):
        raise ImageError(
            "message", "bad_request", "a dead letter that neither names an image that can be read nor has its payload"
        )
    return {"uri": uri, **extra}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _decoded(payload: Any) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError) as err:
        raise ImageError("message", "bad_base64", f"the dead letter's payload is no base64: {err}") from err
