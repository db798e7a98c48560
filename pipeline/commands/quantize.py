"""`detect-objects quantize`: writes an int8 version of a model for OpenVINO, if it is good enough.

    detect-objects quantize --model models/yolov4 --calibration photos/ [--ground-truth photos/labels]

The photos are ordered by the hash of their content, without duplicates. The first half, at most 300, sets the ranges of the
activations; the others judge. The new version is a copy of the SavedModel with the int8 network and its figures beside it.

Exit code 0: written; 1: the int8 network is too far from float32, or the disk is full, nothing is written; 2: a wrong command or
place; 130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.base.progress import shown
from models.base.project import pip_install
from models.base.quiet import quiet_stderr
from models.evaluate.agreement import compare
from models.evaluate.average_precision import mean_figures, measure
from models.evaluate.detection_rows import RowsError
from models.evaluate.ground_truth import read_truth
from models.export import check_output_dir, written_whole
from models.metadata import write_metadata
from pipeline.config import BUNDLED, DetectConfig, ModelConfig, load_config
from pipeline.detect.describe_model import onnx_file, own_metadata
from pipeline.detect.golden import keep_requests, kept_requests
from pipeline.detect.load_detector import load_detector
from pipeline.detect.load_model import local_copy
from pipeline.detect.openvino_convert import HIDDEN, NETWORK, converted, read_description, write_network
from pipeline.detect.openvino_engine import INT8
from pipeline.detect.versions import first_line, how_to_use, locate
from pipeline.errors import DONE, FAILED, WRONG, CommandParser, ConfigError, InputError, ModelError, UserError, run_command
from pipeline.failures import Failure
from pipeline.feed.decode import decode_image
from pipeline.feed.fit import ModelInput, fit
from pipeline.listing.list_images import check_inputs, list_images
from pipeline.log_lines import console, plural
from pipeline.records import DeadLetter, ImageRef, detection_row
from pipeline.storage.files import read_file

_FIGURES = "assets.extra/openvino_int8.json"
_CONVOLUTIONS = ("Convolution", "GroupConvolution")
_MOST_CALIBRATION = 300  # NNCF's own default; more change nothing
_FEWEST = 4  # photos: two to calibrate, two to judge
_TOGETHER = 16  # photos in flight while they are judged
_JUDGING = DetectConfig(engine="openvino", score_threshold=0.01, min_agreement=0.0)  # average precision needs unsure detections
_MAX_PIXELS = _JUDGING.max_megapixels * 1e6
_SURE = DetectConfig().score_threshold  # confidence from which detections have to agree

Rows = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    folder = flags.output or os.path.dirname(flags.model.rstrip("/")) or "."
    return run_command(lambda: _quantize(flags), "nothing is written", failed_code=WRONG, folder=folder)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects quantize",
        description="Writes an int8 version of a SavedModel for --engine openvino --precision int8, if it is good enough.",
        epilog="exit code: 0 written; 1 int8 is too far from float32, or the disk is full; 2 wrong command or place",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="a folder of versions, whose newest is taken, or one version")
    add("--calibration", required=True, nargs="+", metavar="PATTERN", help="photos like those of the jobs, a few hundred")
    add("--ground-truth", metavar="PATH", help="labels of the photos, as detect-objects evaluate takes them")
    add("--max-ap-loss", type=float, default=1.0, help="with labels: most points of AP50 to lose (default: %(default)s)")
    add(
        "--min-agreement",
        type=float,
        help="least agreement, without labels with float32, and with golden images (default: the jobs' own)",
    )
    add("--output", metavar="DIR", help="version to write, <model>/<integer> (default: <model>-int8/ and the same integer)")
    add("--config", action="append", default=[], metavar="FILE", help="a job's config, for a model that does not describe itself")
    return parser


def _quantize(flags: argparse.Namespace) -> int:
    if not importlib.util.find_spec("nncf"):
        raise ModelError(f"quantize: NNCF is missing; install the extra: {pip_install('quantize')}")
    given = {} if flags.min_agreement is None else {"detect.min_agreement": flags.min_agreement}
    config = load_config(flags.config, {"model.path": flags.model, **given})
    flags.min_agreement = config.detect.min_agreement  # a job refuses what agrees less
    folder, version = locate(config.model.path, config.model.model_version)
    model = dataclasses.replace(config.model, path=folder, model_version=None)
    target = (flags.output or _variant(folder, "" if config.model.path == BUNDLED else version)).rstrip("/")
    check_output_dir(target)
    if flags.ground_truth:
        read_truth(flags.ground_truth)  # a mistake in it shows before minutes of work
    calibration, judging = _split(flags.calibration)
    with local_copy(folder) as local, written_whole(target) as whole:
        if onnx_file(local):
            raise ModelError(f"model {folder}: is an ONNX file; int8 versions are made of SavedModels only")
        console.info("converting the model")
        network = converted(local, folder, model)
        shutil.copytree(local, whole, ignore=shutil.ignore_patterns(HIDDEN))
        if described := own_metadata(local, folder):  # rows of both models are told apart by their names
            write_metadata(whole, dataclasses.replace(described, name=f"{described.name}-int8"))
        to = ModelInput.of(read_description(network))
        fitted = (fit(read_file(ref.uri), to, _MAX_PIXELS) for ref in shown(calibration, "decoding", "photos"))
        pixels = [each[1] for each in fitted if not isinstance(each, Failure)]
        quantise(network, pixels, os.path.join(whole, INT8))
        of_float = _rows(model, _JUDGING, judging)
        strict = dataclasses.replace(_JUDGING, precision="int8", min_agreement=flags.min_agreement)
        try:
            of_int8 = _rows(dataclasses.replace(model, path=whole), strict, judging)
        except ModelError as err:  # a job would refuse it, by its golden images or warm-up requests
            raise _RefusedError(f"{str(err).replace(f'model {whole}: ', '')}; nothing is written") from err
        figures = _compared(of_float, of_int8, flags)
        figures |= {"quantised": folder, "nncf": importlib.metadata.version("nncf")}
        figures["photos"] = {"calibration": len(pixels), "judged": len(of_float), "split": "by the hash of their content"}
        Path(whole, _FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    ap50 = f"AP50 {figures['float32_ap50']:.2f} -> {figures['int8_ap50']:.2f}, " if flags.ground_truth else ""
    done = f"{ap50}agreement with float32 {figures['agreement']:.3f}, on {plural(len(of_float), 'photo')}"
    print(f"{target}: {done}; calibrated on {len(pixels)} others")
    print(how_to_use(target, " --engine openvino --precision int8"))
    return DONE


class _RefusedError(UserError):
    """The int8 network is too far from float32: nothing is written."""

    exit_code = FAILED


def _variant(folder: str, version: str) -> str:
    """Where the int8 version of a version goes by default: into a model of its own, so that only jobs that ask for it take it."""
    if not version.isdecimal() or "://" in folder:
        raise ConfigError(f"model {folder}: expected a numbered version on this machine, or --output <model>/<integer>")
    return f"{os.path.dirname(folder)}-int8/{version}"


def _split(patterns: Sequence[str]) -> tuple[list[ImageRef], list[ImageRef]]:
    """Photos to calibrate with and photos to judge; the order of their digests has nothing to do with their names."""
    check_inputs({pattern: (pattern,) for pattern in patterns})
    digests, broken = {}, []
    named = (ref for ref in list_images(patterns) if isinstance(ref, ImageRef))
    for ref in shown(named, "reading photos", "photos"):
        content = read_file(ref.uri)
        with quiet_stderr():  # libjpeg's own lines about a damaged file
            decoded = decode_image(content, _MAX_PIXELS)
        if isinstance(decoded, Failure):
            broken.append(f"{ref.uri}: {decoded.message}")
        else:
            digests[hashlib.sha256(content).digest()] = ref
    if broken:
        console.warning("%s left out, such as %s", plural(len(broken), "photo"), broken[0])
    photos = [ref for _, ref in sorted(digests.items())]
    if len(photos) < _FEWEST:
        raise InputError(f"calibration: expected at least {_FEWEST} different photos, better some hundred, got {len(photos)}")
    half = min(len(photos) // 2, _MOST_CALIBRATION)
    return photos[:half], photos[half:]


def quantise(network: str, images: Sequence[np.ndarray], target: str) -> None:
    """Quantises all but the head to int8, weights by channel and activations by what they are on some images.

    Args:
      network: Folder of the network in float32 (`openvino_convert`).
      images: Of the model's input size, `(H, W, 3) uint8`, to calibrate with.
      target: Folder to write.

    Raises:
      ModelError: NNCF cannot quantise the model.
    """
    os.environ["NNCF_CI"] = "1"  # else NNCF reports its use over the network
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(os.path.join(network, NETWORK))
    head, batch = head_of(model), model.inputs[0].shape[0]
    console.info("calibrating")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # NNCF draws bars of its own
            small = nncf.quantize(
                model,
                nncf.Dataset(images, lambda image: np.stack([image] * batch)),
                preset=nncf.QuantizationPreset.MIXED,  # activations may be negative after leaky ReLU, Mish and SiLU
                subset_size=len(images),
                ignored_scope=nncf.IgnoredScope(names=head, validate=False),
            )
    except Exception as err:
        raise ModelError(f"quantize: NNCF cannot quantise the model: {first_line(err)}") from err
    write_network(target, small, read_description(network))
    keep_requests(target, kept_requests(network))


def head_of(model: Any) -> list[str]:
    """Names of the operations to keep in float32: the last convolutions, behind which no other one stands, and all behind them.

    Raises:
      ModelError: No convolution is left to quantise.
    """
    operations = [(each.get_friendly_name(), each) for each in model.get_ordered_ops()]
    convolutions = {name for name, each in operations if each.get_type_name() in _CONVOLUTIONS}
    before = set[str]()  # operations with a convolution behind them
    for name, each in reversed(operations):
        behind = {target.get_node().get_friendly_name() for output in each.outputs() for target in output.get_target_inputs()}
        if behind & convolutions or behind & before:
            before.add(name)
    if not convolutions & before:
        raise ModelError("quantize: expected a model with convolutions before its head, found none; it stays as it is")
    head = convolutions - before
    for name, each in operations:
        if any(value.get_source_output().get_node().get_friendly_name() in head for value in each.inputs()):
            head.add(name)
    return sorted(head)


def _rows(model: ModelConfig, detect: DetectConfig, photos: Sequence[ImageRef]) -> Rows:
    """What a model finds in photos, in their order."""
    rows = []
    with contextlib.closing(load_detector(model, detect)) as detector:
        for first in shown(range(0, len(photos), _TOGETHER), f"judging {detect.precision}", f"times {_TOGETHER} photos"):
            for found in detector.detect(photos[first : first + _TOGETHER]):
                if isinstance(found, DeadLetter):
                    raise ModelError(f"{found.ref.uri}: {found.message}")
                rows.append(detection_row(found))
    return rows


def _compared(before: Rows, after: Rows, flags: argparse.Namespace) -> dict[str, Any]:
    """Figures of both precisions on the same photos.

    Raises:
      _RefusedError: int8 is not good enough.
      InputError: There is nothing to find.
    """
    figures = {"agreement": compare(_sure(after), _sure(before), match="path")["agreement"]}
    if figures["agreement"] is None:
        raise InputError(
            f"calibration: no object in the {len(before)} photos that judge, which shows nothing; give photos with objects"
        )
    if not flags.ground_truth:
        if figures["agreement"] < flags.min_agreement:
            wanted = f"--min-agreement is {flags.min_agreement}; nothing is written"
            raise _RefusedError(f"the agreement with float32 is {figures['agreement']:.3f}, {wanted}")
        return figures
    figures |= {"float32_ap50": _ap50(before, flags.ground_truth), "int8_ap50": _ap50(after, flags.ground_truth)}
    if not figures["float32_ap50"] > 0:  # or NaN
        raise RowsError(
            f"ground truth {flags.ground_truth}: float32 finds none of its objects in the {len(before)} photos that judge"
        )
    figures["ap50_loss"] = loss = figures["float32_ap50"] - figures["int8_ap50"]
    if loss > flags.max_ap_loss:
        raise _RefusedError(f"AP50 falls by {loss:.2f} points, --max-ap-loss is {flags.max_ap_loss}; nothing is written")
    return figures


def _sure(rows: Rows) -> Rows:
    return [{**row, "detections": [one for one in row["detections"] if one["confidence"] >= _SURE]} for row in rows]


def _ap50(rows: Rows, ground_truth: str) -> float:
    """AP50 in points, on the judged photos alone; NaN if no object is labelled in them."""
    measured = measure(rows, ground_truth)
    judged = np.array([float(image in measured.pairing.rows) for image in range(measured.matches.n_images)])
    return 100 * float(mean_figures(measured.matches, judged)[1])
