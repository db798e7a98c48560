"""The settings of one job: typed, frozen, checked before anything starts.

A config is one YAML file; flags override its keys. Each key is declared once, here, with its default and its one-line help,
and becomes a
flag of the same name (`score_threshold` -> `--score-threshold`), so `--help`, the file and the code can't disagree.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from pipeline.errors import ConfigError

_Number = (int, float)


def _setting(default: Any, help_text: str, **bounds: float) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, **bounds})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which detector, and for a model that does not describe itself, how to feed and read it.

    Everything below `path` and `name` overrides what the model says of itself.
    """

    path: str = _setting(
        "digits", "SavedModel, or a folder of versions <path>/<integer>; local or gs://. 'digits' is the bundled detector"
    )
    name: str | None = _setting(None, "name written into every row; default: what the model says, else its folder's name")
    signature: str | None = _setting(None, "signature to call; default: what the model says, else serving_default")
    input_name: str | None = _setting(None, "foreign models: name of the image input")
    input_hw: tuple[int, int] | None = _setting(None, "foreign models: height and width of the input, as [H, W]", low=1)
    input_dtype: Literal["uint8", "float32"] | None = _setting(None, "foreign models: what the input takes")
    value_range: tuple[float, float] | None = _setting(
        None, "foreign models: what pixel values 0 and 255 become: [0, 1] or [-1, 1]; as a flag, 0 1 or -1 1"
    )
    resize: Literal["stretch", "letterbox"] | None = _setting(None, "foreign models: how images are fitted to the input")
    letterbox_value: int | None = _setting(None, "foreign models: grey of the letterbox padding, 0..255", low=0, high=255)
    boxes_output: str | None = _setting(None, "foreign models: name of the output with boxes (N, M, 4)")
    scores_output: str | None = _setting(None, "foreign models: name of the output with scores (N, M) or (N, M, classes)")
    classes_output: str | None = _setting(
        None, "foreign models: name of the output with class numbers (N, M); '' where scores have a class axis"
    )
    count_output: str | None = _setting(
        None, "foreign models: name of the output with the number of boxes (N,); '' where there is none"
    )
    box_format: Literal["xyxy", "yxyx", "xywh", "cxcywh"] | None = _setting(None, "foreign models: order of a box's four numbers")
    box_units: Literal["norm", "pixels"] | None = _setting(
        None, "foreign models: boxes as shares of the model's input, or in its pixels"
    )
    class_id_offset: int | None = _setting(None, "foreign models: number of the first class (1 for the TF Object Detection API)")
    class_names: tuple[str, ...] | None = _setting(
        None, "foreign models: class names in order, as a list or a text file with one a line"
    )
    nms: Literal["model", "pipeline"] | None = _setting(None, "foreign models: who suppresses overlapping boxes")


