"""`report.html`: what a run did, on one page without scripts, which loads nothing.

The page is `page.html`, a Jinja2 template, which this module fills. Style, charts and pictures are part of the page, and its
Content-Security-Policy forbids everything else. File names, class names, messages and settings may hold any text: the environment
escapes every value except the style sheet.
"""

from __future__ import annotations

import base64
import collections
import functools
import hashlib
import importlib.resources
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from pipeline.config import Config
from pipeline.failures import REASONS
from pipeline.log_lines import printable
from pipeline.records import DeadLetter, DetectedImage
from pipeline.report.annotate import class_colour, picture
from pipeline.report.charts import Bar, bars, line_over_time
from pipeline.report.texts import breakable, counted, duration, link, number, share, yaml_value
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import confidences_of

_SHOWN_CLASSES = 30
_SHOWN_MODELS = 4
_SHOWN_LETTERS = 20  # per reason; all of them are in dead_letters/
_SHOWN_DETECTIONS = 30  # per sample
_STAGES = ("read", "decode", "model", "postprocess")  # in the order of the data
_LATENCIES = {"event_to_publish_ms": "event-to-publish", "latency_ms": "processing"}
_LATENCY_NAMES = {"p50": "median", "p90": "90 %", "p99": "99 %", "max": "slowest"}

Picture = tuple[str, DetectedImage]  # its title, a result


class Folder(NamedTuple):
    """What the page shows of a results folder.

    Attributes:
      output: The folder.
      stats: Of its current rows: `read`, `confidences`, `dead` and `dead_examples`.
      models: Images with a result by name and version of the model.
      samples: Results to show as pictures, each with its purpose.
      page_of_run: The page of the last run, relative to this one; empty if there is none.
      has_run: Whether a run has ended; without one the page is of the rows alone.
    """

    output: str
    stats: JobStats
    models: Mapping[tuple[str, str], int]
    samples: Sequence[Picture]
    page_of_run: str = ""
    has_run: bool = True


def render_report(
    summary: Mapping[str, Any],
    samples: Sequence[Picture],
    dead_examples: Mapping[str, Sequence[DeadLetter]],
    disagreements: Sequence[Picture] = (),
    *,
    live: Mapping[str, Any] | None = None,
    folder: Folder | None = None,
) -> str:
    """The report page as a complete HTML document.

    Args:
      summary: The result of `summarise`.
      samples: Results to show as pictures, each with its purpose; one without a thumbnail gets a placeholder.
      dead_examples: Dead letters of each reason, all or some.
      disagreements: Images on which the canary and the version in use differ, each twice: one result after the other.
      live: Further values of `live.html`, for a job that still runs, which also has images in flight.
      folder: Of a page of a whole results folder: what is in it. The run is its last one, with a section of its own.
    """
    images, unit = summary["images"], "messages" if summary["mode"] == "streaming" else "images"
    outcomes = [
        ("detected", "=", images["detected"], "detected"),
        ("dead", "+", images["dead"], "dead letters"),
        ("skipped", "+", images["skipped"], "skipped"),
    ]
    missing = images["read"] - sum(amount for _, _, amount, _ in outcomes)
    if live:
        outcomes.append(("left", "+", max(0, missing), "in flight"))
    changed, unchanged = _settings(summary["config"])
    values = {
        **{key: summary[key] for key in ("mode", "started_at", "finished_at", "command")},
        "unit": unit,
        "model": f"{summary['model']['name']} {summary['model']['version']}".strip(),
        "warnings": summary.get("warnings", ()),
        "account": [("read", "", images["read"], f"{unit} read"), *outcomes],
        "parts": [(name, amount / max(images["read"], 1)) for name, _, amount, _ in outcomes],
        "adds_up": live or not missing,
        "facts": _facts(summary, unit),
        "reasons": _reasons(summary["dead_by_reason"], dead_examples),
        "samples": [_sample(*picture) for picture in samples],
        **_charts(summary, unit),
        "canary": summary.get("canary"),
        "disagreements": [_sample(*picture) for picture in disagreements],
        "model_settings": list(_flatten(summary["model"])),
        "changed": changed,
        "unchanged": unchanged,
        **(live or {}),
        "folder": None,
    }
    if folder:
        values |= _of_folder(folder, values)
    return environment().get_template("live.html" if live else "page.html").render(**page_style(), **values)


