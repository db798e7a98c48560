"""The description of a detector: a small JSON file inside its SavedModel, `assets.extra/detector.json`.

Code that runs the model reads input size, resize rule, value range, box format and class names from this file, never from a flag.
Models from elsewhere have no such file; a job's config describes them by the same record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic.dataclasses import dataclass

Resize = Literal["stretch", "letterbox", "none"]
LetterboxRule = Literal["darknet", "ultralytics", "yolox", "super_gradients"]
BoxFormat = Literal["xyxy", "yxyx", "xywh", "cxcywh", "grid"]
ChannelOrder = Literal["rgb", "bgr"]
Normalisation = Literal["", "imagenet"]
ScoreActivation = Literal["", "sigmoid", "softmax"]
BoxUnits = Literal["norm", "pixels"]
InputDtype = Literal["uint8", "float32"]
Suppressor = Literal["model", "pipeline"]
JoinedLayout = Literal["", "4+C,M", "M,4+C", "M,5+C", "M,6"]

METADATA_PATH = "assets.extra/detector.json"
OF_SIGNATURE = ("input_name", "input_dtype", "count_output", "threshold_inputs")  # fields that a signature shows by itself

_Name = Annotated[str, pydantic.Field(min_length=1)]


@dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))
class DetectorMetadata:
    """The input and output conventions of a detector.

    Attributes:
      name: Name of the model, without its version.
      input_hw: Height and width of the model's input, pixels; with `resize` none only of the blank image that warms it up.
      resize: How an image becomes `input_hw`: `stretch`, or `letterbox` (keeps the aspect ratio and pads); `none` if the model
        takes images of any size.
      class_names: One name for each class, in the order of the class ids; empty if unknown.
      signature: The SavedModel signature that takes a batch of pixels.
      input_name: Its input for `(N, H, W, 3)` RGB images.
      input_dtype: dtype of that input.
      value_range: The model's input values for 0 and 255 of an 8-bit pixel, such as 0 and 1, or -1 and 1.
      letterbox_value: 8-bit grey of the padding.
      letterbox_rule: Whose letterbox: `darknet` rounds sizes down, `ultralytics` to nearest; `yolox` begins at the top left;
        `super_gradients` leaves a margin (`geometry.resize_plan`).
      antialias: Whether images are made smaller with a filter against aliasing, as Pillow and the processors of Hugging Face do.
      channel_order: Order of the input's channels, `rgb` or `bgr`.
      normalisation: `imagenet`: the input has ImageNet's mean subtracted and is divided by its standard deviation, after
        `value_range`; empty for none.
      boxes_output: Output `(N, M, 4)` of boxes.
      scores_output: Output `(N, M)` of confidences, or `(N, M, C)` of class confidences if the pipeline suppresses.
      classes_output: Output `(N, M)` of class numbers; empty if the model has none.
      count_output: Output `(N,)` with the number of valid detections; empty if the model has none.
      score_activation: What makes confidences of the scores: `sigmoid`, or `softmax` with a last class for no object; empty for
        nothing.
      box_format: Order of the four numbers of a box: `xyxy`, `yxyx`, `xywh` or `cxcywh`; `grid` is YOLOX's offset from its cell
        and log size, in cells.
      box_units: `norm` (0..1 of the model's input) or `pixels` of the model's input.
      class_id_offset: Subtracted from the model's class numbers (1 for the TensorFlow Object Detection API).
      nms: What suppresses overlapping boxes, `model` or `pipeline`.
      threshold_inputs: Whether the signature also takes `score_threshold`, `iou_threshold` and `max_detections`.
      packed_layout: The axes, after that of the images, of a `boxes_output` that also holds the confidences of M boxes and C
        classes: `4+C,M` or `M,4+C`; `M,5+C` has an objectness after the box, `M,6` is a box with its confidence and its class.
        Empty for separate outputs.

    Raises:
      ValueError: A value is not allowed; `what_is_wrong` has the line for it.
    """

    name: _Name
    input_hw: tuple[pydantic.PositiveInt, pydantic.PositiveInt]
    resize: Resize
    class_names: tuple[str, ...]
    signature: _Name = "detect"
    input_name: _Name = "images"
    input_dtype: InputDtype = "uint8"
    value_range: tuple[float, float] = (0.0, 255.0)
    letterbox_value: Annotated[int, pydantic.Field(ge=0, le=255)] = 128
    boxes_output: _Name = "boxes"
    scores_output: _Name = "scores"
    classes_output: str = "classes"
    count_output: str = "num_detections"
    box_format: BoxFormat = "xyxy"
    box_units: BoxUnits = "norm"
    class_id_offset: int = 0
    nms: Suppressor = "model"
    threshold_inputs: bool = True
    packed_layout: JoinedLayout = ""
    letterbox_rule: LetterboxRule = "darknet"
    channel_order: ChannelOrder = "rgb"
    normalisation: Normalisation = ""
    score_activation: ScoreActivation = ""
    antialias: bool = False

    @property
    def graph_hw(self) -> tuple[int | None, int | None]:
        """Height and width of the input as a graph has them: `input_hw`, or unknown if images keep their own size."""
        return (None, None) if self.resize == "none" else self.input_hw


_JSON = pydantic.TypeAdapter(DetectorMetadata)


def what_is_wrong(err: ValueError) -> str:
    """The first fault of metadata, in one line that begins with the field."""
    if not isinstance(err, pydantic.ValidationError):
        return str(err)
    first = err.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}".removeprefix(": ")


def write_metadata(saved_model_dir: str, metadata: DetectorMetadata) -> None:
    """Writes `metadata` into a SavedModel's local directory."""
    path = Path(saved_model_dir, METADATA_PATH)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(metadata_to_json(metadata), encoding="utf-8")


def read_metadata(saved_model_dir: str) -> DetectorMetadata | None:
    """Reads the description in a SavedModel on this machine; None without one.

    Raises:
      ValueError: The file cannot be understood; the message names it and the fault.
    """
    path = Path(saved_model_dir, METADATA_PATH)
    try:
        return metadata_from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as err:
        raise ValueError(f"{path}: {what_is_wrong(err)}") from err


def metadata_to_json(metadata: DetectorMetadata) -> str:
    """`metadata` as indented JSON with a final line feed; `metadata_from_json` is its inverse."""
    return _JSON.dump_json(metadata, indent=2).decode() + "\n"


def metadata_from_json(text: str) -> DetectorMetadata:
    """Parses the JSON of `metadata_to_json`.

    Raises:
      ValueError: The text is no JSON object, or a key is unknown or missing, or a value is not allowed; see `what_is_wrong`.
    """
    return _JSON.validate_json(text)