@dataclasses.dataclass(frozen=True)
class DetectConfig:
    """How the detector runs. The defaults are measured; BENCHMARKS.md has the figures."""

    score_threshold: float = _setting(0.25, "least confidence of a detection", low=0.0, high=1.0)
    iou_threshold: float = _setting(0.45, "boxes of one class that overlap more than this are one object", low=0.0, high=1.0)
    classes: tuple[str, ...] = _setting((), "keep only these class names; default: all")
    max_detections: int = _setting(100, "most detections of one image", low=1)
    precision: Literal["float32", "bfloat16"] = _setting(
        "float32", "bfloat16: about twice as fast on CPUs with avx512_bf16 or AMX and on GPUs"
    )
    xla: bool = _setting(False, "compile the model with XLA; slower on CPU where that was measured, often faster on GPU")
    device: str = _setting("auto", "auto, cpu, gpu or gpu:<number>")
    gpu_memory_mb: int | None = _setting(None, "limit of the GPU memory; default: grow as needed", low=64)
    batch_sizes: tuple[int, ...] = _setting((), "batch ladder, ascending; default: 1,2,4 on CPU and up to 32 on GPU", low=1)
    batch_timeout_ms: float = _setting(1.0, "longest wait of an image for others to share its batch", low=0.0)
    streams: int | None = _setting(None, "batches in flight; default: one more than cores, up to 4, on CPU; 2 on GPU", low=1)
    intra_op_threads: int | None = _setting(None, "threads inside one operation; default: cores / streams on CPU", low=1)
    inter_op_threads: int | None = _setting(None, "operations side by side; default: streams on CPU", low=1)
    cpu_affinity: tuple[int, ...] = _setting((), "run on these cores only; default: all", low=0)
    decode_threads: int | None = _setting(None, "images decoded side by side; default: one for each core", low=1)
    max_megapixels: float = _setting(
        100.0, "larger images are refused on their header; for JPEG this counts after decoding at reduced scale", low=0.01
    )
    scaled_decode: bool = _setting(
        True, "decode large JPEGs at 1/2, 1/4 or 1/8 where at least 1.5 times the model's input remains"
    )
    request_images: int = _setting(256, "most images under way in the detector", low=1)
    request_mb: float = _setting(64.0, "most encoded megabytes under way in the detector", low=0.1)


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """How images are read."""

    read_threads: int = _setting(16, "images read side by side, ahead of the detector", low=1)
    max_file_mb: float = _setting(256.0, "larger files are refused before they are read", low=0.001)


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """What is written beside the JSON Lines, the summary and the report."""

    shards: int = _setting(1, "number of detections-*.jsonl files", low=1)
    parquet: bool = _setting(False, "write detections/*.parquet too, one row an image")
    coco: bool = _setting(False, "write coco/results.json (and coco/images.json) too")
    coco_ground_truth: str | None = _setting(None, "COCO annotations whose image and category ids coco/results.json shall use")
    samples: int = _setting(0, "write this many annotated images under samples/", low=0)
    report_samples: int = _setting(12, "annotated images shown in report.html", low=0, high=200)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """What streaming jobs need beside: input is a Pub/Sub subscription, output the topic of the detections."""

    archive: str = _setting("", "folder for the same rows in files, in the layout of batch; also for summary and report")
    archive_window_s: float = _setting(60.0, "seconds of rows in one archive file", low=1.0)
    dead_letter_topic: str = _setting("", "topic for dead letters; they go to files as well")
    answer_topic: str = _setting("", "topic for one answer per request; default: none")
    answer_deadline_s: float = _setting(60.0, "longest time to a request's answer; it then names what is missing", low=0.1)
    allow_uri_prefix: tuple[str, ...] = _setting(("gs://",), "folders whose images a message may name; each ends at a slash")
    max_message_images: int = _setting(1000, "most images of one message", low=1)
    max_message_mb: float = _setting(20.0, "most megabytes of one message's inline images", low=0.001)
    deduplicate_s: float = _setting(600.0, "seconds within which one version of an image gets one result", low=1.0)
    pull_images: int = _setting(128, "most images pulled ahead, and in one bundle", low=1)
    pull_mb: float = _setting(64.0, "most megabytes of messages pulled ahead, and in one bundle", low=0.1)


