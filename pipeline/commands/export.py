"""`detect-objects export`: writes the detections of a results folder in other formats, at any time.

    detect-objects export out/ --format coco,csv [--run 3f2a9c01] [--model yolov4] [--since 2026-11-20]
    detect-objects export out/ --format crops --to crops/

Of an image generation, model version and settings the newest row counts. Jobs and streams may write meanwhile.

Exit code 0: done; 1: failed, or an image of a crop cannot be read; 2: a wrong command or place, or no such row; 130: stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from pipeline.config.dates import days_flag
from pipeline.config.paths import local_path
from pipeline.errors import CommandParser, ConfigError, InputError, run_command
from pipeline.exports.exports import FORMATS, export
from pipeline.exports.pictures import Pictures, write_pictures
from pipeline.log_lines import console, plural, say
from pipeline.results.current import read_results
from pipeline.results.layout import EXPORTS, results_folder
from pipeline.results.wanted import add_row_flags, wanted_rows

_CROPS = "crops"
_NAMES = (*FORMATS, _CROPS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(
        lambda: _export(flags), "the export failed", "stopped; the files of a format that are there belong together"
    )


def _export(flags: argparse.Namespace) -> int:
    formats = list(dict.fromkeys(name for given in flags.format for name in given.split(",")))
    if unknown := [name for name in formats if name not in _NAMES]:
        raise ConfigError(f"--format: expected {', '.join(_NAMES)}, got {unknown[0]!r}")
    output, to = results_folder(flags.folder), local_path(flags.to).rstrip("/")
    since = days_flag("--since", flags.since)[0] if flags.since else 0.0
    wanted = wanted_rows(flags)._replace(run=flags.run, since=since)
    if of_rows := [name for name in formats if name != _CROPS]:
        root = local_path(flags.root)
        root = root.rstrip("/") if "://" in root or not root else os.path.realpath(root)
        more = {"root": root, "ground_truth": flags.coco_ground_truth, "allow_empty": False}
        done = export(output, of_rows, wanted, to, sort=flags.sort, **more)
        for note in done.notes:
            console.warning("%s", note)
        say([f"{plural(done.rows, 'row')} in {', '.join(done.files)}"])
    if _CROPS not in formats:
        return 0
    crops = f"{to or f'{output}/{EXPORTS}'}/{_CROPS}"
    rows = read_results(output, wanted)
    if not rows:
        raise InputError(f"{output} holds no row of detections{wanted.flags()}")
    return 0 if write_pictures(output, rows, Pictures(crops=crops, replace=True, images=flags.images)) else 1


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects export",
        description="Writes the detections of a results folder in other formats, of each image its newest row.",
    )
    add = parser.add_argument
    add("folder", metavar="RESULTS", help="the results folder, local, gs://, s3:// or abfs://")
    names = "{" + ",".join(_NAMES) + "}"
    add("--format", required=True, action="append", metavar=names, help="one or several, divided by commas")
    add("--run", default="", metavar="RUN", help="only rows that this run wrote, also those that a newer run superseded")
    add_row_flags(parser)
    add("--since", default="", metavar="DAY", help="only rows that were made from this day on (UTC)")
    add("--to", default="", metavar="FOLDER", help="where the files are written (default: exports/ in the results folder)")
    help_text = "coco, yolo, voc: names of images count from here (default: the deepest folder that all have in common)"
    add("--root", default="", metavar="FOLDER", help=help_text)
    add("--sort", action="store_true", help="sort rows by the images' URIs, in a temporary folder; not for crops")
    add("--coco-ground-truth", default="", metavar="FILE", help="COCO annotations whose image and category ids coco uses")
    add("--images", default="", metavar="FOLDER", help="crops: where the images are now (default: as the rows name them)")
    return parser
