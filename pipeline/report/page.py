"""`report.html`: what a run did, on one page without scripts, which loads nothing.

The page is `page.html`, a Jinja2 template, which this module fills. Style, charts and pictures are part of the page, and its
Content-Security-Policy forbids everything else. File names, class names, messages and settings may hold any text: the environment
escapes every value except the style sheet.
"""

from __future__ import annotations

import base64
import collections
import contextlib
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
from pipeline.report.charts import Curve, latency_curve, throughput_curve
from pipeline.report.formats import MISSING, counted, duration, link, moment, number, readable, setting

_SHOWN_CLASSES = 30
_SHOWN_LETTERS = 20  # per reason; all of them are in dead_letters/*.jsonl
_SHOWN_DETECTIONS = 30  # per sample
_STAGES = ("read", "decode", "model", "predict", "postprocess")  # in the order of the data; others come after them
_LATENCIES = {"event_to_publish_ms": "event-to-publish", "latency_ms": "in-hand-to-result"}
_OVER_TIME = {
    "event_to_publish_ms": "event-to-publish, slowest of an interval",
    "backlog_age_ms": "Age of the oldest message read",
}
_LATENCY_NAMES = {"p50": "median", "p90": "90 %", "p99": "99 %", "max": "slowest"}
_MAPPINGS = ("images", "model", "batch_sizes", "dead_by_reason", "classes", "stage_seconds", "config", *_LATENCIES)
_SHOWN_AS_THEY_ARE = ("started_at", "finished_at", "wall_seconds", "command", "warnings")

Bar = tuple[str, float | None, str, str]  # name, share of the longest, figure, note beside it
PlacedBar = tuple[float, float, float, str]  # of a histogram: left edge and heights of two parts in percent, text
Picture = tuple[str, DetectedImage]  # its title, a result


def render_report(
    summary: Mapping[str, Any],
    samples: Sequence[Picture],
    dead_letters: Sequence[Mapping[str, Any]],
    disagreements: Sequence[Picture] = (),
) -> str:
    """Renders the report page.

    Args:
      summary: The content of `summary.json`; the page leaves out what a missing key would show.
      samples: Results to show as pictures, each with its purpose; one without a thumbnail gets a placeholder.
      dead_letters: Rows as in `dead_letters/*.jsonl`, all or examples of each reason.
      disagreements: Images on which the canary and the version in use differ, each twice: one result after the other.

    Returns:
      A complete HTML document, to be written as UTF-8.
    """
    values = report_values(summary, samples, dead_letters, disagreements)
    return environment().get_template("page.html").render(**page_style(), **values)


def report_values(
    summary: Mapping[str, Any],
    samples: Sequence[Picture],
    dead_letters: Sequence[Mapping[str, Any]],
    disagreements: Sequence[Picture] = (),
) -> dict[str, Any]:
    """The values that `page.html` shows.

    Args:
      summary: The content of `summary.json`; the page leaves out what a missing key would show.
      samples: Results to show.
      dead_letters: Rows as in `dead_letters/*.jsonl`, all or examples of each reason.
      disagreements: See `render_report`.
    """
    summary = {**summary, **{key: summary.get(key) or {} for key in _MAPPINGS}}
    unit = "messages" if summary.get("mode") == "streaming" else "images"
    model = summary["model"]
    sizes = {int(size): int(n) for size, n in summary["batch_sizes"].items() if int(n) > 0}
    points = summary.get("throughput")
    changed, unchanged = _settings(summary["config"])
    return {
        "unit": unit,
        "model": " ".join(str(model[key]) for key in ("name", "version") if model.get(key)),
        **{key: summary.get(key) for key in _SHOWN_AS_THEY_ARE},
        **_account(summary["images"], unit),
        "mode": summary.get("mode", "batch"),
        "facts": _facts(summary, unit, sum(sizes.values())),
        "reasons": _reasons(summary["dead_by_reason"], dead_letters),
        "samples": [_sample(*picture) for picture in samples],
        **_classes(summary["classes"]),
        **_confidences(summary),
        "throughput": throughput_curve(points, summary.get("throughput_interval_s"), f"{unit}/s") if points else None,
        "over_time": _over_time(summary.get("over_time")),
        "batches": _bars([(number(size), n, number(n), "") for size, n in sorted(sizes.items())]),
        "calls": counted(sum(sizes.values()), "batch", "batches"),
        "stages": _stages(summary["stage_seconds"], summary["images"].get("detected")),
        "latencies": _latencies(summary),
        "canary": _canary(summary.get("canary")),
        "disagreements": [_sample(*picture) for picture in disagreements],
        "model_settings": list(_flatten(model)),
        "changed": changed,
        "unchanged": unchanged,
    }


