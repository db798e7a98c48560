"""How an image can fail: one value for all stages, and the reasons from which the table in docs/results.md is written."""

from __future__ import annotations

import msgspec
from msgspec.structs import force_setattr, replace

from pipeline.records import DeadLetter, ImageRef
from pipeline.secrets import masked_text


class Final(str):
    """A reason that is final for the image: the same version of it fails again with the same model and settings."""

    __slots__ = ()


class MayPass(str):
    """A reason that passes by itself, or is fixed outside of the image; so the image is not complete."""

    __slots__ = ()


# what each reason means to a person; one that stands in several stages is of one type in all of them, since rows are chosen by it
REASONS: dict[str, dict[str, Final | MayPass]] = {
    "message": {
        "not_recognised": Final("no storage notification, JSON, URI or image"),
        "bad_json": Final("JSON that cannot be parsed"),
        "bad_request": Final("JSON that asks for no image in a way that is understood"),
        "bad_notification": Final("a storage notification without a bucket's name"),
        "bad_base64": Final("inline bytes that are no base64"),
        "no_images": Final("a request for no image"),
        "too_many_images": Final("a request for more than 1,000 images, or JSON of more than 200,000 values"),
        "too_large": Final("inline images of more than 20 MB together"),
        "not_allowed": MayPass("a URI outside `allow_uri_prefix`"),
    },
    "read": {
        "not_found": MayPass("the file or object does not exist (any more)"),
        "permission_denied": MayPass("this user or these credentials may not read it"),
        "too_large_file": Final("larger than `max_file_mb`"),
        "too_large_for_stream": MayPass("an archive, video or TFRecord file of more than a stream opens; a batch job reads it"),
        "not_a_file": Final("a folder, a device, a pipe"),
        "storage_unavailable": MayPass(
            "storage, or what gives the credentials for it, did not answer for a minute; try again later"
        ),
        "unreadable": MayPass("storage fails in another way; the message says how"),
        "not_allowed": MayPass("a manifest found by a glob names it, outside of the inputs' folders and of `allow_uri_prefix`"),
        "bad_name": Final("a file, object or `tf.Example` whose name has control characters; rename it"),
        "no_image": Final("a `tf.Example` without bytes as its `image/encoded`, or a video file without video"),
        "no_example": Final("a record of a TFRecord file that is no `tf.Example`"),
        "bad_checksum": Final("a record of a TFRecord file that is not as it was written"),
        "bad_line": Final("a line of a manifest that names no image; the message says which line of which file"),
        "bad_member": Final(
            "a member of an archive: encrypted, a link, damaged, an archive, a video, named with `..` or as another one"
        ),
        "broken_file": Final(
            "the rest of a TFRecord file, archive or video behind damage or its early end; the message says more"
        ),
    },
    "decode": {
        "empty": Final("zero bytes"),
        "not_an_image": Final("no image of a format that is read"),
        "truncated": Final("the file ends within its pixels"),
        "corrupt": Final("damaged"),
        "too_large": Final("more than `max_megapixels`"),
        "too_much_work": Final("decoding takes longer than images of its format and size do"),
        "no_decoder": MayPass("its format needs a package that is not installed; the message says which"),
        "no_room": MayPass("memory has no room for it at this moment; the message says how much it needs"),
        "decoder_died": MayPass("what decodes its format crashed on it, or was killed"),
    },
    "detect": {
        "model_failed": Final("the model fails on this image alone, and not on a blank one"),
        "no_room": MayPass("the device has no memory for this image alone at this moment, and has for a blank one"),
        "bad_output": Final("what the model returns for this image cannot be detections"),
    },
    "answer": {"deadline": MayPass("not done when its request had to be answered; its own message may still come")},
}


def _of_type(kind: type[str]) -> frozenset[str]:
    return frozenset(reason for reasons in REASONS.values() for reason, meaning in reasons.items() if isinstance(meaning, kind))


MAY_PASS, FOR_GOOD = _of_type(MayPass), _of_type(Final)


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why an image (or message) has no result: no immediate retry gives it one. Reading, decoding and detecting return it.

    Attributes:
      stage: A key of `REASONS`.
      reason: A key of `REASONS[stage]`.
      message: One line for a person: what was expected, what came; without secrets.
      generation: The generation of the image that failed; empty if its ref has it, or nobody knows it.

    Raises:
      KeyError: `REASONS` lacks the reason; add it there, with a description.
    """

    stage: str
    reason: str
    message: str
    generation: str = ""

    def __post_init__(self) -> None:
        REASONS[self.stage][self.reason]
        force_setattr(self, "message", masked_text(self.message))

    def dead_letter(self, ref: ImageRef, payload: bytes = b"") -> DeadLetter:
        """The dead letter of this image."""
        known = replace(ref, generation=self.generation) if self.generation else ref
        return DeadLetter(known, self.stage, self.reason, self.message, payload)


class ImageError(Exception):
    """Carries the `Failure` of these arguments from where it is seen to the end of its stage, which returns it."""

    def __init__(self, stage: str, reason: str, message: str, generation: str = ""):
        self.failure = Failure(stage, reason, message, generation)
        super().__init__(self.failure.message)


def one_line(err: Exception) -> str:
    """A library's error message, or the error's name where it has none."""
    return " ".join(str(err).split())[:200] or type(err).__name__
