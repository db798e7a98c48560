"""What a user means by a path or a pattern, in the patterns of Beam's file systems."""

from __future__ import annotations

import os
import re


def escape_glob(path: str) -> str:
    """A pattern that matches this very path, whatever characters it has."""
    # a NUL, which no path has, stands before "[": Python's regular expressions warn of sets that begin with "["
    return re.sub(r"[*?[]", lambda found: "[\0[]" if found[0] == "[" else f"[{found[0]}]", path)


def is_folder(pattern: str) -> bool:
    """Whether a pattern stands for all files below it: a local folder, `gs://bucket`, or anything that ends at a slash."""
    return pattern.endswith("/") or (pattern.startswith("gs://") and pattern.count("/") == 2) or os.path.isdir(pattern)


def is_below(path: str, folder: str) -> bool:
    """Whether a file lies somewhere below a folder, however the two are written."""
    if "://" not in path and "://" not in folder:
        path, folder = os.path.abspath(path), os.path.abspath(folder)
    return path.startswith(folder.rstrip("/") + "/")


def expand_pattern(pattern: str) -> list[str]:
    """The patterns of Beam's file systems that together mean what a user means.

    Beam's `**` matches across folders but wants both slashes around it, so `a/**/b` would miss `a/b`; a folder is no pattern
    there; and one without any slash finds nothing, so `./` comes before it.
    """
    if os.path.isdir(pattern):
        return [escape_glob(_with_slash(os.path.normpath(pattern))).rstrip("/") + "/**"]
    if is_folder(pattern):
        return [_with_slash(pattern).rstrip("/") + "/**"]
    pattern = _with_slash(pattern)
    if "/**/" in pattern:
        return [pattern, *expand_pattern(pattern.replace("/**/", "/", 1))]
    return [pattern]


def _with_slash(pattern: str) -> str:
    return pattern if "://" in pattern or pattern.startswith(("/", "./")) or pattern == "." else "./" + pattern
