"""`detect-objects import`: turns a model into a version that describes itself; of other formats it prints the command.

Exit code 0: done; 1: the disk is full, nothing is written; 2: refused, or a wrong command, nothing is written; 130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Sequence

from models import digits
from models.base.quiet import quiet_stderr
from models.class_names import read_class_names
from models.export import written_whole
from models.import_darknet import import_darknet
from models.manifest import MANIFEST
from models.metadata import write_metadata
from pipeline.config import ModelConfig
from pipeline.detect.describe_model import own_metadata
from pipeline.detect.families import family_of
from pipeline.detect.golden import GOLDEN
from pipeline.detect.load_model import recognised
from pipeline.detect.openvino_convert import HIDDEN
from pipeline.detect.other_formats import what_it_is
from pipeline.detect.versions import ONNX_MODEL, files_of, how_to_use, locate
from pipeline.detect.write_golden import NoObjectError, write_golden
from pipeline.errors import CommandParser, InputError, ModelError, UserError, run_command
from pipeline.log_lines import console
from pipeline.report.texts import counted

_DESCRIPTION = """\
Turns a model into a version that the pipeline runs and that describes itself: a YOLO model in Darknet's format (--cfg, --weights
and --names: yolov3, yolov4, their -tiny, -spp, -csp and x-mish forms, Yolo-Fastest, MobileNetV2-YOLOv3) becomes a SavedModel that
TF Serving and Vertex AI run, too; an ONNX file or a SavedModel of others is copied. Of other formats it prints the command that
converts them."""

_EPILOG = """\
examples:
  detect-objects import yolov8n.onnx --image photo.jpg --output models/yolov8n/1   (or simply: run --model yolov8n.onnx)
  detect-objects import --cfg yolov4.cfg --weights yolov4.weights --names coco.names --output models/yolov4/1
  detect-objects import yolov8n_saved_model --image photo.jpg --output models/yolov8n/1

