"""`detect-objects view`: opens a run in FiftyOne, beside its labels, or writes the files that FiftyOne imports.

    detect-objects view out/ [--ground-truth photos/labels] [--images photos/] [--port 5151]
    detect-objects view out/ --export folder/

The files `detections.json` and `ground_truth.json` are FiftyOneImageDetectionDatasets, whose images are absolute paths:
https://docs.voxel51.com/user_guide/import_datasets.html#fiftyoneimagedetectiondataset

Exit code 0: done; 1: storage does not answer, or the disk is full; 2: a wrong command, or labels or rows that cannot be used;
130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.base.project import pip_install
from models.evaluate.detection_rows import ImageRow
from models.evaluate.ground_truth import read_truth
from models.evaluate.pairing import Pairing, pair
from pipeline.config.paths import local_path
from pipeline.errors import DONE, WRONG, CommandParser, InputError, run_command
from pipeline.feed.read_again import local_file, refuse_duplicates
from pipeline.log_lines import console, plural, say
from pipeline.results.current import read_rows
from pipeline.results.wanted import add_row_flags, wanted_rows
from pipeline.storage.files import delete_files, file_to_write, write_files

_NO_MONGODB = "FiftyOne finds no MongoDB: FIFTYONE_DATABASE_URI names one, or write with --export what FiftyOne imports elsewhere"
_INSTALL = f"FiftyOne is not installed: {pip_install('fiftyone')}, or write with --export what it imports"
_DETECTIONS, _TRUTH = "detections.json", "ground_truth.json"
_MARK = b'{"classes": null, "labels": {'  # of the files that this command writes
_Objects = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0; 2 if an input cannot be used; 130 if it was stopped."""
    args = make_parser().parse_args(arguments)
    return run_command(lambda: _view(args), "nothing is shown", failed_code=WRONG)


def _view(args: argparse.Namespace) -> int:
    if args.export:
        say([f"{plural(_export(args, local_path(args.export).rstrip('/')), 'image')} in {args.export}"])
    else:
        with contextlib.suppress(KeyboardInterrupt):  # this is how the page is closed
            _show(args)
    return DONE


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(prog="detect-objects view", description="Opens a run in FiftyOne, beside its labels.")
    add = parser.add_argument
    add("detections", metavar="PATH", help="results folder, folder, glob or file of rows")
    add("--ground-truth", metavar="PATH", help="labels, as detect-objects evaluate takes them; FiftyOne then shows the errors")
    add("--images", metavar="FOLDER", help="where the images are now (default: as the rows name them)")
    add_row_flags(parser)
    add("--port", type=int, default=5151, help="port of FiftyOne's page (default: %(default)s)")
    add("--export", metavar="FOLDER", help="write the files that FiftyOne imports, and open nothing")
    return parser


def _export(args: argparse.Namespace, folder: str) -> int:
    """Writes `detections.json` and, if there are labels, `ground_truth.json`; returns the number of images.

    Both replace those of an earlier export.
    """
    detections, truth = (file_to_write("--export", f"{folder}/{name}", mark=_MARK) for name in (_DETECTIONS, _TRUTH))
    rows = read_rows(args.detections, wanted_rows(args))
    files = {row.uri: local_file(row.uri, args.images or "") for row in rows}
    refuse_duplicates(rows)
    lacking = [uri for uri, file in files.items() if not file]
    text = f"{len(lacking)} of {plural(len(files), 'image')} not on this disk, such as {next(iter(lacking), '')}"
    if len(lacking) == len(files):
        raise InputError(f"{text}; copy them here and give their folder: --images FOLDER")
    if lacking:
        console.warning("%s", text)
    pairing = pair(rows, read_truth(args.ground_truth), "name") if args.ground_truth else None
    content = {detections: _content({files[row.uri]: _detected(row, pairing) for row in rows})}
    if pairing:
        content[truth] = _content({files[uri]: objects for uri, objects in _labelled(pairing).items()})
    delete_files([truth])  # it belongs to the detections that are replaced
    write_files(content)
    return len(files) - len(lacking)


def _detected(row: ImageRow, pairing: Pairing | None) -> _Objects:
    """Detections; their classes have the names of the labels, if there are labels."""
    found = zip(row.class_names, row.class_ids, row.boxes_xyxy.tolist(), row.scores.tolist(), strict=True)
    renamed = {named: pairing.labels.class_names[place] for named, place in pairing.classes.items()} if pairing else {}
    return [
        {"label": renamed.get((name, number)) or name or str(number), "bounding_box": _share(box, row), "confidence": score}
        for name, number, box, score in found
    ]


def _labelled(pairing: Pairing) -> dict[str, _Objects]:
    """Labelled objects by the URI of their image, for the images that have a row."""
    labels = pairing.labels
    found: dict[int, _Objects] = {image: [] for image in pairing.rows}
    columns = (labels.objects.images, labels.objects.classes, labels.objects.xyxy, labels.objects.crowd)
    for image, place, box, is_crowd in zip(*(column.tolist() for column in columns), strict=True):
        if row := pairing.rows.get(image):
            crowd = {"attributes": {"iscrowd": 1}} if is_crowd else {}
            found[image].append({"label": labels.class_names[place], "bounding_box": _share(box, row), **crowd})
    return {pairing.rows[image].uri: objects for image, objects in found.items()}


def _share(box_xyxy: Sequence[float], row: ImageRow) -> list[float]:
    """A box as FiftyOne has it: xywh, in shares of the image."""
    if not (row.width and row.height):
        raise InputError(f"{row.uri}: FiftyOne's boxes are shares of the image, and this row has no width and height")
    x0, y0, x1, y1 = box_xyxy
    return [x0 / row.width, y0 / row.height, (x1 - x0) / row.width, (y1 - y0) / row.height]


def _content(labels: Mapping[str, _Objects]) -> bytes:
    content = {"classes": None, "labels": {file: objects for file, objects in labels.items() if file}}
    return (json.dumps(content) + "\n").encode()


def _show(args: argparse.Namespace) -> None:
    """Opens FiftyOne's page, until it is interrupted."""
    os.environ.setdefault("FIFTYONE_DO_NOT_TRACK", "true")
    with tempfile.TemporaryDirectory() as folder:
        try:
            import fiftyone
        except ImportError as err:
            raise InputError(_INSTALL) from err
        images = _export(args, folder)
        try:
            dataset = loaded(fiftyone, Path(folder))
        except (fiftyone.core.config.FiftyOneConfigError, ConnectionError) as err:
            raise InputError(_NO_MONGODB) from err
    session = fiftyone.launch_app(dataset, port=args.port, address="127.0.0.1")
    print(f"FiftyOne shows {plural(images, 'image')} at http://127.0.0.1:{args.port}; Ctrl-C ends it", flush=True)
    session.wait(-1)


def loaded(fiftyone: Any, folder: Path) -> Any:
    """A dataset of FiftyOne from the files of a folder; with labels, each object is marked as right, wrong or missed.

    Args:
      fiftyone: The module `fiftyone`.
      folder: Has `detections.json`, and perhaps `ground_truth.json`.
    """
    dataset, kind = fiftyone.Dataset(), fiftyone.types.FiftyOneImageDetectionDataset
    dataset.add_dir(dataset_type=kind, labels_path=str(folder / _DETECTIONS), label_field="detections")
    if (labels := folder / _TRUTH).exists():
        dataset.merge_dir(dataset_type=kind, labels_path=str(labels), label_field="ground_truth")
        dataset.evaluate_detections("detections", gt_field="ground_truth", eval_key="errors")
    return dataset
