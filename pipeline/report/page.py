"""`report.html`: what a run did, on one page that needs nothing else and runs nothing.

    render_report(summary, samples, dead_letters) -> HTML

The page is `page.html`, a Jinja2 template; here stands what fills it. It has no script and loads nothing: style, charts and
pictures stand in it, and its Content-Security-Policy forbids the rest. File names, class names, messages and settings are shown
as text, whatever stands in them: the environment escapes every value, and only the style sheet is taken as it is.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import hashlib
import importlib.resources
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.config import Config
from pipeline.failures import REASONS
from pipeline.records import DetectedImage
from pipeline.report.annotate import annotate, class_colour
from pipeline.report.charts import throughput_curve
from pipeline.report.formats import MISSING, counted, duration, moment, number, readable, setting

_SHOWN_CLASSES = 30
_SHOWN_LETTERS = 20  # per reason; all of them are in dead_letters/*.jsonl
_SHOWN_DETECTIONS = 30  # per sample
_STAGES = ("read", "decode", "model", "predict", "postprocess")  # in the order of the data; others come after them
_LATENCIES = {"event_to_publish_ms": "event-to-publish", "latency_ms": "in-hand-to-result"}
_LATENCY_NAMES = {"p50": "median", "p90": "90 %", "p99": "99 %", "max": "slowest"}

Bar = tuple[str, float | None, str, str]  # name, share of the longest, figure, note beside it


def render_report(summary: Mapping[str, Any], samples: Sequence[DetectedImage], dead_letters: Sequence[Mapping[str, Any]]) -> str:
    """Renders the report page.

    Args:
      summary: The content of `summary.json`; a key that is missing leaves out what it would show.
      samples: Results to show as pictures; those without a thumbnail get a placeholder.
      dead_letters: Rows as in `dead_letters/*.jsonl`, all or examples of each reason.

    Returns:
      A complete HTML document, to be written as UTF-8.
    """
    unit = "messages" if summary.get("mode") == "streaming" else "images"
    model, sizes = summary.get("model") or {}, _batch_sizes(summary)
    changed, unchanged = _settings(summary.get("config"))
    return (
        environment()
        .get_template("page.html")
        .render(
            **page_style(),
            unit=unit,
            model=" ".join(str(model[key]) for key in ("name", "version") if model.get(key)),
            **{key: summary.get(key) for key in ("started_at", "finished_at", "wall_seconds", "command")},
            **_account(summary, unit),
            mode=summary.get("mode", "batch"),
            facts=_facts(summary, unit),
            reasons=_reasons(summary, dead_letters),
            samples=[_Sample.of(image) for image in samples],
            **_classes(summary),
            throughput=_throughput(summary, f"{unit}/s"),
            batches=_bars([(number(size), n, number(n), "") for size, n in sorted(sizes.items())]),
            calls=counted(sum(sizes.values()), "batch", "batches"),
            stages=_stages(summary),
            latencies=_latencies(summary),
            canary=_canary(summary),
            model_settings=list(_flatten(model)),
            changed=changed,
            unchanged=unchanged,
        )
    )


def page_style() -> dict[str, str]:
    """The style sheet, and the policy that allows no other and no script: what each page has in its head."""
    css = importlib.resources.files("pipeline.report").joinpath("report.css").read_text(encoding="utf-8")
    style_hash = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'"
    return {"css": Markup(css), "policy": policy}  # noqa: S704  the project's own


@functools.cache
def environment() -> jinja2.Environment:
    """The templates' environment: every value is made readable and escaped, and a name that is not filled is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.report", "."),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else readable(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"duration": duration, "moment": moment, "number": number, "setting": setting}
    return made


def _account(summary: Mapping[str, Any], unit: str) -> dict[str, Any]:
    """The sum that has to hold: read = detected + dead + skipped."""
    images = {name: int(_images(summary).get(name) or 0) for name in ("read", "detected", "dead", "skipped")}
    words = (f"{unit} read", "detected", "dead letters", "skipped")
    parts = list(images.items())[1:]
    return {
        "read": _images(summary).get("read"),
        "account": list(zip(images, ("", "=", "+", "+"), images.values(), words, strict=True)),
        "parts": parts,
        "adds_up": images["read"] == sum(amount for _, amount in parts),
    }


