"""What a detector says of itself: a small JSON file inside its SavedModel, `assets.extra/detector.json`.

Whoever runs the model asks this file, never a flag: input size, resize rule, value range, box format, class names.
Foreign models have no such file; the same record can then be made by hand.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Literal, get_args

Resize = Literal["stretch", "letterbox"]
BoxFormat = Literal["xyxy", "yxyx", "xywh", "cxcywh"]
BoxUnits = Literal["norm", "pixels"]
InputDtype = Literal["uint8", "float32"]
Suppressor = Literal["model", "pipeline"]
JoinedLayout = Literal["", "4+C,M", "M,4+C", "M,5+C", "M,6"]

METADATA_PATH = "assets.extra/detector.json"


@dataclasses.dataclass(frozen=True)
class DetectorMetadata:
    """The facts needed to feed a detector and to read its answer.

    Attributes:
      name: Name of the model, without its version.
      input_hw: Height and width of the model's input, pixels.
      resize: How an image becomes `input_hw`: `stretch`, or `letterbox` (keeps the aspect ratio and pads).
      class_names: One name for each class, in the order of the class ids; empty where they are not known.
      signature: The SavedModel signature that takes a batch of pixels.
      input_name: Its input for `(N, H, W, 3)` RGB images.
      input_dtype: dtype of that input.
      value_range: What 0 and 255 of an 8-bit pixel become in the model's input.
      letterbox_value: 8-bit grey of the padding.
      boxes_output: Output `(N, M, 4)` of boxes.
      scores_output: Output `(N, M)` of confidences, or `(N, M, C)` of class confidences where the pipeline suppresses.
      classes_output: Output `(N, M)` of class numbers; empty where the model has none.
      count_output: Output `(N,)` with the number of valid detections; empty where the model has none.
      box_format: Order of the four numbers of a box.
      box_units: `norm` (0..1 of the model's input) or `pixels` of the model's input.
      class_id_offset: Subtracted from the model's class numbers (1 for the TensorFlow Object Detection API).
      nms: Who suppresses overlapping boxes.
      threshold_inputs: Whether the signature also takes `score_threshold`, `iou_threshold` and `max_detections`.
      packed_layout: Where `boxes_output` joins all that is said of M boxes and C classes: its axes behind that of the images.
        `5` has an objectness behind the box, `6` is a box with its confidence and its class. Empty where outputs are apart.

    Raises:
      ValueError: A value is not one of the allowed ones; the message names the field.
    """

    name: str
    input_hw: tuple[int, int]
    resize: Resize
    class_names: tuple[str, ...]
    signature: str = "detect"
    input_name: str = "images"
    input_dtype: InputDtype = "uint8"
    value_range: tuple[float, float] = (0.0, 255.0)
    letterbox_value: int = 128
    boxes_output: str = "boxes"
    scores_output: str = "scores"
    classes_output: str = "classes"
    count_output: str = "num_detections"
    box_format: BoxFormat = "xyxy"
    box_units: BoxUnits = "norm"
    class_id_offset: int = 0
    nms: Suppressor = "model"
    threshold_inputs: bool = True
    packed_layout: JoinedLayout = ""

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if (value := getattr(self, field)) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, not {value!r}")
        for field in ("name", "signature", "input_name", "boxes_output", "scores_output"):
            _require(isinstance(value := getattr(self, field), str) and value != "", field, "a non-empty text", value)
        for field in ("classes_output", "count_output"):
            _require(isinstance(value := getattr(self, field), str), field, "a text", value)
        _require(_is_tuple(self.input_hw, int, 2) and min(self.input_hw) > 0, "input_hw", "two positive integers", self.input_hw)
        _require(_is_tuple(self.value_range, (int, float), 2), "value_range", "two numbers", self.value_range)
        _require(_is_tuple(self.class_names, str), "class_names", "a list of names", self.class_names)
        grey = self.letterbox_value
        _require(_is_int(grey) and 0 <= grey <= 255, "letterbox_value", "an integer in 0..255", grey)
        _require(_is_int(self.class_id_offset), "class_id_offset", "an integer", self.class_id_offset)
        _require(isinstance(self.threshold_inputs, bool), "threshold_inputs", "true or false", self.threshold_inputs)


_CHOICES: dict[str, tuple[str, ...]] = {
    "resize": get_args(Resize),
    "input_dtype": get_args(InputDtype),
    "box_format": get_args(BoxFormat),
    "box_units": get_args(BoxUnits),
    "nms": get_args(Suppressor),
    "packed_layout": get_args(JoinedLayout),
}


def write_metadata(saved_model_dir: str, metadata: DetectorMetadata) -> None:
    """Write `metadata` into a SavedModel's local directory."""
    path = os.path.join(saved_model_dir, METADATA_PATH)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(metadata_to_json(metadata))


def read_metadata(saved_model_dir: str) -> DetectorMetadata | None:
    """Read what a SavedModel (local, or `gs://`, which imports TensorFlow) says of itself; None where it says nothing.

    Raises:
      ValueError: The file is there but cannot be understood; the message names it and what is wrong.
    """
    path = os.path.join(saved_model_dir, METADATA_PATH)
    text = _read_remote(path) if "://" in path else _read_local(path)
    if text is None:
        return None
    try:
        return metadata_from_json(text)
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err


def _read_local(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _read_remote(path: str) -> str | None:
    import tensorflow as tf

    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        return str(file.read())


def metadata_to_json(metadata: DetectorMetadata) -> str:
    """`metadata` as indented JSON with a final line feed; `metadata_from_json` is its inverse."""
    return json.dumps(dataclasses.asdict(metadata), indent=2, ensure_ascii=False) + "\n"


def metadata_from_json(text: str) -> DetectorMetadata:
    """Parse what `metadata_to_json` wrote.

    Raises:
      ValueError: No JSON object, an unknown or missing key, or a value that is not allowed.
    """
    values = json.loads(text)  # JSONDecodeError is a ValueError and says where
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got a {type(values).__name__}")
    fields = dataclasses.fields(DetectorMetadata)
    if unknown := sorted(set(values) - {field.name for field in fields}):
        raise ValueError(f"unknown key {unknown[0]!r}")
    if missing := [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in values]:
        raise ValueError(f"key {missing[0]!r} is missing")
    arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return DetectorMetadata(**arguments)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tuple(value: Any, kind: type | tuple[type, ...], length: int | None = None) -> bool:
    return (
        isinstance(value, tuple)
        and all(isinstance(part, kind) and not isinstance(part, bool) for part in value)
        and length in (None, len(value))
    )


def _require(valid: bool, field: str, expected: str, value: Any) -> None:
    if not valid:
        raise ValueError(f"{field} must be {expected}, not {value!r}")
