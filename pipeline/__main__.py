"""`detect-objects`, `python -m pipeline`: a dispatcher, which of the verbs' modules imports only the given one."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.log_lines import open_closed_streams

_HELP = """\
usage: detect-objects VERB [flags]

Detects objects in many images with one shared model, and measures how well.

verbs:
{verbs}

from a folder of photos to an evaluation, after `detect-objects import` or with any SavedModel:
  python -m pipeline.run --input 'photos/**/*.jpg' --output out/ --model models/yolov4
  detect-objects evaluate --detections out/ --ground-truth photos/labels --page evaluation.html

detect-objects VERB --help teaches each verb. Flags without a verb, such as --version, go to `run`.
"""


class Verb(NamedTuple):
    """A verb of the command line: the module with its `main(arguments)`, a line of `--help`, and the flags that it stands for."""

    module: str
    purpose: str
    flags: tuple[str, ...] = ()


VERBS = {
    "run": Verb("pipeline.run", "detect objects: a batch job, a stream or a backfill"),
    "evaluate": Verb("pipeline.commands.evaluate", "how good an output is beside labels, or how far two outputs agree"),
    "report": Verb("pipeline.commands.report", "make the page of a results folder anew, of all its rows or of some"),
    "view": Verb("pipeline.commands.view", "open a run in FiftyOne, beside its labels"),
    "pictures": Verb("pipeline.commands.pictures", "draw the objects of a run into its images, or cut them out"),
    "import": Verb("pipeline.commands.import_model", "turn a Darknet YOLO model into a SavedModel, or describe another model"),
    "golden": Verb("pipeline.commands.golden", "write what a version finds in some images as a check of the next version"),
    "quantize": Verb("pipeline.commands.quantize", "write an int8 version of a model for OpenVINO, if it is good enough"),
    "tune": Verb("pipeline.commands.tune", "find the settings with which this machine detects fastest"),
    "export": Verb(
        "pipeline.commands.export", "write a results folder in another format, such as CSV, COCO or YOLO, or as crops"
    ),
    "rows": Verb("pipeline.commands.rows", "print the rows of a results folder as JSON Lines, for jq and other tools"),
    "compact": Verb("pipeline.commands.compact", "merge the many small files of a results folder"),
    "check": Verb("pipeline.commands.check", "are all rows of a results folder whole, and which images lost theirs by damage"),
    "load": Verb("pipeline.commands.load", "load the rows of a results folder into BigQuery, each once"),
    "reconcile": Verb("pipeline.commands.reconcile", "which images have a result, and which have none"),
    "replay": Verb("pipeline.run", "detect again in the images that failed: run --retry-dead", ("--retry-dead",)),
    "cost": Verb("pipeline.commands.cost", "what a job of N images takes and costs, from your prices"),
    "doctor": Verb("pipeline.commands.doctor", "what this machine and this installation can do, and what to install"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the module of a verb; returns its exit code, or 2 if there is no such verb."""
    open_closed_streams()
    first, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if first in ("--help", "-h", "help"):
        print(_HELP.format(verbs="\n".join(f"  {name:<10} {verb.purpose}" for name, verb in VERBS.items())))
        return 0
    if first not in VERBS and not first.startswith("-"):
        near = difflib.get_close_matches(first, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(VERBS)}"
        print(f"error: unknown verb {first!r}; {hint}", file=sys.stderr)
        return 2
    verb = VERBS.get(first, Verb("pipeline.run", "", (first,)))
    try:
        code: int = importlib.import_module(verb.module).main([*verb.flags, *rest])
        sys.stdout.flush()
    except KeyboardInterrupt:  # Ctrl-C while the module is imported; later ones are the command's
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as of `| head`; https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
