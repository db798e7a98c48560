"""`report.html`: what a run did, on one page that needs nothing else and runs nothing.

    render_report(summary, samples, dead_letters) -> HTML

The page has no script and loads nothing: style, charts and pictures stand in it, and its Content-Security-Policy forbids the
rest. File names, class names, messages and settings are shown as text, whatever stands in them (`pipeline.report.markup`).
"""

from __future__ import annotations

import base64
import collections
import hashlib
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.records import DetectedImage
from pipeline.report.annotate import annotate
from pipeline.report.charts import bar_table, column_chart, share_bar, throughput_chart
from pipeline.report.markup import MISSING, Markup, count, duration, join, moment, stylesheet, tag, text

_SHOWN_CLASSES = 30
_SHOWN_LETTERS = 20  # per reason; all of them are in dead_letters/*.jsonl
_SHOWN_DETECTIONS = 30  # per sample
_STAGES = ("read", "decode", "model", "predict", "postprocess")  # in the order of the data; others come after them
_LATENCY_NAMES = {"p50": "median", "p90": "90 %", "p99": "99 %", "max": "slowest"}


def render_report(summary: Mapping[str, Any], samples: Sequence[DetectedImage], dead_letters: Sequence[Mapping[str, Any]]) -> str:
    """Renders the report page.

    Args:
      summary: The content of `summary.json`; a key that is missing leaves out what it would show.
      samples: Results to show as pictures; those without a thumbnail get a placeholder.
      dead_letters: Rows as in `dead_letters/*.jsonl`, all or examples of each reason.

    Returns:
      A complete HTML document, to be written as UTF-8.
    """
    css = importlib.resources.files("pipeline.report").joinpath("report.css").read_text(encoding="utf-8")
    style_hash = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'"
    unit = "messages" if summary.get("mode") == "streaming" else "images"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Detection report: {count(_images(summary).get('read'))} {unit}"),
        stylesheet(css),
    )
    main = tag(
        "main",
        _opening(summary, unit),
        _samples_section(samples),
        _classes_section(summary),
        _dead_letters_section(summary, dead_letters),
        _throughput_section(summary, unit),
        _batches_section(summary),
        _stages_section(summary, unit),
        _latency_section(summary, unit),
        _settings_section("Model", summary.get("model")),
        _settings_section("Configuration", summary.get("config")),
        _command_section(summary),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', main), lang='en')}\n"


def _images(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    counts: Mapping[str, Any] = summary.get("images") or {}
    return counts


def _section(title: str, content: Markup, note: str | None = None) -> Markup:
    return tag("section", tag("header", tag("h2", title), note and tag("p", note, class_="quiet")), tag("div", content))


def _opening(summary: Mapping[str, Any], unit: str) -> Markup:
    model = summary.get("model") or {}
    name = " ".join(str(model[key]) for key in ("name", "version") if model.get(key))
    started, finished = summary.get("started_at"), summary.get("finished_at")
    lead = join(
        tag("b", name or "Unnamed model"),
        ", ",
        summary.get("mode", "batch"),
        f", {moment(started)} to {moment(finished)}" if started else "",
    )
    found, detected = summary.get("detections"), _images(summary).get("detected")
    sizes = _batch_sizes(summary)
    per_image = found / detected if isinstance(found, int) and detected else None
    per_call = detected / sum(sizes.values()) if sizes and detected else None
    facts = [
        (f"{unit.capitalize()} per second", count(summary.get("images_per_second"), 1)),
        ("Wall time", duration(summary.get("wall_seconds"))),
        ("Start-up", duration(summary.get("startup_seconds"))),
        ("Detections", count(found)),
        ("Per image", count(per_image, 1)),
        ("Per model call", count(per_call, 1)),
    ]
    listed = join(*(tag("div", tag("dt", term), tag("dd", figure)) for term, figure in facts))
    return join(
        tag("h1", "Detection report"), tag("p", lead, class_="lead"), _account(summary, unit), tag("dl", listed, class_="facts")
    )


def _account(summary: Mapping[str, Any], unit: str) -> Markup:
    """The sum that has to hold: read = detected + dead + skipped."""
    amounts = {name: int(_images(summary).get(name) or 0) for name in ("read", "detected", "dead", "skipped")}
    names = {"read": f"{unit} read", "detected": "detected", "dead": "dead letters", "skipped": "skipped"}
    terms = []
    for (name, amount), sign in zip(amounts.items(), (None, "=", "+", "+"), strict=True):
        term = tag(
            "span", tag("b", count(amount)), tag("span", names[name], class_="name"), class_=f"{name} some" if amount else name
        )
        terms.append(tag("li", sign and tag("span", sign, class_="sign"), term))
    read, *parts = amounts.values()
    warning = None
    if sum(parts) != read:
        warning = tag(
            "p",
            f"These counts do not add up: {count(read)} read, {count(sum(parts))} accounted for.",
            class_="warning",
            role="alert",
        )
    return join(tag("ul", join(*terms), class_="sum"), share_bar(list(amounts.items())[1:]), warning)


def _samples_section(samples: Sequence[DetectedImage]) -> Markup:
    if not samples:
        return _section("Samples", tag("p", "No sample pictures were kept.", class_="quiet"))
    note = "Boxes as detected, the label's number is the confidence. Select a picture to enlarge it and list its detections."
    return _section("Samples", tag("div", join(*map(_sample, samples)), class_="gallery"), note)


def _sample(image: DetectedImage) -> Markup:
    found = image.detections
    tally = collections.Counter(found.class_names).most_common()
    told = ", ".join(f"{n} {name}" for name, n in tally[:6]) + (", …" if len(tally) > 6 else "") if tally else "no objects"
    file_name = image.ref.uri.rstrip("/").rpartition("/")[2] or image.ref.uri
    try:
        source = "data:image/jpeg;base64," + base64.b64encode(annotate(image)).decode("ascii")
        picture = tag("img", src=source, alt=f"{file_name}: {told}", loading="lazy")
    except ValueError:
        picture = tag("span", "no picture kept")
    size = f"{image.width} × {image.height}, {count(len(found))} detection{'' if len(found) == 1 else 's'}"  # noqa: RUF001 - a times sign
    caption = tag("span", tag("span", file_name, class_="name"), tag("span", size, class_="quiet"), class_="caption")
    rows = []
    for name, confidence, box in list(zip(found.class_names, found.confidences.tolist(), found.boxes_xyxy.tolist(), strict=True))[
        :_SHOWN_DETECTIONS
    ]:
        edges = ", ".join(count(edge) for edge in box)
        rows.append(
            tag("tr", tag("td", name), tag("td", f"{confidence:.3f}", class_="figure"), tag("td", edges, class_="figure"))
        )
    headings = tag(
        "tr",
        tag("th", "Class", scope="col"),
        tag("th", "Confidence", scope="col", class_="figure"),
        tag("th", "Box x0, y0, x1, y1", scope="col", class_="figure"),
    )
    table = tag("table", tag("thead", headings), tag("tbody", join(*rows))) if rows else None
    more = tag("p", f"{count(len(found) - len(rows))} more.", class_="quiet") if len(found) > len(rows) else None
    where = tag("p", tag("code", image.ref.uri), class_="quiet")
    return tag("details", tag("summary", tag("span", picture, class_="picture"), caption), table, more, where, name="sample")


def _classes_section(summary: Mapping[str, Any]) -> Markup:
    classes = sorted((summary.get("classes") or {}).items(), key=lambda named: (-named[1], str(named[0])))
    if not classes:
        return _section("Classes", tag("p", "No objects were detected.", class_="quiet"))
    rows: list[tuple[object, float, object]] = [(name, n, count(n)) for name, n in classes[:_SHOWN_CLASSES]]
    rest = classes[_SHOWN_CLASSES:]
    if rest:
        named = f"{count(len(rest))} more class{'' if len(rest) == 1 else 'es'}"
        rows.append((tag("i", named), -1, count(sum(n for _, n in rest))))
    caption = f"{count(len(classes))} class{'' if len(classes) == 1 else 'es'} with detections"
    return _section("Classes", bar_table(rows, ("Class", "Detections"), caption))


def _dead_letters_section(summary: Mapping[str, Any], dead_letters: Sequence[Mapping[str, Any]]) -> Markup:
    examples: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for letter in dead_letters:
        examples[str(letter.get("reason", MISSING))].append(letter)
    counts = {str(reason): int(n) for reason, n in (summary.get("dead_by_reason") or {}).items()}
    counts |= {reason: len(letters) for reason, letters in examples.items() if reason not in counts}
    if not counts:
        return _section("Dead letters", tag("p", "None: every image was detected or skipped.", class_="quiet"))
    reasons = [
        _reason(reason, n, examples.get(reason, []))
        for reason, n in sorted(counts.items(), key=lambda named: (-named[1], named[0]))
    ]
    note = "What cannot succeed on another try. All of them are in dead_letters/*.jsonl, which can be given as input again."
    return _section("Dead letters", tag("div", join(*reasons), class_="reasons"), note)


def _reason(reason: str, number: int, letters: Sequence[Mapping[str, Any]]) -> Markup:
    shown = letters[:_SHOWN_LETTERS]
    rows = []
    for letter in shown:
        uri = (letter.get("image") or {}).get("uri", MISSING)
        rows.append(
            tag(
                "tr",
                tag("td", uri, class_="code"),
                tag("td", letter.get("stage", MISSING)),
                tag("td", letter.get("message", MISSING)),
            )
        )
    stages = ", ".join(sorted({str(letter["stage"]) for letter in letters if letter.get("stage")}))
    summary = tag(
        "summary",
        tag("span", reason),
        stages and tag("span", f"in {stages}", class_="quiet"),
        tag("span", count(number), class_="figure"),
    )
    if not rows:
        return tag("details", summary, tag("p", "No examples were kept.", class_="quiet"))
    head = tag("tr", *(tag("th", heading, scope="col") for heading in ("Image", "Stage", "Message")))
    more = tag("p", f"{count(len(shown))} of {count(number)} shown.", class_="quiet") if number > len(shown) else None
    table = tag("table", tag("thead", head), tag("tbody", join(*rows)), class_="rows letters")
    return tag("details", summary, table, more)


def _throughput_section(summary: Mapping[str, Any], unit: str) -> Markup | None:
    points = summary.get("throughput")
    if not points:
        return None
    mean = summary.get("images_per_second")
    whole = f" The dotted line is the whole run's rate, {count(mean, 1)}." if mean else ""
    note = f"{unit.capitalize()} finished per second, from the first one on.{whole}"
    return _section("Throughput", throughput_chart(points, mean, f"{unit}/s"), note)


def _batch_sizes(summary: Mapping[str, Any]) -> dict[int, int]:
    return {int(size): int(n) for size, n in (summary.get("batch_sizes") or {}).items() if int(n) > 0}


def _batches_section(summary: Mapping[str, Any]) -> Markup | None:
    sizes = _batch_sizes(summary)
    if not sizes:
        return None
    told = "Batches by size: " + ", ".join(f"{n} of {size}" for size, n in sorted(sizes.items()))
    calls = sum(sizes.values())
    note = f"The model's {count(calls)} call{'' if calls == 1 else 's'} by batch size; a batch with fewer images is padded to it."
    return _section("Batch sizes", column_chart(sizes, told, "batches"), note)


def _stages_section(summary: Mapping[str, Any], unit: str) -> Markup | None:
    seconds = {str(name): float(value) for name, value in (summary.get("stage_seconds") or {}).items()}
    if not seconds:
        return None
    in_order = [name for name in _STAGES if name in seconds] + sorted(seconds.keys() - set(_STAGES))
    read = _images(summary).get("read") or 0
    rows: list[tuple[object, float, object]] = []
    for name in in_order:
        value = seconds[name]
        each = tag("span", f", {duration(value / read)} each", class_="each") if read else None
        rows.append((name, value, join(duration(value), each)))
    note = f"Summed over threads that work side by side, so the seconds may exceed the wall time; “each” is by {unit} read."
    return _section(
        "Time per stage", bar_table(rows, ("Stage", "Time"), f"Wall time {duration(summary.get('wall_seconds'))}"), note
    )


def _latency_section(summary: Mapping[str, Any], unit: str) -> Markup | None:
    latency = {name: value / 1000 for name, value in (summary.get("latency_ms") or {}).items() if count(value) != MISSING}
    if not latency:
        return None
    rows = [(_LATENCY_NAMES.get(name, name), value, duration(value)) for name, value in latency.items()]
    note = f"From having one of the {unit} in hand to having its result. In a batch run that includes waiting for the others."
    return _section("Latency", bar_table(rows, ("Share of " + unit, "Within"), "Percentiles"), note)


def _settings_section(title: str, settings: object) -> Markup | None:
    """A table of settings; one under its own heading for each nested mapping."""
    if not isinstance(settings, Mapping) or not settings:
        return None
    groups: dict[str, list[tuple[str, object]]] = {"": []}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        groups.setdefault(str(key) if nested else "", []).extend(_flatten(value) if nested else [(str(key), value)])
    content = []
    for group, rows in groups.items():
        body = [tag("tr", tag("th", name, scope="row"), tag("td", _setting(value), class_="code")) for name, value in rows]
        content.append(
            join(group and tag("h3", group), tag("table", tag("tbody", join(*body)), class_="rows settings") if body else None)
        )
    return _section(title, join(*content))


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _setting(value: object) -> Markup:
    """A value as it would stand in the YAML file."""
    if value is None or value in ("", [], {}, ()):
        return text(MISSING)
    if isinstance(value, bool):
        return text(str(value).lower())
    if isinstance(value, list | tuple):
        return text(", ".join(map(str, value)))
    return text(value)


def _command_section(summary: Mapping[str, Any]) -> Markup | None:
    command = summary.get("command")
    return _section("Command", tag("pre", tag("code", command))) if command else None