@functools.cache
def page_style(*more: str) -> dict[str, str]:
    """The style of a page, and the Content-Security-Policy that allows only it.

    Args:
      more: Style sheets behind the one of all pages.
    """
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
        finalize=lambda value: value if isinstance(value, Markup) else readable(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"duration": duration, "moment": moment, "number": number, "setting": setting}
    return made


def _account(images: Mapping[str, Any], unit: str) -> dict[str, Any]:
    """The equation that has to hold: read = detected + dead + skipped."""
    amounts = {name: int(images.get(name) or 0) for name in ("read", "detected", "dead", "skipped")}
    words = (f"{unit} read", "detected", "dead letters", "skipped")
    parts = list(amounts.items())[1:]
    return {
        "read": images.get("read"),
        "account": list(zip(amounts, ("", "=", "+", "+"), amounts.values(), words, strict=True)),
        "parts": parts,
        "adds_up": amounts["read"] == sum(amount for _, amount in parts),
    }


def _facts(summary: Mapping[str, Any], unit: str, calls: int) -> list[tuple[str, str]]:
    found, detected = summary.get("detections"), summary["images"].get("detected")
    return [
        (f"{unit.capitalize()} per second", number(summary.get("images_per_second"), 1)),
        ("Wall time", duration(summary.get("wall_seconds"))),
        ("Start-up", duration(summary.get("startup_seconds"))),
        *([("Submission", duration(summary["submission_seconds"]))] if "submission_seconds" in summary else []),
        ("Detections", number(found)),
        ("Per image", number(found / detected if isinstance(found, int) and detected else None, 1)),
        ("Per model call", number(detected / calls if calls and detected else None, 1)),
    ]


def _inline(image: DetectedImage) -> str:
    """The annotated picture as a `data:` URL; empty where there is none."""
    with contextlib.suppress(ValueError):
        return "data:image/jpeg;base64," + base64.b64encode(annotate(image)).decode("ascii")
    return ""


def _sample(purpose: str, image: DetectedImage) -> dict[str, Any]:
    """What the page shows of one image."""
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
        "url": _inline(image),
        "detections": detections,
        "more": len(found) - len(detections),
    }


def _classes(classes: Mapping[str, int]) -> dict[str, Any]:
    ordered = sorted(classes.items(), key=lambda named: -named[1])
    rows = _bars([(name, n, number(n), "") for name, n in ordered[:_SHOWN_CLASSES]])
    if rest := ordered[_SHOWN_CLASSES:]:
        rows.append((counted(len(rest), "more class", "more classes"), None, number(sum(n for _, n in rest)), ""))
    return {"classes": rows, "classes_caption": f"{counted(len(ordered), 'class', 'classes')} with detections"}


def _bars(rows: Sequence[tuple[str, float, str, str]]) -> list[Bar]:
    """Rows of a table with bars, from (name, length, figure, note)."""
    longest = max((length for _, length, _, _ in rows), default=0.0)
    return [(name, max(length / longest, 0.0) if longest > 0 else 0.0, figure, note) for name, length, figure, note in rows]