def _images(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    images: Mapping[str, Any] = summary.get("images") or {}
    return images


def _facts(summary: Mapping[str, Any], unit: str) -> list[tuple[str, str]]:
    found, detected, calls = summary.get("detections"), _images(summary).get("detected"), sum(_batch_sizes(summary).values())
    return [
        (f"{unit.capitalize()} per second", number(summary.get("images_per_second"), 1)),
        ("Wall time", duration(summary.get("wall_seconds"))),
        ("Start-up", duration(summary.get("startup_seconds"))),
        *([("Submission", duration(summary["submission_seconds"]))] if "submission_seconds" in summary else []),
        ("Detections", number(found)),
        ("Per image", number(found / detected if isinstance(found, int) and detected else None, 1)),
        ("Per model call", number(detected / calls if calls and detected else None, 1)),
    ]


@dataclasses.dataclass(frozen=True)
class _Sample:
    """What the page shows of one image."""

    name: str
    uri: str
    size: str
    told: str
    jpeg_base64: str
    detections: list[tuple[str, str, str, str]]
    more: int

    @staticmethod
    def of(image: DetectedImage) -> _Sample:
        found = image.detections
        classes = collections.Counter(found.class_names).most_common()
        told = ", ".join(f"{n} {name}" for name, n in classes[:6]) + (", …" if len(classes) > 6 else "")
        columns = (found.class_names, found.class_ids.tolist(), found.confidences.tolist(), found.boxes_xyxy.tolist())
        detections = [
            (name, "#{:02x}{:02x}{:02x}".format(*class_colour(class_id)), f"{confidence:.3f}", ", ".join(map(number, box)))
            for name, class_id, confidence, box in itertools.islice(zip(*columns, strict=True), _SHOWN_DETECTIONS)
        ]
        try:
            jpeg = annotate(image)
        except ValueError:
            jpeg = b""
        return _Sample(
            name=image.ref.uri.rstrip("/").rpartition("/")[2] or image.ref.uri,
            uri=image.ref.uri,
            size=f"{image.width} × {image.height}, {counted(len(found), 'detection')}",  # noqa: RUF001  a times sign
            told=told or "no objects",
            jpeg_base64=base64.b64encode(jpeg).decode("ascii"),
            detections=detections,
            more=len(found) - len(detections),
        )


def _classes(summary: Mapping[str, Any]) -> dict[str, Any]:
    classes = sorted(((str(name), int(n)) for name, n in (summary.get("classes") or {}).items()), key=lambda named: -named[1])
    rows = _bars([(name, n, number(n), "") for name, n in classes[:_SHOWN_CLASSES]])
    rest = classes[_SHOWN_CLASSES:]
    if rest:
        rows.append((counted(len(rest), "more class", "more classes"), None, number(sum(n for _, n in rest)), ""))
    return {"classes": rows, "classes_caption": f"{counted(len(classes), 'class', 'classes')} with detections"}


def _bars(rows: Sequence[tuple[str, float, str, str]]) -> list[Bar]:
    """Rows of a table with bars, from (name, length, figure, note)."""
    longest = max((length for _, length, _, _ in rows), default=0.0)
    return [(name, max(length / longest, 0.0) if longest > 0 else 0.0, figure, note) for name, length, figure, note in rows]


def _reasons(summary: Mapping[str, Any], dead_letters: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    letters: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for letter in dead_letters:
        letters[str(letter.get("reason", MISSING))].append(letter)
    numbers = {str(reason): int(n) for reason, n in (summary.get("dead_by_reason") or {}).items()}
    numbers |= {reason: len(examples) for reason, examples in letters.items() if reason not in numbers}
    most = max(numbers.values(), default=0) or 1
    return [
        {
            "name": reason,
            "number": n,
            "share": n / most,
            "stages": (stages := sorted({str(letter["stage"]) for letter in letters[reason] if letter.get("stage")})),
            "meaning": "; ".join(REASONS[stage][reason] for stage in stages if reason in REASONS.get(stage, ())).replace("`", ""),
            "examples": [
                ((letter.get("image") or {}).get("uri", MISSING), letter.get("stage", MISSING), letter.get("message", MISSING))
                for letter in letters[reason][:_SHOWN_LETTERS]
            ],
        }
        for reason, n in sorted(numbers.items(), key=lambda named: (-named[1], named[0]))
    ]


def _throughput(summary: Mapping[str, Any], unit: str) -> Any:
    points = summary.get("throughput")
    return throughput_curve(points, summary.get("throughput_interval_s"), unit) if points else None


def _batch_sizes(summary: Mapping[str, Any]) -> dict[int, int]:
    return {int(size): int(n) for size, n in (summary.get("batch_sizes") or {}).items() if int(n) > 0}


def _stages(summary: Mapping[str, Any]) -> list[Bar]:
    seconds = {str(name): float(value) for name, value in (summary.get("stage_seconds") or {}).items()}
    names = [name for name in _STAGES if name in seconds] + sorted(seconds.keys() - set(_STAGES))
    timed = _images(summary).get("detected") or 0  # only results carry their times: not what was skipped, or is dead
    each = {name: f", {duration(seconds[name] / timed)} each" if timed else "" for name in names}
    return _bars([(name, seconds[name], duration(seconds[name]), each[name]) for name in names])


def _latencies(summary: Mapping[str, Any]) -> list[Bar]:
    shares = [
        (f"{what}, {_LATENCY_NAMES.get(name, name)}", ms / 1000)
        for key, what in _LATENCIES.items()
        for name, ms in (summary.get(key) or {}).items()
        if number(ms) != MISSING
    ]
    return _bars([(name, seconds, duration(seconds), "") for name, seconds in shares])


def _canary(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """A canary beside the version in use, as rows of (what, its figure, the other's)."""
    canary = summary.get("canary")
    if not canary:
        return None
    times = [ms / 1000 if number(ms) != MISSING else None for ms in (canary.get("mean_ms"), canary.get("stable_mean_ms"))]
    return {
        **{key: canary.get(key) for key in ("version", "stable", "mode", "outcome", "why_no_images")},
        "rows": [
            ("Images", number(canary.get("images")), ""),
            ("Failed", number(canary.get("failure_rate"), 5), number(canary.get("stable_failure_rate"), 5)),
            ("Mean time in the model", *map(duration, times)),
            ("Agreement with the stable version", number(canary.get("agreement"), 5), ""),
            ("Shift of scores", number(canary.get("score_shift"), 5), ""),
            ("Left out, being behind", number(canary.get("left_out")), ""),
        ],
    }


def _settings(config: Any) -> tuple[list[tuple[str, list[tuple[str, Any]]]], list[tuple[str, Any]]]:
    """The settings that differ from their defaults, by section, and the others by dotted name."""
    defaults = dict(_flatten(Config().as_dict()))
    changed: dict[str, list[tuple[str, Any]]] = {"": []}
    unchanged = []
    for key, value in (config or {}).items():
        for name, leaf in _flatten({key: value}):
            if name in defaults and defaults[name] == leaf:
                unchanged.append((name, leaf))
            else:
                section, _, short = name.partition(".")
                changed.setdefault(section if short else "", []).append((short or name, leaf))
    return [(section, rows) for section, rows in changed.items() if rows], unchanged


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