def _of_folder(folder: Folder, run: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the page of a folder that differ from those of its last run."""
    stats, detected = folder.stats, sum(folder.models.values())
    account = [("detected", "=", detected, "with a result"), ("dead", "+", stats.failed, "dead letters")]
    total, found = max(stats.read, 1), stats.confidences.total()
    names = [f"{name} {version}".strip() for name, version in folder.models]
    last = ("model", "mode", "started_at", "finished_at", "account", "parts", "adds_up", "facts", "warnings", "unit")
    confidences = confidences_of(stats)
    return {
        "folder": {"name": folder.output, "last": folder.has_run and {key: run[key] for key in last}, "page": folder.page_of_run},
        "unit": "images",
        "model": ", ".join(sorted(names)[:_SHOWN_MODELS]) + ", …" * (len(names) > _SHOWN_MODELS),
        "account": [("read", "", stats.read, "image with a row" if stats.read == 1 else "images with a row"), *account],
        "parts": [(name, amount / total) for name, _, amount, _ in account],
        "adds_up": True,
        "warnings": (),
        "facts": [("Detections", number(found)), ("Per image", number(found / detected if detected else None, 1))],
        "reasons": _reasons(dict(stats.dead_by_reason.most_common()), stats.dead_examples),
        "samples": [_sample(*picture) for picture in folder.samples],
        "classes": _classes(stats.classes, confidences["by_class"]),
        "classes_caption": f"{counted(len(stats.classes), 'class', 'classes')} with detections",
        "confidences": _confidences(confidences["all"]),
        **({} if folder.has_run else {"model_settings": [], "changed": [], "unchanged": []}),
    }


@functools.cache
def page_style(*more: str) -> dict[str, str]:
    """The style of a page, and the Content-Security-Policy that allows only it."""
    own = importlib.resources.files("pipeline.report")
    css = "".join(own.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", *more))
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return {"css": Markup(css), "policy": policy}  # noqa: S704  the project's own


@functools.cache
def environment() -> jinja2.Environment:
    """The templates' environment: it makes every value readable and escapes it; an undefined name is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.report", "."),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"breakable": breakable, "duration": duration, "number": number, "share": share, "yaml_value": yaml_value}
    return made


def _facts(summary: Mapping[str, Any], unit: str) -> list[tuple[str, str]]:
    found, detected = summary["detections"], summary["images"]["detected"]
    calls = sum(summary["batch_sizes"].values())
    return [
        (f"{unit.capitalize()} per second", number(summary["images_per_second"], 1)),
        ("Wall time", duration(summary["wall_seconds"])),
        ("Start-up", duration(summary["startup_seconds"])),
        *([("Submission", duration(summary["submission_seconds"]))] if "submission_seconds" in summary else []),
        ("Detections", number(found)),
        ("Per image", number(found / detected if detected else None, 1)),
        ("Per model call", number(detected / calls if calls else None, 1)),
    ]


def _charts(summary: Mapping[str, Any], unit: str) -> dict[str, Any]:
    """Rows of the tables with bars, and the arguments of the lines over time."""
    detected, batches = summary["images"]["detected"], summary["batch_sizes"]
    seconds = {stage: summary["stage_seconds"][stage] for stage in _STAGES if stage in summary["stage_seconds"]}
    latencies = [
        (f"{what}, {_LATENCY_NAMES[name]}", ms / 1000, duration(ms / 1000), "")
        for key, what in _LATENCIES.items()
        for name, ms in summary.get(key, {}).items()
    ]
    slowest = summary.get("over_time", {}).get("event_to_publish_ms")
    return {
        "classes": _classes(summary["classes"], summary["confidences"]["by_class"]),
        "classes_caption": f"{counted(len(summary['classes']), 'class', 'classes')} with detections",
        "confidences": _confidences(summary["confidences"]["all"]),
        "threshold": (summary["config"].get("detect") or {}).get("score_threshold"),
        "throughput": line_over_time(summary["throughput"], summary["throughput_interval_s"], f"{unit}/s"),
        "slowest": slowest and line_over_time(slowest["points"], slowest["interval_s"], "s", slowest=True),
        "batches": bars([(number(int(size)), n, number(n), "") for size, n in batches.items()]),
        "calls": counted(sum(batches.values()), "batch", "batches"),
        "stages": bars(
            [(name, s, duration(s), f"{duration(s / detected)} each" if detected else "") for name, s in seconds.items()]
        ),
        "wall_seconds": summary["wall_seconds"],
        "latencies": bars(latencies),
    }


def jpeg_url(jpeg: bytes) -> str:
    """A picture as a `data:` URL; empty where there is none."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode("ascii") if jpeg else ""


def _sample(purpose: str, image: DetectedImage) -> dict[str, Any]:
    found, uri = image.detections, image.ref.uri
    classes = collections.Counter(found.class_names).most_common()
    names = ", ".join(f"{n} {name}" for name, n in classes[:6]) + (", …" if len(classes) > 6 else "")
    columns = (found.class_names, found.class_ids.tolist(), found.confidences.tolist(), found.boxes_xyxy.tolist())
    detections = [
        (name, "#{:02x}{:02x}{:02x}".format(*class_colour(class_id)), f"{confidence:.3f}", ", ".join(map(number, box)))
        for name, class_id, confidence, box in itertools.islice(zip(*columns, strict=True), _SHOWN_DETECTIONS)
    ]
    return {
        "name": uri.rstrip("/").rpartition("/")[2] or uri,
        "purpose": purpose[:1].upper() + purpose[1:],
        "uri": uri,
        "link": link(uri),
        "size": f"{image.width} × {image.height}, {counted(len(found), 'detection')}",  # noqa: RUF001  a times sign
        "content": names or "no objects",
        "url": jpeg_url(picture(image)),
        "detections": detections,
        "more": len(found) - len(detections),
    }


def _classes(classes: Mapping[str, int], bins: Mapping[str, Sequence[int]]) -> list[Bar]:
    """The most frequent classes, some with their median confidence, and the sum of the others."""
    ordered = sorted(classes.items(), key=lambda named: -named[1])
    shown = [(name, n, number(n), _median(bins[name]) if name in bins else "") for name, n in ordered[:_SHOWN_CLASSES]]
    rows = bars(shown)
    if rest := ordered[_SHOWN_CLASSES:]:
        rows.append((counted(len(rest), "more class", "more classes"), [], number(sum(n for _, n in rest)), ""))
    return rows


def _median(bins: Sequence[int]) -> str:
    """The bin of the median confidence, in words."""
    middle = next(n for n, below in enumerate(itertools.accumulate(bins)) if 2 * below >= sum(bins))
    return f"median about {(middle + 0.5) / len(bins):.2f}"


def _confidences(bins: Sequence[int]) -> list[Bar]:
    """Rows of two bins each, the highest first, down to the lowest with a detection."""
    pairs = [(place / len(bins), sum(bins[place : place + 2])) for place in range(0, len(bins), 2)]
    lowest = next((n for n, (_, amount) in enumerate(pairs) if amount), len(pairs))
    width = 2 / len(bins)
    return bars([(f"{start:.1f} to {start + width:.1f}", n, number(n), "") for start, n in reversed(pairs[lowest:])])


def _reasons(dead_by_reason: Mapping[str, int], dead_examples: Mapping[str, Sequence[DeadLetter]]) -> list[dict[str, Any]]:
    """What the page shows of each reason, the most frequent first."""
    reasons = []
    for reason, parts, amount, _ in bars([(reason, n, number(n), "") for reason, n in dead_by_reason.items()]):
        letters = dead_examples.get(reason, ())
        stages = sorted({letter.stage for letter in letters})
        meanings = [REASONS[stage][reason] for stage in stages if reason in REASONS.get(stage, ())]
        reasons.append(
            {
                "name": reason,
                "number": amount,
                "bar": parts,
                "stages": stages,
                "meaning": "; ".join(meanings).replace("`", ""),
                "examples": [(letter, jpeg_url(letter.thumbnail)) for letter in letters[:_SHOWN_LETTERS]],
            }
        )
    return reasons


def _settings(config: Mapping[str, Any]) -> tuple[list[tuple[str, list[tuple[str, Any]]]], list[tuple[str, Any]]]:
    """The settings that differ from their defaults, by section, and the others by dotted name."""
    defaults = dict(_flatten(Config().as_dict()))
    changed: dict[str, list[tuple[str, Any]]] = {"": []}
    unchanged = []
    for key, value in config.items():
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