@dataclasses.dataclass(frozen=True)
class Config:
    """One job."""

    input: tuple[str, ...] = _setting(
        (), "images: files, folders, globs (with **), gs://; manifests .txt .csv .jsonl; TFRecord shards *.tfrecord*"
    )
    output: str = _setting("", "folder for the results, local or gs://")
    mode: Literal["batch", "streaming"] = _setting("batch", "batch: files in, files out; streaming: Pub/Sub in, Pub/Sub out")
    runner: str = _setting(
        "DirectRunner", "DirectRunner (in this process), PrismRunner, FlinkRunner, PortableRunner or DataflowRunner"
    )
    max_dead_share: float = _setting(0.5, "exit with 1 when a larger share of the images became dead letters", low=0.0, high=1.0)
    beam_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"help": "options of Beam and its runners, by their flag's name"}
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    detect: DetectConfig = dataclasses.field(default_factory=DetectConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    write: WriteConfig = dataclasses.field(default_factory=WriteConfig)
    stream: StreamConfig = dataclasses.field(default_factory=StreamConfig)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain nested dicts and lists, for the summary."""
        plain: dict[str, Any] = _plain(self)
        return plain


def load_config(path: str | None, overrides: Mapping[str, Any]) -> Config:
    """Reads a config file and lays flags over it.

    Args:
      path: YAML file; None for the defaults.
      overrides: Dotted key (`detect.score_threshold`) to value; strings are parsed as the key's type needs.

    Raises:
      ConfigError: The file is unreadable, no YAML mapping, or has an unknown key or a wrong value.
    """
    tree = _read_yaml(path) if path else {}
    config: Config = _build(Config, tree, path or "the flags", "")
    for key, value in overrides.items():
        config = _override(config, key.split("."), value, key)
    if not all(a < b for a, b in zip(config.detect.batch_sizes, config.detect.batch_sizes[1:], strict=False)):
        raise ConfigError(
            f"detect.batch_sizes: expected ascending sizes such as [1, 2, 4, 8], got {list(config.detect.batch_sizes)}"
        )
    return config


def settings(cls: type = Config, prefix: str = "") -> list[tuple[str, dataclasses.Field[Any], Any]]:
    """All leaf settings as (dotted key, field, type), in the order of their declaration; every leaf name is unique."""
    hints, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            found += settings(typing.cast(type, hints[field.name]), f"{prefix}{field.name}.")
        else:
            found.append((prefix + field.name, field, hints[field.name]))
    return found


def _read_yaml(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as err:
        raise ConfigError(
            f"config {path}: cannot be read ({err.strerror}); give the path of a YAML file, e.g. configs/batch_local_direct.yaml"
        ) from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError(f"config {path}: is no YAML: {' '.join(str(err).split())}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected 'key: value' lines, got {type(tree).__name__}")
    return tree


def _build(cls: type, tree: Any, source: str, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{source}: {prefix.rstrip('.')}: expected a section with keys, got {tree!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'{_nearest(str(key))}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(typing.cast(type, hints[key]), {} if value is None else value, source, f"{prefix}{key}.")
        else:
            values[key] = _parse(value, hints[key], f"{source}: {prefix}{key}", fields[key].metadata)
    return cls(**values)


def _nearest(key: str) -> str:
    known = {path.rsplit(".", 1)[-1]: path for path, _, _ in settings()}
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean '{known[close[0]]}'?" if close else f"; known keys: {', '.join(sorted(known.values()))}"


def _override(config: Any, path: list[str], value: Any, key: str) -> Any:
    hints = typing.get_type_hints(type(config))
    if len(path) > 1:
        return dataclasses.replace(config, **{path[0]: _override(getattr(config, path[0]), path[1:], value, key)})
    field = next(field for field in dataclasses.fields(config) if field.name == path[0])
    flag = "--" + path[0].replace("_", "-")
    return dataclasses.replace(config, **{path[0]: _parse(value, hints[path[0]], flag, field.metadata)})


def _parse(value: Any, hint: Any, where: str, bounds: Mapping[str, Any]) -> Any:  # noqa: PLR0911  one for each kind of type
    """Checks one value against its declared type; the message says what was expected and what came."""
    options = typing.get_args(hint)
    if type(None) in options:
        if value is None:
            return None
        hint = next(option for option in options if option is not type(None))
        options = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in options:
            raise ConfigError(f"{where}: expected {' or '.join(map(repr, options))}, got {value!r}")
        return value
    if origin is tuple:
        return _parse_tuple(value, options, where, bounds)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if (
        hint in _Number
        and isinstance(value, _Number)
        and not isinstance(value, bool)
        and (hint is float or isinstance(value, int))
    ):
        number: float = hint(_in_bounds(value, where, bounds))
        return number
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return dict(value)
    name = getattr(hint, "__name__", "section")
    raise ConfigError(f"{where}: expected {_TYPE_WORDS.get(name, name)}, got {value!r}")


_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "Mapping": "a section with keys",
}


def _parse_tuple(value: Any, options: tuple[Any, ...], where: str, bounds: Mapping[str, Any]) -> tuple[Any, ...]:
    elements = value if isinstance(value, (list, tuple)) else [value]
    parsed = tuple(_parse(element, options[0], where, bounds) for element in elements)
    if Ellipsis not in options and len(parsed) != len(options):
        raise ConfigError(f"{where}: expected {len(options)} values, got {value!r}")
    return parsed


def _in_bounds(number: float, where: str, bounds: Mapping[str, Any]) -> float:
    low, high = bounds.get("low", -sys.float_info.max), bounds.get("high", sys.float_info.max)  # so infinity is out of bounds
    if not low <= number <= high:
        limit = f"between {low} and {high}" if "high" in bounds else f"at least {low}"
        raise ConfigError(f"{where}: expected a number {limit}, got {number}")
    return number


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
