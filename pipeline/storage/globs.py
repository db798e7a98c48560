"""What a user means by a path or a pattern, and the patterns of Beam's file systems."""

from __future__ import annotations

import functools
import os
import re

_WILDCARD = re.compile(r"[*?[]")
_TOKEN = re.compile(r"(?:(?<=/)|\A)\*\*/|\*\*|\*|\?|\[!?\]?[^]/]*\]|.", re.DOTALL)


def has_wildcard(part: str) -> bool:
    """Whether a pattern can match another name than its own."""
    return _WILDCARD.search(part) is not None


def fixed_beginning(pattern: str) -> str:
    """What every match begins with."""
    return _WILDCARD.split(pattern, maxsplit=1)[0]


@functools.lru_cache(maxsize=4096)
def to_regex(pattern: str) -> re.Pattern[str]:
    r"""The regular expression of a pattern of paths.

    `*` and `?` stand for characters but slashes, `[a-z]` for one of them and `[!a-z]` for one that is none of them, `**` for any
    characters; `**/` for any folders, also none.

    >>> [path for path in ("a.jpg", "x/a.jpg", "x/y/b.jpg", "x/a.png") if to_regex("**/[!b]*.jpg").fullmatch(path)]
    ['a.jpg', 'x/a.jpg']
    """
    return re.compile("".join(map(_token_regex, _TOKEN.findall(pattern))), re.DOTALL)


def _token_regex(token: str) -> str:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if token in known:
        return known[token]
    return _set_regex(token) if token[0] == "[" and len(token) > 1 else re.escape(token)


def _set_regex(token: str) -> str:
    without = token[1] == "!"
    ranges = re.findall(r".-.|.", token[1 + without : -1], re.DOTALL)
    escaped = [
        "-".join(map(re.escape, (part[0], part[-1]))) if len(part) == 3 else re.escape(part)
        for part in ranges
        if part[0] <= part[-1]
    ]
    return f"(?!/)[{'^' * without}{''.join(escaped)}]" if escaped else "[^/]" if without else "(?!)"


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


def real_pattern(pattern: str) -> str:
    """A pattern, the same however it was written: of a local one the folder is absolute and free of links; a URI stays.

    >>> real_pattern("gs://b/x/**"), real_pattern("/proc/../**/*.jpg"), real_pattern("//tmp/")
    ('gs://b/x/**', '/**/*.jpg', '/tmp')
    """
    if "://" in pattern:
        return pattern
    if not has_wildcard(pattern):
        return f"/{os.path.realpath(pattern).lstrip('/')}"
    folder, slash, _ = fixed_beginning(pattern).rpartition("/")
    real = f"/{os.path.realpath(folder or slash or '.').strip('/')}".rstrip("/")
    return f"{real}/{pattern[len(folder + slash) :]}"


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
