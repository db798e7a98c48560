"""Hooks of MkDocs: the README is the first page; files outside of docs/, which a site does not have, are named."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

from tests.fixtures import REPO

_OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./(?!README)[^)]+\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the README as the first page."""
    readme = re.sub(r"\]\(docs/", "](", (REPO / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=re.sub(r"\[([^]]+)\]\((?:[A-Z]+\.md)\)", r"`\1`", readme)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Names files outside of docs/ instead of linking them."""
    return _OUTSIDE.sub(r"`\1`", markdown).replace("../README.md", "index.md")