The last lines say what the model is, how many objects a job finds in the photo, and which command uses it. A model is refused if
the pipeline does not recognise it, or if it fails on the photo. The output directory is <model>/<integer version>. It must not
exist yet, and appears whole or not at all. Non-maximum suppression of a Darknet model is greedy, by IoU and class, whatever
nms_kind= its cfg has.
Exit code: 0 done; 1 the disk is full; 2 refused, or the files or the arguments cannot be used (one line on stderr names the
reason); 130 stopped."""

_SCENE = os.path.join(digits.FOLDER, "samples", "scene_000.jpg")
_ON_SAMPLE = "runs on a sample picture; --image tries a photo of yours, and keeps it as a golden image"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _arguments(argv)
    return run_command(lambda: _import(args), "nothing was imported", failed_code=2, folder=args.output)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    given = [f"--{flag}" for flag in ("cfg", "weights", "resize", "name") if getattr(args, flag)]
    if args.file and given:
        parser.error(f"{given[0]} belongs to models of Darknet")
    if not args.file and (missing := [f"--{flag}" for flag in ("cfg", "weights", "names") if not getattr(args, flag)]):
        parser.error(f"expected FILE, or a Darknet model's --cfg, --weights and --names; {' and '.join(missing)} are missing")
    if args.input_size and args.file and not args.file.lower().endswith(".onnx"):
        parser.error("--input-size belongs to models of Darknet and ONNX")
    return args


def _import(args: argparse.Namespace) -> int:
    with written_whole(args.output) as version:
        if args.image:
            open(args.image, "rb").close()
        if args.file:
            what = _copy(args, version)
        else:
            files = (args.cfg, args.weights, args.names, version)
            what = import_darknet(*files, input_hw=args.input_size, resize=args.resize, name=args.name)
        tried = _tried(version, args.image, args.file or args.cfg)
    print(f"{args.output}: {what}; {tried}")
    print(how_to_use(args.output.rstrip("/")))
    return 0


def _copy(args: argparse.Namespace, version: str) -> str:
    """Copies a model into the folder `version` with the metadata that a job would recognise; says in words what it is."""
    title, folder = None, args.file
    if os.path.isdir(args.file):
        folder, _ = locate(args.file, None)
        shutil.copytree(folder, version, ignore=shutil.ignore_patterns(HIDDEN))
        shutil.rmtree(os.path.join(version, GOLDEN), ignore_errors=True)  # of other names or thresholds
        with contextlib.suppress(FileNotFoundError):  # it lists the files as they were
            os.remove(os.path.join(version, MANIFEST))
    elif args.file.lower().endswith(".onnx"):
        title = os.path.splitext(os.path.basename(args.file))[0]
        os.mkdir(version)
        for file in files_of(args.file):  # with its external data, which has the name that the file knows
            name = os.path.basename(file.path)
            shutil.copy(file.path, os.path.join(version, ONNX_MODEL if name == os.path.basename(args.file) else name))
    else:
        known = what_it_is(args.file) if os.path.lexists(args.file) else ""
        raise ModelError(f"{args.file}: {known or 'expected a file that ends with .onnx, or the folder of a SavedModel'}")
    try:
        names = read_class_names(args.names) if args.names else None
    except ValueError as err:
        raise InputError(f"{args.names}: {err}") from err
    console.info("recognising the model")
    with quiet_stderr():
        metadata = recognised(version, folder, ModelConfig(folder, class_names=names, name=title, input_hw=args.input_size))
    if own := own_metadata(version, folder):  # which has several signatures, of which this machine uses one
        metadata = dataclasses.replace(own, class_names=metadata.class_names)
    write_metadata(version, metadata)
    height, width = metadata.input_hw
    size = "images at their own size" if metadata.resize == "none" else f"input {height}x{width} ({metadata.resize})"
    classes = counted(len(metadata.class_names), "class name") if metadata.class_names else "no class names (give --names)"
    return f"{metadata.name}, {family_of(metadata)}, {size}, {classes}, suppression by the {metadata.nms}"


def _tried(version: str, image: str | None, source: str) -> str:
    """Says how many objects a job finds in a picture, which becomes a golden image if the user gave it."""
    console.info("trying it on a picture")
    try:
        (found,) = write_golden(version, [image or _SCENE], version)
    except NoObjectError:
        return f"warning: no object in {image}" if image else _ON_SAMPLE
    except UserError as err:
        raise ModelError(str(err).replace(version, source)) from err
    if image:
        return f"{counted(len(found.detections), 'object')} in {image}"
    shutil.rmtree(os.path.join(version, GOLDEN))
    return _ON_SAMPLE


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects import",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="an ONNX file, or the folder of a SavedModel")
    add("--output", required=True, metavar="DIR", help="directory to write, for example models/yolov4/1")
    add("--image", metavar="FILE", help="a photo to try the model on, which becomes a golden image")
    add("--names", metavar="FILE", help="class names, one a line; of a Darknet model as many as the cfg has classes")
    add("--cfg", metavar="FILE", help="Darknet: the network: layers, anchors, input size")
    add("--weights", metavar="FILE", help="Darknet: its weights; must fit the cfg to the byte")
    add(
        "--input-size",
        type=_input_size,
        metavar="SIZE",
        help="input in pixels, one number or HEIGHTxWIDTH, multiples of 32 in a Darknet model (default: the size in the file); "
        "larger finds smaller objects and takes longer",
    )
    add(
        "--resize",
        choices=("stretch", "letterbox"),
        help="Darknet: how images become the input: stretch (Darknet's default), or letterbox, which keeps the aspect ratio and "
        "pads (default: letterbox if the cfg has letter_box=1)",
    )
    add("--name", default="", help="Darknet: name that the model gives itself (default: the cfg's file name)")
    return parser


def _input_size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"expected one number or HEIGHTxWIDTH, for example 608 or 320x640, got {text!r}")
    return int(sides[0]), int(sides[-1])
