"""`detect-objects golden`: writes golden images, with what a trusted version finds in them, into a version.

    detect-objects golden --model /models/yolov4/7 golden/*.jpg --out /models/yolov4/8

A job that loads the version detects in these images first, and refuses it if the detections agree less than --min-agreement.
Twenty to a hundred images that show all classes are enough. Use the thresholds of the jobs that will load the version.

Exit code 0: done; 1: the disk is full, nothing is written; 2: the model, an image or a place cannot be used, nothing is
written; 130: stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from pipeline.config import DetectConfig
from pipeline.detect.golden import GOLDEN
from pipeline.detect.write_golden import write_golden
from pipeline.errors import CommandParser, run_command
from pipeline.log_lines import plural

_JOBS = DetectConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _write(args), "no golden images were written", failed_code=2)


def _write(args: argparse.Namespace) -> int:
    out = args.out or args.model
    found = write_golden(args.model, args.images, out, args.score_threshold, args.iou_threshold, config=args.config)
    print(f"{os.path.join(out, GOLDEN)}: {plural(len(found), 'image')} with what {args.model} found there")
    return 0


def _parser() -> argparse.ArgumentParser:
    title, _, rest = (__doc__ or "").partition("\n\n")
    parser = CommandParser(
        prog="detect-objects golden",
        description=title.partition(": ")[2],
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("images", nargs="+", help="files, folders or globs on this machine")
    add("--model", required=True, help="SavedModel of the trusted version, or a folder of versions")
    add("--out", help="SavedModel to write them into (default: the one of --model)")
    add("--score-threshold", type=float, default=_JOBS.score_threshold, help="that of the jobs (default: %(default)s)")
    add("--iou-threshold", type=float, default=_JOBS.iou_threshold, help="that of the jobs (default: %(default)s)")
    add("--config", metavar="FILE", help="a job's config, for a model that does not describe itself")
    return parser
