"""Patterns of paths as users write them, and their translation for Beam's file systems."""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Callable

_WILDCARD = re.compile(r"[*?[]")
_TOKEN = re.compile(r"(?:(?<=/)|\A)\*\*/|\*\*|\*|\?|\[!?\]?[^]/]*\]|.", re.DOTALL)


def has_wildcard(part: str) -> bool:
    """Whether a pattern can match other names than itself."""
    return _WILDCARD.search(part) is not None


def fixed_beginning(pattern: str) -> str:
    """The beginning that all matches share."""
    return _WILDCARD.split(pattern, maxsplit=1)[0]


@functools.lru_cache(maxsize=4096)
def to_regex(pattern: str) -> re.Pattern[str]:
    r"""The regular expression of a pattern of paths.

    `*` and `?` match characters except slashes, `[a-z]` one of these and `[!a-z]` one other, `**` any characters, and `**/` any
    number of folders, also none.

    >>> [path for path in ("a.jpg", "x/a.jpg", "x/y/b.jpg", "x/a.png") if to_regex("**/[!b]*.jpg").fullmatch(path)]
    ['a.jpg', 'x/a.jpg']
    """
    return re.compile("".join(map(_token_regex, _TOKEN.findall(pattern))), re.DOTALL)


def _token_regex(token: str) -> str:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if token in known:
        return known[token]
    is_set = token[0] == "[" and len(token) > 1
    return f"(?!/){fnmatch.translate(token)[4:-3]}" if is_set else re.escape(token)  # without `(?s:` and `)\Z`


def escape_glob(path: str) -> str:
    """A pattern that matches only this path, whatever characters it has."""
    # a NUL, which no path has, precedes "[": Python's regular expressions warn of sets that begin with "["
    return re.sub(r"[*?[]", lambda found: "[\0[]" if found[0] == "[" else f"[{found[0]}]", path)


def real_folder(folder: str) -> str:
    """A local folder as an absolute path free of links that ends with a slash; empty: the current one."""
    try:
        return f"/{os.path.realpath(folder).strip('/')}".rstrip("/") + "/"
    except ValueError:  # no folder can have this name
        return folder


def real_path(path: str, real_folder: Callable[[str], str] = real_folder) -> str:
    """The one name of a local file: its folder absolute and free of links, then its own name, perhaps a link's; a URI stays."""
    folder, slash, name = path.rpartition("/")
    return path if "://" in path else real_folder(folder + slash) + name
