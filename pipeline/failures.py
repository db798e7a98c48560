"""How an image can fail: one error for all stages, and the reasons from which the table in docs/results.md is written."""

from __future__ import annotations

from msgspec.structs import replace

from pipeline.records import DeadLetter, ImageRef
from pipeline.secrets import masked_text

REASONS: dict[str, dict[str, str]] = {
    "message": {
        "not_recognised": "no storage notification, JSON, URI or image",
        "bad_json": "JSON that cannot be parsed",
        "bad_request": "JSON that asks for no image in a way that is understood",
        "bad_notification": "a storage notification without a bucket's name",
        "bad_base64": "inline bytes that are no base64",
        "no_images": "a request for no image",
        "too_many_images": "a request for more than 1,000 images, or JSON of more than 200,000 values",
        "too_large": "inline images of more than 20 MB together",
        "not_allowed": "a URI outside `allow_uri_prefix`",
    },
    "read": {
        "not_found": "the file or object does not exist (any more)",
        "permission_denied": "this user or these credentials may not read it",
        "too_large_file": "larger than `max_file_mb`",
        "not_a_file": "a folder, a device, a pipe",
        "storage_unavailable": "storage, or what gives the credentials for it, did not answer for a minute; try again later",
        "unreadable": "storage fails in another way; the message says how",
        "not_allowed": "a manifest found by a glob names it, outside of the inputs' folders and of `allow_uri_prefix`",
        "no_image": "a `tf.Example` without bytes as its `image/encoded`, or a video file without video",
        "no_example": "a record of a TFRecord file that is no `tf.Example`",
        "bad_checksum": "a record of a TFRecord file that is not as it was written",
        "bad_line": "a line of a manifest that names no image; the message says which line of which file",
        "bad_member": "a member of an archive: encrypted, a link, damaged, an archive, a video, or named with `..`",
        "broken_file": "the rest of a TFRecord file, archive or video behind damage or its early end; the message says more",
    },
    "decode": {
        "empty": "zero bytes",
        "not_an_image": "no image of a format that is read",
        "truncated": "the file ends within its pixels",
        "corrupt": "damaged",
        "too_large": "more than `max_megapixels`",
        "too_much_work": "decoding takes longer than `max_megapixels` allows",
        "no_decoder": "its format needs a package that is not installed; the message says which",
        "decoder_died": "what decodes its format crashed on it, or was killed",
    },
    "detect": {
        "model_failed": "the model fails on this image alone",
        "bad_output": "what the model returns for this image cannot be detections",
    },
    "answer": {"deadline": "not done when its request had to be answered; its own message may still come"},
}

# Transient reasons pass by themselves, or are fixed outside of the image, so the image is not complete. All others are permanent:
# the same version of the image fails again with the same model and settings.
MAY_PASS = frozenset(
    {
        *("not_found", "permission_denied", "storage_unavailable", "unreadable", "not_allowed"),
        *("no_decoder", "decoder_died", "deadline"),
    }
)
FOR_GOOD = frozenset(reason for reasons in REASONS.values() for reason in reasons) - MAY_PASS


class ImageError(Exception):
    """An image (or message) cannot succeed on an immediate retry; it becomes a dead letter.

    Args:
      stage: A key of `REASONS`.
      reason: A key of `REASONS[stage]`.
      message: One line for a person: what was expected, what came.
      generation: The generation of the image that failed; empty if its ref has it, or nobody knows it.

    Raises:
      KeyError: `REASONS` lacks the reason; add it there, with a description.
    """

    def __init__(self, stage: str, reason: str, message: str, generation: str = ""):
        REASONS[stage][reason]
        super().__init__(masked_text(message))
        self.stage = stage
        self.reason = reason
        self.generation = generation

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, ...]]:
        return ImageError, (self.stage, self.reason, str(self), self.generation)

    def dead_letter(self, ref: ImageRef, payload: bytes = b"") -> DeadLetter:
        """The dead letter of this image."""
        known = replace(ref, generation=self.generation) if self.generation else ref
        return DeadLetter(known, self.stage, self.reason, str(self), payload)


def one_line(err: Exception) -> str:
    """A library's error message, or the error's name where it has none."""
    return " ".join(str(err).split())[:200] or type(err).__name__
