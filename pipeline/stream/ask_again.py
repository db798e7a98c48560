"""`AskAgain`: what the dead letters of a results folder ask for when a batch job tries again what failed."""

from __future__ import annotations

import dataclasses
import json

from pipeline.errors import InputError
from pipeline.extra_fields import extra_text, said_beyond
from pipeline.read.letters import Asked
from pipeline.records import INLINE, EncodedImage, ImageRef, row_bytes
from pipeline.stream.asked_again import is_dead_letter
from pipeline.stream.messages import Message, MessageLimits, parse_message


@dataclasses.dataclass(frozen=True)
class AskAgain:
    """What one dead letter asks for.

    An image that failed to be read or detected was allowed to be, and is tried again wherever it lies. What was refused as a
    message is looked at again as one, so that it may only name what a message may name now.

    Args:
      limits: What a message may ask for.
    """

    limits: MessageLimits

    def __call__(self, line: bytes) -> Asked:
        """What a line of a file of dead letters asks for.

        Raises:
          InputError: It is no dead letter.
        """
        try:
            letter = json.loads(line)
        except ValueError:
            letter = None
        if not is_dead_letter(letter):
            raise InputError(f"dead letters: expected the rows of an earlier run or of a stream, got {line[:80]!r}")
        uri = letter["image"].get("uri", "")
        if uri and letter["stage"] != "message" and "payload_base64" not in letter:
            extra = said_beyond((), {"extra": letter.get("extra")})
            return Asked((ImageRef(uri, extra=extra_text(extra)),))
        request = parse_message(Message(line), self.limits)
        payload = letter.get("payload_base64", "")
        carried = row_bytes([payload, uri if uri.startswith(INLINE) or not payload else ""])
        return Asked(tuple(map(_of_batch, request.images)), request.dead_letters, carried)


def _of_batch(image: ImageRef | EncodedImage) -> ImageRef | EncodedImage:
    """The image as a batch job has it: it came into being at no time of a stream."""
    if isinstance(image, EncodedImage):
        return dataclasses.replace(image, ref=dataclasses.replace(image.ref, event_time=None))
    return dataclasses.replace(image, event_time=None)
