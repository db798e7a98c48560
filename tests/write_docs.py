"""`python -m tests.write_docs`: writes into docs/ what the code declares: settings, columns, reasons, exit codes, metrics."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Mapping

from models.metadata import DetectorMetadata
from pipeline.__main__ import VERBS
from pipeline.config import settings
from pipeline.config.setting import Setting
from pipeline.errors import EXIT_CODES
from pipeline.failures import MAY_PASS, REASONS
from pipeline.monitoring.prometheus import METRICS, PROCESS_METRICS
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.row_rule import current_sql
from pipeline.results.rows import FORMATS
from tests.fixtures import REPO

_HEAD = """# Settings

Every setting is a key of the YAML config; most are flags, too. Those that describe a model are keys of
the file in `--description` instead. A flag wins over a key. Lists take commas or several values.
The column *jobs* has which jobs use a setting; the others refuse it.
This page is written by `python -m tests.write_docs` from `pipeline/config/sections.py`.
"""
_WRITTEN = r"(?<=<!-- {0}: written by `python -m tests.write_docs` -->\n).*?(?=<!-- end of {0} -->)"
_JOBS = {"": "all", "batch": "batch", "streaming": "streams"}
_EXIT_CODES = re.compile(r"Exit code (0: .*?)\.?$")
_MEANINGS = {
    "key": "hash of the image's URI and generation, and of the model, its version and the settings",
    "uri": "the image",
    "uri_bytes": "the bytes of a URI that is no Unicode; else null",
    "generation": "the version of the image",
    "model": "name of the model",
    "version": "version of the model",
    "settings": "hash of the settings that decide which rows come out: thresholds, classes, and the description of the model",
    "run": "the run that made the row",
    "made_at": "when it was made (UTC)",
    "width": "width of the upright image in pixels",
    "height": "height of the upright image in pixels",
    "detections": "the objects, by falling confidence",
    "extra": "further fields of a manifest or a message, as JSON",
    "stage": "the step that failed",
    "reason": "the reason, [one of a list](#dead-letters)",
    "message": "the reason for a person",
    "record": "the place of the image in a TFRecord file",
    "model_was_called": "whether the image reached the model",
    "payload": "what a message carried, if it names no image that can be read again",
}


def settings_page() -> str:
    """The text of docs/settings.md: a table for each section of the config."""
    sections: dict[str, list[Setting]] = {}
    for each in settings():
        sections.setdefault(each.key.rpartition(".")[0], []).append(each)
    return "\n".join([_HEAD, *(_section(name, of_section) for name, of_section in sections.items())])


def reasons() -> str:
    """The table of all reasons of dead letters."""
    rows = [
        f"| {stage} | `{reason}` | {'transient' if reason in MAY_PASS else 'permanent'} | {why} |"
        for stage, of_stage in REASONS.items()
        for reason, why in of_stage.items()
    ]
    return _table(["stage", "reason", "failure", "why"], rows)


def commands() -> str:
    """The table of all verbs of the command."""
    names = {name: f"`detect-objects {name}`" for name in VERBS}
    names["run"] = f"`python -m {VERBS['run'].module}`, {names['run']}"
    return _table(["command", "what for"], [f"| {names[name]} | {verb.purpose} |" for name, verb in VERBS.items()])


def exit_codes() -> str:
    """The table of the exit codes of the other verbs, as the docstrings of their modules have them."""
    rows = []
    for name, verb in VERBS.items():
        text = " ".join((importlib.import_module(verb.module).__doc__ or "").split())
        if verb.module != "pipeline.run":
            rows.append(f"| `detect-objects {name}` | {_EXIT_CODES.findall(text)[0]} |")
    return _table(["command", "exit codes"], rows)


def job_codes() -> str:
    """The table of the exit codes of a job, and what a supervisor does after each."""
    words = {True: "yes", False: "no"}
    rows = [f"| {code} | {each.meaning} | {words[each.retry]} | {words[each.alarm]} |" for code, each in EXIT_CODES.items()]
    return _table(["code", "what has happened", "start it again", "alarm"], rows)


def columns() -> str:
    """The table of the columns of both kinds of shards."""
    rows = []
    for name in dict.fromkeys([*FORMATS[DETECTIONS].schema.names, *FORMATS[DEAD_LETTERS].schema.names]):
        kinds = [kind for kind in (DETECTIONS, DEAD_LETTERS) if name in FORMATS[kind].schema.names]
        of_kind = "both" if len(kinds) > 1 else kinds[0].replace("_", " ")
        of_type = str(FORMATS[kinds[0]].schema.field(name).type)
        written = of_type.replace("element: ", "").replace("item: ", "").replace("<", "&lt;")
        rows.append(f"| `{name}` | {of_kind} | {written} | {_MEANINGS[name]} |")
    return _table(["column", "rows", "type", "content"], rows)


def current() -> str:
    """The query of the current rows."""
    query = current_sql("'out/detections/*.parquet'", "'out/dead_letters/*.parquet'")
    return f"```sql\n{query}```\n"


def view() -> str:
    """The statement that makes a view of the current rows in BigQuery."""
    query = current_sql("dataset.detections", "dataset.detections_dead_letters")
    return f"```sql\nCREATE OR REPLACE VIEW dataset.current_detections AS\n{query}```\n"


def metrics() -> str:
    """The table of all metrics."""
    rows = [
        f"| `{each.name}` | {each.kind} | {each.unit} | {', '.join(f'`{label}`' for label in each.labels)} | {_cell(each.help)} |"
        for each in METRICS
    ]
    return f"{_table(['metric', 'type', 'unit', 'labels', 'meaning'], rows)}\nAlso {PROCESS_METRICS}.\n"


def _table(headings: list[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *rows, ""])


def _with(path: str, **tables: str) -> str:
    """A page with these tables, each between its marks."""
    page = (REPO / path).read_text(encoding="utf-8")
    for name, table in tables.items():
        page = re.sub(_WRITTEN.format(name), lambda _, table=table: table, page, flags=re.DOTALL)
    return page


def _section(name: str, of_section: list[Setting]) -> str:
    title = f"Section `{name}`" if name else "The job"
    meanings = [_cell(each.help or _described()[each.name]) for each in of_section]
    cells = zip(of_section, meanings, strict=True)
    rows = [
        f"| `{each.name}` | {_flag(each)} | {_default(each)} | {_JOBS[each.applies]} | {meaning} |" for each, meaning in cells
    ]
    return "\n".join([f"## {title}", "", "| key | flag | default | jobs | what it is |", "|---|---|---|---|---|", *rows, ""])


@functools.cache
def _described() -> dict[str, str]:
    """What each key of a model's description means."""
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", inspect.getdoc(DetectorMetadata) or "", re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}


def _flag(each: Setting) -> str:
    return f"`{each.flag}`" if each.flag else "any flag of Beam" if each.key == "beam_options" else "key of `--description`"


def _default(each: Setting) -> str:
    return "" if each.default in (None, "", [], {}) else f"`{_plain(each.default)}`"


def _plain(default: object) -> str:
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _cell(text: str) -> str:
    return re.sub(r"([|*])", r"\\\1", text).replace("<", "&lt;")


def pages() -> Mapping[str, str]:
    """The pages that are made of the code, by their path below the repository."""
    return {
        "docs/settings.md": settings_page(),
        "docs/results.md": _with("docs/results.md", reasons=reasons(), columns=columns(), current=current(), view=view()),
        "docs/operations.md": _with(
            "docs/operations.md", metrics=metrics(), commands=commands(), codes=exit_codes(), jobs=job_codes()
        ),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (REPO / path).write_text(text, encoding="utf-8")
