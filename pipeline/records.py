"""The records that travel through the pipeline, and the rows that a reader of the output sees.

An image is an `ImageRef` while it is only known by name, an `EncodedImage` once its bytes are read, and ends as exactly one
`DetectedImage` or one `DeadLetter`. Nothing else crosses a step. Decoded pixels never do: they live inside `DetectObjects`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from typing import Annotated, Any

import numpy as np

INLINE = "inline:"  # begins the URI of an image that came with its message


@dataclasses.dataclass(frozen=True, slots=True)
class ImageRef:
    """Names one version of one image; holds no bytes.

    Attributes:
      uri: Path or URI as the user or the message gave it.
      generation: Object generation on Cloud Storage; size and mtime of a local file; a content hash for inline images.
        Empty where it is not known (yet).
      size_bytes: Size as listed, 0 where unknown.
      event_time: Seconds since the epoch at which the image came into being for a stream; None in batch.
      request_id: The request that asked for this image, as its sender names it; empty in batch.
      message_id: The message that asked for it; empty in batch.
      extra: What else was said of it where it was named, as the JSON text of `extra_fields.extra_text`; mostly empty.
      record: Where it lies in a TFRecord file, `<file>@<start>-<end>` in bytes; empty for an image of its own.
    """

    uri: str
    generation: str = ""
    size_bytes: int = 0
    event_time: float | None = None
    request_id: str = ""
    message_id: str = ""
    extra: str = ""
    record: str = ""

    @property
    def is_inline(self) -> bool:
        """Whether the image came with its message, so that it cannot be read again."""
        return self.uri.startswith(INLINE)

    @property
    def identity(self) -> str:
        """`uri#generation`: equal for two readings of the same generation of an image, whoever asked for it."""
        return f"{self.uri}#{self.generation}"


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as its file holds it: JPEG, PNG, … bytes, not yet decoded.

    Attributes:
      ref: Which image.
      content: The file's bytes.
      read_seconds: How long reading took.
      received_at: Seconds since the epoch when the pipeline first had the image in hand.
    """

    ref: ImageRef
    content: bytes
    read_seconds: float = 0.0
    received_at: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Detections:
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

    def __len__(self) -> int:
        return len(self.class_names)


def _are_whole(found: Detections) -> bool:
    shapes = [array.shape for array in (found.boxes_xyxy, found.class_ids, found.confidences)]
    return shapes == [(len(found), 4), (len(found),), (len(found),)]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Where one image's time went, in seconds; `finished_at` in seconds since the epoch.

    Attributes:
      read: Fetching the bytes.
      decode: Bytes to pixels at the model's input size.
      predict: From handing the pixels to the model until its answer; includes the wait for a batch to form and for its turn.
      postprocess: Boxes back to the original image.
      latency: From first having the image in hand to its result.
      finished_at: When the result was there.
      led_batch: Rung of the device batch if this image was its first, else 0; so sums over images count every batch once.
      model: Seconds that this batch ran, where `led_batch` is not 0.
    """

    read: float = 0.0
    decode: float = 0.0
    predict: float = 0.0
    postprocess: float = 0.0
    latency: float = 0.0
    finished_at: float = 0.0
    led_batch: int = 0
    model: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DetectedImage:
    """The result for one image; zero boxes when there is nothing to see.

    Attributes:
      ref: Which image.
      width: Width of the upright image, pixels.
      height: Height of the upright image, pixels.
      model_name: Name of the model that answered.
      model_version: Its version, as a string.
      detections: The boxes.
      timing: Where the time went.
      thumbnail: A small JPEG of the upright image, for the few images that the report shows; empty for the others.
    """

    ref: ImageRef
    width: int
    height: int
    model_name: str
    model_version: str
    detections: Annotated[Detections, _are_whole]
    timing: Timing = Timing()
    thumbnail: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """An image (or message) that ended without a result, for a reason that does not pass by itself within the run.

    Attributes:
      ref: What is known of the image.
      stage: `list`, `message`, `read`, `decode` or `detect`.
      reason: A code from a short fixed list, in snake_case.
      message: One line for a person: what was expected, what came.
      payload: The message as it came, where it names no image that could be read again; else empty.
      model_name: Name of the model that failed; empty where the image came to none.
      model_version: Its version.
    """

    ref: ImageRef
    stage: str
    reason: str
    message: str
    payload: bytes = b""
    model_name: str = ""
    model_version: str = ""


def detection_row(image: DetectedImage) -> dict[str, Any]:
    """The JSON row of a detected image, as the output contract has it (boxes to 0.01 pixel, confidences to 1e-5)."""
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
    """The JSON row of a dead letter; a manifest of such rows can be given as input to try the images again."""
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
    r"""A row as the one line of UTF-8 JSON that stands in files and messages alike, without an end of line.

    (Several lines with `indent`.) Whatever stands in the row, this is JSON, and nothing is lost but what JSON cannot say: a
    number that is infinite or none is `null` (as `JSON.stringify` has it), and what is no Unicode in a name (half a surrogate
    pair, which is also how Python holds the bytes of a file name that are no UTF-8) is escaped, so readers get the same name.

    >>> row_bytes({"uri": "\udc80.jpg", "score": float("nan")})
    b'{"uri": "\\udc80.jpg", "score": null}'
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
        text = json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")  # "\udc80" is JSON's own escape for what it replaces


def name_bytes(name: str) -> bytes:
    r"""The bytes of a name, for hashes and shuffles: different for different names, also where they are no Unicode.

    >>> name_bytes("\udc80.jpg")
    b'\xed\xb2\x80.jpg'
    """
    return name.encode("utf-8", "surrogatepass")


def name_of(name: bytes) -> str:
    """The name of `name_bytes`."""
    return name.decode("utf-8", "surrogatepass")


def identity_hash(identity: str) -> int:
    """A fixed pseudo-random number of 64 bits for an image; it decides the image's shard, and whether the report shows it."""
    return int.from_bytes(hashlib.blake2b(name_bytes(identity), digest_size=8).digest(), "big")


def identity_bytes(ref: ImageRef) -> bytes:
    """The bytes of an image's identity: the key under which it is shuffled, hashed and recognised."""
    return name_bytes(ref.identity)
