"""Declares every setting of a job: its type, bounds, default, and help."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from models import metadata
from pipeline.config import dates as days
from pipeline.config.engines import AUTO, engine_help
from pipeline.config.mistakes import what_is_wrong
from pipeline.config.paths import read_yaml
from pipeline.config.setting import (
    MOST,
    NO_BOOL,
    Count,
    Device,
    Duration,
    Engine,
    ExportFormat,
    ListOf,
    PairOf,
    Path,
    Positive,
    Setting,
    Share,
    SomePath,
    Threads,
    declare,
    settings_in,
)
from pipeline.errors import ConfigError
from pipeline.secrets import masked_options, without_secrets

_Section = TypeVar("_Section")
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def _beam_option(value: Any) -> Any:
    for element in value if isinstance(value, list) else [value]:
        if not (isinstance(element, str) or (isinstance(element, (int, float)) and abs(element) < 2**63)):  # false for NaN, too
            raise ValueError("expected text, a number, true or false, or a list of these")
    return value


def _text(value: Any) -> Any:
    """A day or a whole number, which YAML has types for, as text."""
    return str(value) if type(value) is int or isinstance(value, datetime.date) else value


def _webhook(url: SecretStr) -> SecretStr:
    if url and not url.get_secret_value().lower().startswith(("http://", "https://")):
        raise ValueError("expected a URL with http:// or https://")
    return url


def _checked(section: type[_Section]) -> type[_Section]:
    """Makes a wrong value a `ConfigError` of one line where Python code makes a section; `load_config` has its own messages."""
    validated = section.__init__

    @functools.wraps(validated)
    def checked(self: _Section, *arguments: Any, **values: Any) -> None:
        try:
            validated(self, *arguments, **values)
        except ValidationError as err:
            schema = TypeAdapter(section).json_schema(mode="serialization")
            known = [*settings_in(schema["properties"], schema.get("$defs", {}))]
            raise ConfigError(what_is_wrong(err, section.__name__, {}, known)) from err

    section.__init__ = checked  # type: ignore[assignment]
    return section


_Webhook = Annotated[SecretStr, AfterValidator(_webhook)]
_BeamOption = Annotated[Any, AfterValidator(_beam_option)]
_Input = Annotated[SomePath, AfterValidator(days.check_places)]
_Text = Annotated[str, BeforeValidator(_text)]
_Port = Annotated[int, Field(ge=0, le=65535), NO_BOOL]

_READ_THREADS, _THREADS_OF_PROCESS = 16, 4  # a store may take 100 ms for a photo, and decoding 25 ms
_OF_TILES = {"tile_overlap": 0.2, "tile_whole": False, "tile_merge": "nms"}  # settings that only images in tiles need
BUNDLED = "digits"  # the detector that comes with this program


@_checked
@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """The detector, and for a model that does not describe itself, its inputs and outputs.

    Everything from `name` on overrides the model's own description.
    """

    path: Path = declare(
        "",
        "required: SavedModel, or a folder of versions <path>/<integer>; local or gs://. 'digits' is the bundled detector; "
        "on a model server grpc://host:port/name, with TLS grpcs://, and with commas between several servers",
    )
    model_version: _Text | None = declare(
        None, "a version's number, or its label in <path>/labels.json such as stable; default: the newest"
    )
    model_poll_s: Duration = declare(
        30.0, "seconds between checks for another version, which replaces the one in use while the job runs; 0: never"
    )
    server_wait_s: Duration = declare(
        600.0, "longest wait for a model server that is away or busy; then the job fails, and its next run goes on"
    )
    name: str | None = declare(None, "name of the model in every row; default: the model's own, else its folder's")
    input_hw: PairOf[Count] | None = declare(None, "height and width of the input, as [H, W]", identity="rows")
    class_names: ListOf[Path] | None = declare(
        None, "class names in order: a list, or a text file with one name a line", identity="rows"
    )
    description: Path | None = declare(
        None, "JSON or YAML file that describes a model which does not describe itself, as detector.json does"
    )
    # Keys of a description; the docstring of `DetectorMetadata` has what each of them means.
    signature: str | None = None
    value_range: PairOf[Annotated[float, Field(ge=-MOST, le=MOST), NO_BOOL]] | None = None
    resize: metadata.Resize | None = None
    letterbox_value: Annotated[int, Field(ge=0, le=255), NO_BOOL] | None = None
    letterbox_rule: metadata.LetterboxRule | None = None
    antialias: bool | None = None
    channel_order: metadata.ChannelOrder | None = None
    normalisation: metadata.Normalisation | None = None
    boxes_output: str | None = None
    scores_output: str | None = None
    classes_output: str | None = None
    score_activation: metadata.ScoreActivation | None = None
    box_format: metadata.BoxFormat | None = None
    box_units: metadata.BoxUnits | None = None
    class_id_offset: Annotated[int, Field(ge=-MOST, le=MOST), NO_BOOL] | None = None
    nms: metadata.Suppressor | None = None
    packed_layout: metadata.JoinedLayout | None = None

    @model_validator(mode="before")
    @classmethod
    def _described(cls, given: Any) -> Any:
        """Lays the keys over those of the file that `description` names, without what the model's signature shows."""
        values = given.kwargs if isinstance(given, ArgsKwargs) else given
        if not (isinstance(values, dict) and values.get("description")):
            return given
        described = read_yaml("description", values["description"])
        merged = {key: value for key, value in described.items() if key not in metadata.OF_SIGNATURE} | values
        merged["description"] = None
        return ArgsKwargs(given.args, merged) if isinstance(given, ArgsKwargs) else merged


