"""`python -m tests.write_docs`: writes the settings, reasons of dead letters, commands and metrics into docs/."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipeline.__main__ import VERBS
from pipeline.config import settings
from pipeline.config.setting import Setting
from pipeline.failures import MAY_PASS, REASONS
from pipeline.monitoring.metrics import METRICS, PROCESS_METRICS
from tests.fixtures import REPO

_HEAD = """# Settings

Every setting is a key of the YAML config; most are flags, too. Those that describe a model are keys of
the file in `--description` instead. A flag wins over a key. Lists take commas or several values.
This page is written by `python -m tests.write_docs` from `pipeline/config/sections.py`.
"""
_WRITTEN = r"(?<=<!-- {0}: written by `python -m tests.write_docs` -->\n).*?(?=<!-- end of {0} -->)"
_REASONS = re.compile(_WRITTEN.format("reasons"), re.DOTALL)
_COMMANDS = re.compile(_WRITTEN.format("commands"), re.DOTALL)
_METRICS = re.compile(_WRITTEN.format("metrics"), re.DOTALL)


def settings_page() -> str:
    """The text of docs/settings.md: a table for each section of the config."""
    sections: dict[str, list[Setting]] = {}
    for each in settings():
        sections.setdefault(each.key.rpartition(".")[0], []).append(each)
    return "\n".join([_HEAD, *(_section(name, of_section) for name, of_section in sections.items())])


def with_reasons(page: str) -> str:
    """docs/results.md with the table of all reasons of dead letters."""
    rows = [
        f"| {stage} | `{reason}` | {'transient' if reason in MAY_PASS else 'permanent'} | {why} |"
        for stage, reasons in REASONS.items()
        for reason, why in reasons.items()
    ]
    table = "\n".join(["| stage | reason | failure | why |", "|---|---|---|---|", *rows])
    return _REASONS.sub(lambda _: table + "\n", page)


def with_commands(page: str) -> str:
    """docs/operations.md with the table of all verbs of the command."""
    modules = {name: " ".join([verb.module.removesuffix(".__main__"), *verb.flags]) for name, verb in VERBS.items()}
    rows = [f"| `detect-objects {name}` | `python -m {modules[name]}` | {verb.purpose} |" for name, verb in VERBS.items()]
    table = "\n".join(["| command | also | what for |", "|---|---|---|", *rows])
    return _COMMANDS.sub(lambda _: table + "\n", page)


def with_metrics(page: str) -> str:
    """docs/operations.md with the table of all metrics."""
    rows = [
        f"| `{each.name}` | {each.kind} | {each.unit} | {', '.join(f'`{label}`' for label in each.labels)} | {_cell(each.help)} |"
        for each in METRICS
    ]
    table = "\n".join(["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|", *rows])
    return _METRICS.sub(lambda _: f"{table}\n\nAlso {PROCESS_METRICS}.\n", page)


def _section(name: str, of_section: list[Setting]) -> str:
    title = f"Section `{name}`" if name else "The job"
    rows = [f"| `{each.name}` | {_flag(each)} | {_default(each)} | {_cell(each.help)} |" for each in of_section]
    return "\n".join([f"## {title}", "", "| key | flag | default | what it is |", "|---|---|---|---|", *rows, ""])


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
    results = (REPO / "docs/results.md").read_text(encoding="utf-8")
    operations = (REPO / "docs/operations.md").read_text(encoding="utf-8")
    return {
        "docs/settings.md": settings_page(),
        "docs/results.md": with_reasons(results),
        "docs/operations.md": with_commands(with_metrics(operations)),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (REPO / path).write_text(text, encoding="utf-8")
