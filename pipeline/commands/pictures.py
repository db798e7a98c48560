"""`detect-objects pictures`: draws the objects of a finished run into its images, or cuts them out.

    detect-objects pictures out/ --annotate annotated/
    detect-objects pictures out/ --crops crops/ --class person --min-confidence 0.5

It reads the images again, a few at a time. Exit code 0: all pictures are written; 1: an image cannot be read, a file of another
program is in the way, or the disk is full; 2: a wrong input or folder; 130: stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from math import inf

from pipeline.errors import CommandParser, run_command
from pipeline.exports.pictures import Pictures, folders_of, write_pictures
from pipeline.results.current import read_rows
from pipeline.results.wanted import add_row_flags, wanted_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = make_parser().parse_args(arguments)
    stopped = "stopped; the pictures that are there are complete"
    return run_command(lambda: _write(args), "no picture is written", stopped, failed_code=2)


def _write(args: argparse.Namespace) -> int:
    names = {field.name for field in dataclasses.fields(Pictures)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    pictures = Pictures(**{**given, "classes": tuple(args.classes or ())})
    folders_of(pictures)  # before rows are read
    return 0 if write_pictures(args.detections, read_rows(args.detections, wanted_rows(args)), pictures) else 1


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    said = "Draws the objects of a finished run into its images, or cuts them out."
    parser = CommandParser(prog="detect-objects pictures", description=said)
    add = parser.add_argument
    add("detections", metavar="PATH", help="results folder, folder, glob or file of rows")
    add("--annotate", metavar="FOLDER", help="write each image with its objects drawn")
    add("--crops", metavar="FOLDER", help="write each object as <class>/<image>-<number>-<confidence>.jpg")
    add("--margin", type=_number, default=0.0, metavar="X", help="widen crops on each side by this share of the box, such as 0.1")
    add("--min-confidence", type=_number, default=0.0, metavar="X", help="leave out objects of a lower confidence")
    add("--class", dest="classes", action="append", metavar="NAME", help="only objects of this class; may be given several times")
    add_row_flags(parser)
    add("--images", metavar="FOLDER", help="where the images are now (default: as the rows name them)")
    most = Pictures().max_megapixels
    add("--max-megapixels", type=_number, default=most, metavar="N", help="refuse larger images (default: %(default)g)")
    return parser


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < inf:
        raise ValueError
    return number


_number.__name__ = "number from 0 on"  # for argparse's message