@_checked
@dataclass(frozen=True, config=_STRICT)
class DetectConfig:
    """How the detector runs. The defaults are measured; BENCHMARKS.md has the figures."""

    score_threshold: Share = declare(0.25, "least confidence of a detection", identity="rows")
    iou_threshold: Share = declare(0.45, "boxes of one class that overlap more than this are one object", identity="rows")
    classes: ListOf[str] = declare((), "keep only these class names; default: all", identity="rows")
    max_detections: Count = declare(100, "most detections of one image", identity="rows")
    labels_per_box: Literal["best", "several"] = declare(
        "best",
        "best: a box has its best class; several: each class above score_threshold makes a detection, as Darknet and Ultralytics "
        "evaluate",
        identity="rows",
    )
    tiles: Annotated[int, Field(ge=64, le=MOST), NO_BOOL] | None = declare(
        None,
        "cut images larger than the model's input into overlapping squares of so many pixels, detect in each, and merge: for "
        "objects that are small in large photos; default: the model sees each image once",
        identity="rows",
    )
    tile_overlap: Annotated[float, Field(ge=0.0, le=0.8), NO_BOOL] = declare(
        _OF_TILES["tile_overlap"],
        "with tiles: the share of a tile that the next one shows, too; wider than most objects",
        identity="rows",
    )
    tile_whole: bool = declare(
        _OF_TILES["tile_whole"],
        "with tiles: the whole image is one more tile, for objects that are larger than a tile",
        identity="rows",
    )
    tile_merge: Literal["nms", "nmm"] = declare(
        _OF_TILES["tile_merge"],
        "with tiles: nms: of boxes of one class that overlap more than iou_threshold the surest stays, as within a tile; nmm: if "
        "they share more than this of the smaller one, they become one box around both, for objects that reach over tiles",
        identity="rows",
    )
    min_agreement: Share = declare(
        0.9, "reject a version whose detections match its golden images (assets.extra/golden) less than this; 0: no check"
    )
    canary_share: Share = declare(
        0.05, "fraction of images that also go to the version labelled canary in labels.json, always the same ones; 0: none"
    )
    engine: Engine = declare(AUTO, engine_help())
    precision: Literal["float32", "bfloat16", "float16", "int8"] = declare(
        "float32",
        "bfloat16: about twice as fast on CPUs with avx512_bf16 or AMX; float16: on GPUs; int8: with engine openvino, a version "
        "that detect-objects quantize wrote",
    )
    compiled: Literal["auto", "yes", "no"] = declare(
        "auto",
        "whether XLA compiles the model, with engine tensorflow; auto: on a GPU, unless float16 is asked of a model that has no "
        "float16 network; what XLA cannot compile runs as it is",
    )
    device: Device = declare(
        "auto", "auto, cpu, gpu or gpu:<number>; without a number each process takes the GPU with the fewest processes"
    )
    gpu_memory_mb: Annotated[int, Field(ge=64, le=MOST), NO_BOOL] | None = declare(
        None, "limit of the GPU memory; default: grow as needed"
    )
    batch_sizes: ListOf[Count] = declare(
        (), "allowed batch sizes, ascending; default: 1,2,4 on CPU, up to 32 on GPU, 1,8,32 compiled by XLA, 1,2,4,8 at a server"
    )
    batch_timeout_ms: Duration = declare(1.0, "longest wait of an image for its batch to fill")
    concurrent_batches: Threads | None = declare(
        None, "batches in flight; default: one more than cores, up to 4, on CPU; 3 on GPU"
    )
    intra_op_threads: Threads | None = declare(
        None, "threads inside one operation; default on CPU: cores divided by concurrent batches"
    )
    feeder_processes: Threads | None = declare(
        None, "processes that read, decode and fit images; default: one for each core that this process may use"
    )
    max_megapixels: Annotated[float, Field(ge=0.01, le=20_000), NO_BOOL] = declare(  # in one slot of memory that is shared
        100.0, "refuse larger images by their header; for JPEG, by the size after scaled decoding", identity="limits"
    )
    scaled_decode: bool = declare(
        True, "decode large JPEGs at 1/2, 1/4 or 1/8 if at least 1.5 times the model's input size remains"
    )
    memory_mb: Count | None = declare(
        None, "memory of a process in megabytes; images in flight shrink to fit; default: the container's limit, if it has one"
    )

    @field_validator("batch_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if sizes != tuple(sorted(set(sizes))):
            raise ValueError("expected ascending sizes such as [1, 2, 4, 8]")
        return sizes

    @model_validator(mode="after")
    def _with_tiles(self) -> DetectConfig:
        for name, default in _OF_TILES.items():
            if not self.tiles and getattr(self, name) != default:
                raise ValueError(f"{name} is for images in tiles; set tiles, too, such as 640")
        return self

    def without_tiles(self) -> DetectConfig:
        """The settings with which the model sees each image once."""
        return dataclasses.replace(self, tiles=None, **_OF_TILES)  # type: ignore[arg-type]


@_checked
@dataclass(frozen=True, config=_STRICT)
class ReadConfig:
    """How images are read."""

    read_threads: Threads | None = declare(
        None, "images read in parallel from storage, by all feeder processes together; default: 16, or 4 by each if that is more"
    )
    max_file_mb: Positive = declare(256.0, "refuse larger files before reading them", identity="limits")
    fps: Annotated[float, Field(ge=0.001, le=1000.0), NO_BOOL] = declare(
        1.0, "frames of a video that are read for each second of it; needs the extra video", applies="batch"
    )

    def threads_of(self, processes: int) -> int:
        """How many images so many feeder processes read in parallel, all together."""
        return self.read_threads or max(_READ_THREADS, _THREADS_OF_PROCESS * processes)

    @property
    def max_file_bytes(self) -> int:
        """Bytes of the largest file that is read."""
        return int(self.max_file_mb * 1e6)


@_checked
@dataclass(frozen=True, config=_STRICT)
class WriteConfig:
    """The outputs besides rows, summary and report."""

    shard_seconds: Duration = declare(
        30.0, "most seconds of rows in one file, in a stream at most 10; a killed job repeats at most these"
    )
    export: ListOf[ExportFormat] = declare(  # type: ignore[valid-type]
        (), "at the end, export the results in these formats too, as detect-objects export does at any time", applies="batch"
    )
    samples: Annotated[int, Field(ge=0, le=MOST), NO_BOOL] = declare(0, "write this many annotated images under samples/")

    @property
    def window_s(self) -> float:
        """Seconds of rows in one shard of a stream, 1 to 10: acknowledgements wait for its end."""
        return min(max(self.shard_seconds, 1.0), 10.0)


@_checked
@dataclass(frozen=True, config=_STRICT)
class StreamConfig:
    """The settings of streaming jobs, whose input is a Pub/Sub subscription and whose output is the topic of the detections."""

    archive: Path = declare(
        "", "folder for the rows as files, as batch jobs write them, and for summary and report", applies="streaming"
    )
    dead_letter_topic: str = declare("", "topic for dead letters, which are also written to files", applies="streaming")
    answer_topic: str = declare("", "topic for one answer per request; default: no answers", applies="streaming")
    answer_deadline_s: Annotated[float, Field(ge=0.1, le=MOST), NO_BOOL] = declare(
        60.0, "longest time to a request's answer, which then names the missing images", applies="streaming"
    )
    allow_uri_prefix: ListOf[Path] = declare(
        (),
        "folders, each ending with a slash. Streams: the only folders whose images a message may name (default gs://). Batch: "
        "further folders for images named by dead letters and by manifests that a glob found",
    )
    deduplicate_s: Annotated[float, Field(ge=1.0, le=MOST), NO_BOOL] = declare(
        600.0, "seconds within which each generation of an image gets one result", applies="streaming"
    )


@_checked
@dataclass(frozen=True, config=_STRICT)
class MonitoringConfig:
    """What a job shows while it runs: logs, metrics, health and a live page; none of it changes its rows."""

    metrics_port: _Port | None = declare(
        None, "serve Prometheus metrics, /livez and /readyz on this port; 0: a free port, which is printed; default: none"
    )
    metrics_host: str = declare("0.0.0.0", "address on which they are served")  # noqa: S104  as exporters do; no image is named
    metrics_file: Path = declare(
        "",
        "local file that gets when the last run ended, when one succeeded, and its dead share, for the textfile collector of "
        "Prometheus' node_exporter; its name without .prom is the label schedule",
        applies="batch",
    )
    page_port: _Port | None = declare(
        None, "serve a live page for this machine's browser on this port; 0: a free port, which is printed; default: none"
    )
    stuck_after_s: Duration = declare(600.0, "end the job when work waits and nothing was done for so many seconds; 0: never")
    log_format: Literal["text", "json"] = declare("text", "lines for a person, or one JSON object a line for Cloud Logging")
    log_level: Literal["debug", "info", "warning", "error"] = declare(
        "warning", "least severity of log lines; error: also no progress"
    )
    notify: _Webhook = declare(SecretStr(""), "webhook URL that gets the summary as JSON when the job has ended")


@_checked
@dataclass(frozen=True, config=_STRICT)
class WorkerConfig:
    """The machines that Dataflow starts for `DetectObjects`; other steps run on machines without an accelerator."""

    accelerator: str = declare("", "devices of a detecting worker, as Dataflow writes them: type:NAME;count:1;…")


@_checked
@dataclass(frozen=True, config=_STRICT)
class Config:
    """One job."""

    input: ListOf[_Input] = declare(
        (),
        "images: files, folders, globs (with **), gs://, s3://, abfs://; "
        "manifests .txt .csv .jsonl; TFRecord shards, archives, videos; "
        "{date} or {date:%Y/%m/%d}, with any strftime directives, stands for each of --dates",
    )
    dates: _Text = declare(
        "",
        "the days of {date}: 2026-11-20, 2026-11-01..2026-11-20, today, yesterday, or 'last 7 days', up to yesterday; "
        "a day begins in this machine's time zone, which the environment variable TZ sets",
        validate_default=True,
        applies="batch",
    )
    output: Path = declare("", "folder for the results, local, gs://, s3:// or abfs://")
    mode: Literal["batch", "streaming"] = declare("batch", "batch: files in, files out; streaming: Pub/Sub in, Pub/Sub out")
    runner: str = declare(
        "DirectRunner", "DirectRunner (in this process), PrismRunner, FlinkRunner, PortableRunner, SparkRunner or DataflowRunner"
    )
    max_dead_share: Share = declare(
        0.5,
        "exit with 4 when a larger share of the images, of those that were tried or of all, has only a dead letter",
        applies="batch",
    )
    allow_empty: bool = declare(False, "accept an input that names no image", applies="batch")
    when_busy: Literal["wait", "skip", "stop"] = declare(
        "wait",
        "if another run is processing the same images: wait for up to an hour, skip (exit code 0; 3 where that run has written "
        "nothing for six hours), or stop (exit code 3)",
        applies="batch",
    )
    again: bool = declare(False, "detect images that are done again, too; the newest row of an image counts", applies="batch")
    retry_dead: Annotated[bool, Strict()] | SomePath = declare(
        False,
        "retry failed images: the input is the dead letters of the output, or of the results folder that it names",
        applies="batch",
    )
    beam_options: Mapping[str, _BeamOption] = Field(
        default_factory=dict, description="options of Beam and its runners, by their flag's name"
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    detect: DetectConfig = Field(default_factory=DetectConfig)
    read: ReadConfig = Field(default_factory=ReadConfig)
    write: WriteConfig = Field(default_factory=WriteConfig)
    stream: StreamConfig = Field(default_factory=StreamConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)

    @field_validator("dates")
    @classmethod
    def _settled(cls, text: str, before: ValidationInfo) -> str:
        """Resolves `yesterday` once, so that all parts of the job agree, even after midnight."""
        if "input" not in before.data:  # it has an error of its own
            return text
        resolved = days.resolve_dates(text, datetime.date.today()) if text else ""
        days.check_use(before.data["input"], resolved)
        return resolved

    @property
    def replayed(self) -> str:
        """The results folder whose dead letters are tried again; empty: none."""
        return self.output if self.retry_dead is True else (self.retry_dead or "").rstrip("/")

    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Each input, with its patterns: itself, or one or more for each of the days."""
        if not self.dates:
            return {pattern: (pattern,) for pattern in self.input}
        return {pattern: days.dated(pattern, days.days_of(self.dates)) for pattern in self.input}

    def all_patterns(self) -> list[str]:
        """The patterns of all inputs."""
        return [pattern for patterns in self.patterns().values() for pattern in patterns]

    def as_dict(self) -> dict[str, Any]:
        """The settings as nested dicts and lists, with secrets masked."""
        plain: dict[str, Any] = without_secrets(TypeAdapter(Config).dump_python(self, mode="json"))
        return {**plain, "beam_options": masked_options(plain["beam_options"])}

    def of_steps(self) -> Config:
        """The settings that steps take to their workers: none of the launcher alone, which may be secret."""
        return dataclasses.replace(self, monitoring=MonitoringConfig(), beam_options={})


@functools.cache
def settings() -> tuple[Setting, ...]:
    """All settings, in the order of their declaration."""
    schema = TypeAdapter(Config).json_schema(mode="serialization")
    return tuple(settings_in(schema["properties"], schema["$defs"]))
