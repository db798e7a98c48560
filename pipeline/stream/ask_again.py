"""`AskAgain`: what the dead letters of a results folder ask for when a batch job tries again what failed."""

from __future__ import annotations

import dataclasses

from pipeline.errors import InputError
from pipeline.extra_fields import extra_columns, extra_text
from pipeline.failures import ImageError
from pipeline.read.allowed import may_name, refusal
from pipeline.read.letters import Asked, is_letter
from pipeline.records import INLINE, EncodedImage, ImageRef, row_bytes
from pipeline.stream.asked_again import is_dead_letter, load_json
from pipeline.stream.messages import Message, MessageLimits, parse_message


@dataclasses.dataclass(frozen=True)
class AskAgain:
    """What one dead letter asks for.

    A file of dead letters was found, so it may only name what `limits` allow, of local files by their real paths. An image of a
    TFRecord file is read again where it lies in that, whatever name it has there. What was refused as a message is looked at
    again as one.

    Args:
      limits: What a message, and a dead letter, may ask for.
    """

    limits: MessageLimits

    def __call__(self, line: bytes) -> Asked:
        """What a line of a file of dead letters asks for.

        Raises:
          InputError: It is no dead letter.
        """
        try:
            letter = load_json(line)
        except ImageError:
            letter = None
        if not is_dead_letter(letter):
            raise InputError(f"dead letters: expected the rows of an earlier run or of a stream, got {line[:80]!r}")
        uri, record = (value if isinstance(value, str) else "" for value in (letter["image"].get("uri"), letter.get("record")))
        if (uri or record) and letter["stage"] != "message" and "payload_base64" not in letter:
            extra = extra_text(extra_columns((), {"extra": letter.get("extra")}))
            return self._named(ImageRef(uri, extra=extra, record=record))
        request = parse_message(Message(line), self.limits)
        payload = letter.get("payload_base64", "")
        carried = row_bytes([payload, uri if uri.startswith(INLINE) or not payload else ""])
        return Asked(tuple(map(_of_batch, request.images)), request.dead_letters, carried)

    def _named(self, ref: ImageRef) -> Asked:
        name, folders = ref.record or ref.uri, self.limits.allowed_prefixes
        if may_name(name, folders) and not is_letter(name):
            return Asked((ImageRef(name, extra=ref.extra),))
        return Asked((), (refusal(name, folders).dead_letter(ref),), row_bytes([name]))


def _of_batch(image: ImageRef | EncodedImage) -> ImageRef | EncodedImage:
    """The image as a batch job has it: it came into being at no time of a stream."""
    if isinstance(image, EncodedImage):
        return dataclasses.replace(image, ref=dataclasses.replace(image.ref, event_time=None))
    return dataclasses.replace(image, event_time=None)