def _reasons(dead_by_reason: Mapping[str, int], dead_letters: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    letters: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for letter in dead_letters:
        letters[str(letter.get("reason", MISSING))].append(letter)
    numbers = {reason: len(examples) for reason, examples in letters.items()} | dict(dead_by_reason)
    most = max(numbers.values(), default=0) or 1
    return [
        {
            "name": reason,
            "number": n,
            "share": n / most,
            "stages": (stages := sorted({str(letter["stage"]) for letter in letters[reason] if letter.get("stage")})),
            "meaning": "; ".join(REASONS[stage][reason] for stage in stages if reason in REASONS.get(stage, ())).replace("`", ""),
            "examples": [
                (
                    (letter.get("image") or {}).get("uri", MISSING),
                    letter.get("stage", MISSING),
                    letter.get("message", MISSING),
                    letter.get("thumbnail_base64"),
                )
                for letter in letters[reason][:_SHOWN_LETTERS]
            ],
        }
        for reason, n in sorted(numbers.items(), key=lambda named: (-named[1], named[0]))
    ]


def _stages(seconds: Mapping[str, float], detected: int | None) -> list[Bar]:
    """Time by stage, in all and for each detected image: skipped and failed images have no times."""
    names = [name for name in _STAGES if name in seconds] + sorted(seconds.keys() - set(_STAGES))
    each = {name: f"{duration(seconds[name] / detected)} each" for name in names} if detected else {}
    return _bars([(name, seconds[name], duration(seconds[name]), each.get(name, "")) for name in names])


def _latencies(summary: Mapping[str, Any]) -> list[Bar]:
    return _bars(
        [
            (f"{what}, {_LATENCY_NAMES.get(name, name)}", ms / 1000, duration(ms / 1000), "")
            for key, what in _LATENCIES.items()
            for name, ms in summary[key].items()
            if number(ms) != MISSING
        ]
    )


def _confidences(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The histograms of confidence, of all classes and of the most frequent ones; left out if the summary has none."""
    found, threshold = summary.get("confidences"), (summary["config"].get("detect") or {}).get("score_threshold")
    shown = threshold is not None and number(threshold) != MISSING
    by_class = [(name, _histogram(bins)) for name, bins in found["by_class"].items()] if found else []
    return {
        "confidences": {"all": _histogram(found["all"]), "by_class": by_class} if found else None,
        "threshold": f"{threshold:g}" if shown else "",
        "threshold_at": 100 * float(str(threshold)) if shown else None,
    }


def _histogram(bins: Sequence[int]) -> dict[str, Any]:
    """The bars that are not empty, the height of the tallest, and all in words."""
    width, top = 1 / len(bins), max(bins)
    bars: list[PlacedBar] = [
        (100 * n * width, 100 * amount / top, 0.0, f"confidence {n * width:.2f} to {(n + 1) * width:.2f}: {number(amount)}")
        for n, amount in enumerate(bins)
        if amount
    ]
    return {"bars": bars, "peak": number(top), "total": counted(sum(bins), "detection")}


def _canary(canary: Any) -> dict[str, Any] | None:
    """A canary and the version in use, as rows of (name, the canary's figure, the other's, what it means)."""
    if not canary:
        return None
    percent = {name: f"{100 * share:.1f} %" for name, share in canary.items() if number(share) != MISSING}
    times = [ms / 1000 if number(ms) != MISSING else None for ms in (canary.get("mean_ms"), canary.get("stable_mean_ms"))]
    failed = [percent.get(key, MISSING) for key in ("failure_rate", "stable_failure_rate")]
    same, shift = percent.get("agreement", MISSING), number(canary.get("score_shift"), 3)
    return {
        **{key: canary.get(key) for key in ("version", "stable", "why_no_images")},
        "rows": [
            ("Images", number(canary.get("images")), "", "that the canary received"),
            ("Failed", *failed, "of the images of each version"),
            ("Mean time in the model", *map(duration, times), "for an image"),
            ("Same objects", same, "", "of all objects of both versions, those that both find"),
            ("Change of confidence", shift, "", "mean, for an object that both find; from -1 to 1"),
            ("Skipped", number(canary.get("skipped")), "", "images of its share that came while it was behind"),
        ],
    }


def _over_time(summary: Any) -> list[tuple[str, Curve]]:
    """The curves of a stream's latencies and backlog, each with its name."""
    found = summary if isinstance(summary, Mapping) else {}
    shown = ((name, found.get(key)) for key, name in _OVER_TIME.items())
    curves = [(name, latency_curve(each["points"], each["interval_s"])) for name, each in shown if each and each["points"]]
    return [(name, curve) for name, curve in curves if curve]


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
