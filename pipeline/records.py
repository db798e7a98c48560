"""The records that travel through the pipeline, and the rows of the output.

An image is an `ImageRef` while only its name is known, and an `EncodedImage` once its bytes are read. It ends as exactly one
`DetectedImage` or one `DeadLetter`. No other record crosses a step; decoded pixels stay inside `DetectObjects`. Records are
structs of msgspec, made and pickled in C; none refers to itself, so the garbage collector leaves them out.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace

from pipeline.secrets import public_address

INLINE = "inline:"  # begins the URI of an image that came with its message, and cannot be read again


class ImageRef(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Names one version of one image; holds no bytes.

    Attributes:
      uri: Path or URI as the user or the message gave it, without secrets; see `public_address`.
      generation: Object generation on Cloud Storage; size and mtime of a local file; a content hash for inline images.
        Empty while unknown.
      size_bytes: Size as listed; 0 if unknown.
      event_time: Seconds since the epoch of the event that a stream reads; None in batch.
      request_id: The sender's id of the request for this image; empty in batch.
      message_id: The id of its message; empty in batch.
      extra: Extra columns of its manifest or message, as the JSON text of `extra_fields.extra_text`; mostly empty.
      record: Its place in a TFRecord file, `<file>@<start>-<end>` in bytes; empty for an image file.
      signed_uri: The web address to read, where `uri` lacks its signature, token or password; it is never written.
    """

    uri: str
    generation: str = ""
    size_bytes: int = 0
    event_time: float | None = None
    request_id: str = ""
    message_id: str = ""
    extra: str = ""
    record: str = ""
    signed_uri: str = ""

    def __post_init__(self) -> None:
        """Moves an address with secrets to `signed_uri`; each new signature of an address names the same image."""
        public = public_address(self.uri)
        if public != self.uri:
            force_setattr(self, "signed_uri", self.signed_uri or self.uri)
            force_setattr(self, "uri", public)

    @property
    def location(self) -> str:
        """What to read."""
        return self.signed_uri or self.uri

    @property
    def identity(self) -> str:
        """`uri#generation`: equal for two readings of one generation of an image, whatever the request."""
        return f"{self.uri}#{self.generation}"


class EncodedImage(msgspec.Struct, frozen=True, gc=False):
    """An image as its file holds it: JPEG, PNG, … bytes, not yet decoded.

    Attributes:
      ref: Which image.
      content: The file's bytes.
      read_seconds: The duration of reading.
      received_at: Seconds since the epoch when the pipeline received the image.
    """

    ref: ImageRef
    content: bytes
    read_seconds: float = 0.0
    received_at: float = 0.0


Image = ImageRef | EncodedImage
"""An image that is to be detected in, with or without its bytes."""


def ref_of(image: Image) -> ImageRef:
    """Which image it is."""
    return image.ref if isinstance(image, EncodedImage) else image


class Detections(msgspec.Struct, frozen=True, eq=False, gc=False):
    """All boxes of one image, as a struct of arrays, confidence descending.

    Attributes:
      boxes_xyxy: `(N, 4) float32`, pixels of the original upright image, half-open edges, not clipped to the image.
      class_ids: `(N,) int32`.
      confidences: `(N,) float32` in 0..1.
      class_names: N names.
    """

    boxes_xyxy: np.ndarray
    class_ids: np.ndarray
    confidences: np.ndarray
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        n, shapes = len(self.class_names), (self.boxes_xyxy.shape, self.class_ids.shape, self.confidences.shape)
        if shapes != ((n, 4), (n,), (n,)):
            raise ValueError(f"expected boxes, class ids and confidences of {n} objects, got arrays of the shapes {[*shapes]}")

    def __len__(self) -> int:
        return len(self.class_names)


class Timing(msgspec.Struct, frozen=True, gc=False):
    """The seconds that one image spent in each stage; `finished_at` is in seconds since the epoch.

    Attributes:
      read: Fetching the bytes.
      decode: Bytes to pixels at the model's input size.
      predict: From passing pixels to the model until its output; includes the wait for a batch and for the device.
      postprocess: Boxes back to the original image.
      latency: From receiving the image to its result.
      finished_at: The time of the result.
      led_batch: Size of the device batch if this image was its first, else 0; so sums over images count each batch once.
      model: Seconds that this batch ran, if `led_batch` is not 0.
      further_batches: Size and seconds of other batches that tiles of the image were the first ones of.
    """

    read: float = 0.0
    decode: float = 0.0
    predict: float = 0.0
    postprocess: float = 0.0
    latency: float = 0.0
    finished_at: float = 0.0
    led_batch: int = 0
    model: float = 0.0
    further_batches: tuple[tuple[int, float], ...] = ()

    @property
    def batches(self) -> tuple[tuple[int, float], ...]:
        """Size and seconds of each batch that counts for this image."""
        return ((self.led_batch, self.model), *self.further_batches) if self.led_batch else ()


class DetectedImage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The result for one image; zero boxes if it shows no object.

    Attributes:
      ref: Which image.
      width: Width of the upright image, pixels.
      height: Height of the upright image, pixels.
      model_name: Name of the model.
      model_version: Its version, as a string.
      detections: The boxes.
      timing: The seconds of each stage.
      thumbnail: A small JPEG of the upright image, for the few images that the report shows; empty for the others.
    """

    ref: ImageRef
    width: int
    height: int
    model_name: str
    model_version: str
    detections: Detections
    timing: Timing = Timing()
    thumbnail: bytes = b""


def unsigned(image: DetectedImage) -> DetectedImage:
    """The same result without the signature of its image's address, for what is written to files."""
    return replace(image, ref=replace(image.ref, signed_uri=""))


