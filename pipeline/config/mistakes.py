"""What is wrong with a setting, in one line: the expected value and the given one, or the nearest known name."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

from pipeline.config.setting import Setting
from pipeline.secrets import MASK, is_secret

_NEAR = 0.75  # difflib's ratio of one or two typos
_WORDS = {  # pydantic's, and those of somebody who writes a config
    r"^Input should be (a valid )?": "expected ",
    r"^Value error, (expected )?": "expected ",
    r"^Tuple should have.*|^Field required$": "expected 2 values",
    r"^Keys should be": "expected keys that are",
    r"(?:a )?(?:dictionary|mapping)\b.*": "a section with keys",
    r"greater than or equal to": "at least",
    r"less than or equal to": "at most",
    r", (?:unable to|got) .*": "",
}
_ELSEWHERE = {  # flags of YOLO's tools, Ultralytics and other common programs
    "conf conf-thres confidence thresh": "--score-threshold",
    "iou iou-thres nms-threshold": "--iou-threshold",
    "max-det": "--max-detections",
    "imgsz img-size": "--input-hw, for models of any input size",
    "source images": "--input",
    "weights checkpoint": "--model",
    "batch batch-size": "--batch-sizes, such as 1,2,4,8",
    "gpu gpus cuda": "--device gpu:0",
    "workers jobs processes": "--feeder-processes",
    "half fp16": "--precision float16 on a GPU, bfloat16 on a CPU",
    "save save-crop annotate": "another command, after the run: detect-objects pictures",
    "csv save-csv": "--export csv, or the Parquet files in detections/, which pandas and duckdb read",
    "save-txt yolo": "--export yolo",
    "resume only-new skip-existing": "no flag: images that have a row are skipped",
    "view no-view": "files of rows are Parquet alone; detect-objects rows prints them as JSON Lines",
    "overwrite force exist-ok": "--again, which detects what is done again; the newest row counts",
}
_FLAGS = {name: flag for names, flag in _ELSEWHERE.items() for name in names.split()}


def what_is_wrong(err: ValidationError, source: str, flags: Mapping[str, str], known: Sequence[Setting]) -> str:
    """The first error in one line.

    Args:
      err: All errors.
      source: Where the values are from: files, or the name of a section that code makes.
      flags: By key, of values that are from the command line.
      known: The settings that there are.
    """
    first = err.errors(include_url=False, include_context=False)[0]
    path = [part for part in first["loc"] if isinstance(part, str) and part != "[key]"]
    key = ".".join(path)
    if first["type"] == "unexpected_keyword_argument":
        return f"{source}: unknown key {_shown(key)}; {_near_key(path, known)}"
    wanted = first["msg"]
    for pattern, words in _WORDS.items():
        wanted = re.sub(pattern, words, wanted)
    hidden = [setting.key for setting in known if setting.is_secret]
    got = MASK if key in hidden or (key.startswith("beam_options.") and is_secret(key)) else _shown(first["input"])
    place = flags.get(key) or ": ".join(filter(None, (source, key)))
    return " ".join(f"{place}: {wanted}, got {got}".split())


def near_flag(flag: str, known: Iterable[str]) -> str:
    """What a user may have meant by an unknown flag; empty if nothing is near.

    >>> near_flag("--conf", []), near_flag("--score_treshold", ["--score-threshold"]), near_flag("--xyzzy", ["--fps"])
    ('use --score-threshold', 'did you mean --score-threshold?', '')
    """
    if elsewhere := _FLAGS.get(_bare(flag)):
        return f"use {elsewhere}" if elsewhere.startswith("--") else elsewhere
    flags = {_bare(each): each for each in reversed([*known])}
    near = difflib.get_close_matches(_bare(flag), flags, n=1, cutoff=_NEAR)
    return f"did you mean {flags[near[0]]}?" if near else ""


def _near_key(path: list[str], known: Sequence[Setting]) -> str:
    keys = {_bare(name): setting.key for setting in known for name in (setting.name, setting.flag) if name}
    sections = {key.partition(".")[0] for key in keys.values() if "." in key}
    names = keys | {section: section for section in sections if len(path) == 1}
    elsewhere = _FLAGS.get(_bare(path[-1]), path[-1])
    if not elsewhere.startswith("--") and elsewhere != path[-1]:
        return elsewhere
    here = re.split("[ ,]", elsewhere)[0]
    near = difflib.get_close_matches(_bare(here), names, n=1, cutoff=_NEAR)
    return f"did you mean {names[near[0]]!r}?" if near else "python -m pipeline.run --help-all lists all settings"


def _shown(value: object) -> str:
    """The value, shortened; Python refuses to write very long integers."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 500
    try:
        return short.repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to show"


def _bare(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()
