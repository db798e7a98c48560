"""What each setting is declared with: its type, and `Setting`, which the command line, messages and docs read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from pipeline.config.engines import AUTO, ENGINES
from pipeline.config.paths import local_path

Element = TypeVar("Element")
MOST = 2**31 - 1  # TensorFlow, Pub/Sub and the system take integers of 32 bits; longer waits in seconds overflow, too


def _some(path: str) -> str:
    if not path:
        raise ValueError("expected a path")
    return path


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):  # YAML's `yes`, which is 1 for Python
        raise ValueError("expected number")
    return value


NO_BOOL = BeforeValidator(_no_bool)  # of each number
Path = Annotated[str, Strict(), AfterValidator(local_path)]  # strict: a file's name need not be UTF-8
SomePath = Annotated[Path, AfterValidator(_some)]
Count = Annotated[int, Field(ge=1, le=MOST), NO_BOOL]
Threads = Annotated[int, Field(ge=1, le=1024), NO_BOOL]  # a pool starts all of them at once
Share = Annotated[float, Field(ge=0.0, le=1.0), NO_BOOL]
Duration = Annotated[float, Field(ge=0.0, le=MOST), NO_BOOL]
Positive = Annotated[float, Field(ge=0.001, le=MOST), NO_BOOL]
ListOf = Annotated[tuple[Element, ...], BeforeValidator(_listed)]
PairOf = Annotated[tuple[Element, Element], BeforeValidator(_listed)]

EXPORT_FORMATS = {  # a name to the function that writes rows, and the names of its files; a new format is a row here and a module
    "csv": ("pipeline.exports.write_csv:write_csv", "detections.csv"),
    "coco": ("pipeline.exports.write_coco:write_coco", "coco/results.json", "coco/images.json", "coco/annotations.json"),
    "yolo": ("pipeline.exports.write_labels:write_yolo", "yolo.zip"),
    "voc": ("pipeline.exports.write_labels:write_voc", "voc.zip"),
    "cvat": ("pipeline.exports.write_labels:write_cvat", "cvat.xml"),
    "label-studio": ("pipeline.exports.write_label_studio:write_label_studio", "label-studio.json"),
    "tfrecord": ("pipeline.exports.write_tfrecord:write_tfrecord", "detections.tfrecord"),
    "jsonl": ("pipeline.exports.write_jsonl:write_jsonl", "detections.jsonl"),
}
ExportFormat = Literal[tuple(EXPORT_FORMATS)]  # type: ignore[valid-type]  # mypy takes no computed names


def is_own_engine(engine: str) -> bool:
    """Whether an engine is a function of the user's, `package.module:function`, which opens `--model` as it is given."""
    return ":" in engine


def _engine(name: str) -> str:
    if name not in (AUTO, *ENGINES) and not re.fullmatch(r"[\w.]+:\w+", name):
        raise ValueError(f"expected {', '.join([AUTO, *ENGINES])} or package.module:function")
    return name


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|gpu(:\d+)?", name):
        raise ValueError("expected auto, cpu, gpu or gpu:<number>")
    return name


Engine = Annotated[str, AfterValidator(_engine)]
Device = Annotated[str, AfterValidator(_device)]


Identity = Literal["rows", "limits", "none"]
Applies = Literal["batch", "streaming", ""]


def declare(default: Any, help_text: str, *, identity: Identity = "none", applies: Applies = "", **more: Any) -> Any:
    """Declares a setting.

    Args:
      default: Its default.
      help_text: Its help, in one line.
      identity: What it decides. `rows`: which rows come out of the detector, so that rows of another value do not count;
        `limits`: which images are refused, so that their dead letters of another value do not count; `none`: neither.
      applies: The mode of the jobs that use it; empty: both.
      more: What else pydantic's `Field` takes.
    """
    return Field(default=default, description=help_text, json_schema_extra={"identity": identity, "applies": applies}, **more)


class Setting(NamedTuple):
    """One setting.

    Attributes:
      key: Its dotted key, `detect.score_threshold`. The last part is unique among all settings.
      default: Its default, as JSON.
      schema: The JSON Schema of its value without null, with its help as `description`.
    """

    key: str
    default: Any
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """Its flag; empty for the mapping `beam_options`, and for the keys of a model's description, which have no help."""
        if self.schema.get("type") == "object" or not self.help:
            return ""
        return "--model" if self.key == "model.path" else "--" + self.name.replace("_", "-")

    @property
    def identity(self) -> Identity:
        """What it decides; see `declare`. The keys of a model's description decide on its rows."""
        return self.schema.get("identity", "rows" if self.key.startswith("model.") else "none")  # type: ignore[no-any-return]

    @property
    def is_secret(self) -> bool:
        """Whether its value is a `SecretStr`, which nothing prints."""
        return bool(self.schema.get("writeOnly"))

    @property
    def applies(self) -> Applies:
        """The mode of the jobs that use it; empty: both."""
        return self.schema.get("applies", "")  # type: ignore[no-any-return]

    @property
    def help(self) -> str:
        """Its help, in one line."""
        return str(self.schema.get("description", ""))


def settings_in(properties: Mapping[str, Any], classes: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """The settings that JSON Schema has for the fields of a class, and of its sections, which are other classes."""
    for name, part in properties.items():
        if "$ref" in part:
            yield from settings_in(classes[part["$ref"].rpartition("/")[2]]["properties"], classes, f"{prefix}{name}.")
            continue
        options = [option for option in part.get("anyOf", ()) if option != {"type": "null"}]
        yield Setting(prefix + name, part.get("default"), {**(options[0] if options else {}), **part})