def mostly_outside(images: Sequence[DetectedImage]) -> int:
    """How many boxes lie for the most part outside of their image."""
    boxes = np.concatenate([image.detections.boxes_xyxy.reshape(-1, 4) for image in images]).astype(np.float64)
    sizes = [(image.width, image.height) * 2 for image in images]
    inside = np.clip(boxes, 0, np.repeat(sizes, [len(image.detections) for image in images], axis=0))
    area, area_inside = ((corners[:, 2:] - corners[:, :2]).clip(0).prod(axis=-1) for corners in (boxes, inside))
    return int((area_inside < area / 2).sum())


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """An image (or message) without a result, which no retry within the run would give one.

    Attributes:
      ref: What is known of the image.
      stage: A key of `failures.REASONS`.
      reason: A key of `failures.REASONS[stage]`.
      message: One line for a person: what was expected, what came.
      payload: The message as received, if it names no image that can be read again; else empty.
      model_name: Name of the model that failed; empty if none was called.
      model_version: Its version.
      thumbnail: A small JPEG of an image that was decoded, for the few that the report shows; empty for the others.
      skipped: Whether the stream was stopped before the image's store answered. Then it is not dead: its message comes again.
    """

    ref: ImageRef
    stage: str
    reason: str
    message: str
    payload: bytes = b""
    model_name: str = ""
    model_version: str = ""
    thumbnail: bytes = b""
    skipped: bool = False


def detection_row(image: DetectedImage) -> dict[str, Any]:
    """The JSON row of a detected image; boxes are rounded to 0.01 pixel, confidences to 1e-5."""
    found = image.detections
    boxes = np.round(found.boxes_xyxy.astype(np.float64), 2).tolist()
    confidences = np.round(found.confidences.astype(np.float64), 5).tolist()
    return {
        "image": {"uri": image.ref.uri, "generation": image.ref.generation, "width": image.width, "height": image.height},
        "model": {"name": image.model_name, "version": image.model_version},
        "detections": [
            {"box_xyxy": box, "class_id": class_id, "class_name": name, "confidence": confidence}
            for box, class_id, name, confidence in zip(
                boxes, found.class_ids.tolist(), found.class_names, confidences, strict=True
            )
        ],
        **_extra(image.ref),
    }


def dead_letter_row(letter: DeadLetter) -> dict[str, Any]:
    """The JSON row of a dead letter; a manifest of such rows is an input that retries the images."""
    image = {"uri": letter.ref.uri, "generation": letter.ref.generation}
    row = {
        "image": {k: v for k, v in image.items() if v},
        **({"model": {"name": letter.model_name, "version": letter.model_version}} if letter.model_name else {}),
        "stage": letter.stage,
        "reason": letter.reason,
        "message": letter.message,
        **({"record": letter.ref.record} if letter.ref.record else {}),
        **_extra(letter.ref),
    }
    if letter.payload:
        row["payload_base64"] = base64.b64encode(letter.payload).decode("ascii")
    return row


def _extra(ref: ImageRef) -> dict[str, Any]:
    return {"extra": json.loads(ref.extra)} if ref.extra else {}


def row_bytes(row: Any, indent: int | None = None) -> bytes:
    r"""A row as one line of UTF-8 JSON without an end of line, for files and messages; several lines with `indent`.

    The text of a value never changes from release to release: the hashes of settings, by which a row counts as done, are hashes
    of such texts.

    Every row gives valid JSON. NaN and infinity become `null`, as in `JSON.stringify`. Half a surrogate pair in a name, which is
    how Python holds bytes of a file name that are no UTF-8, is escaped, so readers get the same name.

    >>> row_bytes({"uri": "\udc80.jpg", "score": float("nan")})
    b'{"uri": "\\udc80.jpg", "score": null}'
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
        text = json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")  # "\udc80" is JSON's own escape for what it replaces


def compact_bytes(row: Any) -> bytes:
    r"""The same row without spaces, made in an eighth of the time of `row_bytes`; for readers that parse it.

    >>> compact_bytes({"uri": "a.jpg", "score": float("nan")})
    b'{"uri":"a.jpg","score":null}'
    """
    try:
        return msgspec.json.encode(row)
    except UnicodeEncodeError:  # bytes of a name that are no UTF-8
        return row_bytes(row)


def name_bytes(name: str) -> bytes:
    r"""The bytes of a name, for hashes and shuffles: different for different names, even if they are no Unicode.

    >>> name_bytes("\udc80.jpg")
    b'\xed\xb2\x80.jpg'
    """
    return name.encode("utf-8", "surrogatepass")


def path_bytes(name: str) -> bytes:
    r"""A name as the bytes that it had as a file's, by which other programs find it; what no file's name can be is escaped.

    >>> path_bytes("/\udc80.jpg")
    b'/\x80.jpg'
    """
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return name.encode("utf-8", "backslashreplace")


def name_of(name: bytes) -> str:
    """The name of `name_bytes`."""
    return name.decode("utf-8", "surrogatepass")


def identity_hash(identity: str) -> int:
    """A fixed pseudo-random number of 64 bits for an image; it selects the image's shard and the samples of the report."""
    return int.from_bytes(hashlib.blake2b(name_bytes(identity), digest_size=8).digest(), "big")
