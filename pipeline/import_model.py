"""`detect-objects import`: a dispatcher to the importer of a model's format; of other formats it prints the command.

Exit code 0: done; 2: refused, or a wrong command; nothing is written; 130: stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence

import models
from models import import_darknet
from models.darknet.cfg import DarknetError
from models.export import check_output_dir, existing_ancestor
from models.golden import GoldenError, NoObjectError, write_golden
from models.import_darknet import read_names
from models.import_keras import KerasError, import_keras
from models.manifest import write_manifest
from models.metadata import read_metadata, write_metadata
from models.progress import step
from models.quiet import quiet_stderr
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.families import family_of
from pipeline.detect.golden import GOLDEN
from pipeline.detect.load_model import recognised
from pipeline.detect.other_formats import what_it_is
from pipeline.detect.versions import ONNX_MODEL, locate
from pipeline.errors import ModelError
from pipeline.report.formats import counted

_DESCRIPTION = """\
Turns a model into a SavedModel that the pipeline runs: an ONNX or a Keras file, a YOLO model in Darknet's format (--cfg,
--weights and --names), or a SavedModel of others, which it copies with a description. Of other formats it prints the command
that converts them."""

_EPILOG = """\
examples:
  detect-objects import yolov8n.onnx --image photo.jpg --output models/yolov8n/1   (or simply: run --model yolov8n.onnx)
  detect-objects import --cfg yolov4.cfg --weights yolov4.weights --names coco.names --output models/yolov4/1
  detect-objects import yolov8n_saved_model --image photo.jpg --output models/yolov8n/1

The last line says what the model is, and how many objects a job finds in the photo. A model is refused if the pipeline does not
recognise it, or if it fails on the photo. An ONNX file is copied as it is. The output directory is <model>/<integer version>.
It must not exist yet, and appears whole or not at all.
Exit code: 0 done; 130 stopped; 2 refused, or the files or the arguments cannot be used (one line on stderr names the reason)."""

_DEFAULTS = DetectConfig()
SCENE = os.path.join(os.path.dirname(models.__file__), "digits", "samples", "scene_000.jpg")
_FLAGS = {  # of some formats only
    "cfg": ("Darknet",),
    "weights": ("Darknet",),
    "resize": ("Darknet",),
    "name": ("Darknet",),
    "input_size": ("Darknet", "ONNX"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the converter too, and leaves nothing behind
    try:
        print(f"{args.output}: {'; '.join(_import(args))}")
    except (DarknetError, KerasError, ModelError, GoldenError, OSError) as err:
        reason = f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err)
        print(f"import: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    args.format = _format_of(args.file)
    for flag, formats in _FLAGS.items():
        if getattr(args, flag) and args.format not in (*formats, ""):
            parser.error(f"--{flag.replace('_', '-')} belongs to models of {' and '.join(formats)}")
    if args.format == "Darknet" and (missing := [f"--{flag}" for flag in ("cfg", "weights", "names") if not getattr(args, flag)]):
        parser.error(f"expected FILE, or a Darknet model's --cfg, --weights and --names; {' and '.join(missing)} are missing")
    return args


def _format_of(path: str | None) -> str:
    """`Darknet`, whose files have flags of their own, `SavedModel`, `ONNX` or `Keras`; empty if the format is another one."""
    if path is None:
        return "Darknet"
    if os.path.isdir(path):
        return "SavedModel"
    return {".onnx": "ONNX", ".keras": "Keras", ".h5": "Keras", ".hdf5": "Keras"}.get(os.path.splitext(path)[1].lower(), "")


def _import(args: argparse.Namespace) -> Iterator[str]:
    """Writes the SavedModel, tries it on a picture, and tells what it is, in parts of a line."""
    check_output_dir(args.output)
    if args.image:
        open(args.image, "rb").close()
    with tempfile.TemporaryDirectory(prefix=".import-", dir=existing_ancestor(args.output)) as scratch:
        version = os.path.join(scratch, "1")
        yield from _convert(args, version)
        if read_metadata(version):  # else a job needs more settings
            with step("trying it on a picture"):
                yield _tried(version, args.image, args.file or args.cfg)
        write_manifest(version)
        os.makedirs(os.path.dirname(os.path.abspath(args.output)), exist_ok=True)
        os.rename(version, args.output)


def _convert(args: argparse.Namespace, version: str) -> Iterator[str]:
    """Writes a SavedModel into the folder `version`, with the metadata that the loader recognises."""
    if args.format == "Darknet":
        files = (args.cfg, args.weights, args.names, version)
        yield import_darknet.import_darknet(*files, input_hw=args.input_size, resize=args.resize, name=args.name)
        return
    names, title = read_names(args.names) if args.names else None, os.path.splitext(os.path.basename(args.file))[0]
    if args.format == "SavedModel":
        source, _ = locate(args.file, None)
        shutil.copytree(source, version)
        shutil.rmtree(os.path.join(version, GOLDEN), ignore_errors=True)  # of other names or thresholds
        yield _recognise(version, source, ModelConfig(path=source, class_names=names))
    elif args.format == "Keras":
        import_keras(args.file, version)
        yield _recognise(version, args.file, ModelConfig(path=args.file, class_names=names, name=title))
    elif args.format == "ONNX":
        os.mkdir(version)
        shutil.copy(args.file, os.path.join(version, ONNX_MODEL))
        yield _recognise(version, args.file, ModelConfig(path=args.file, class_names=names, name=title, input_hw=args.input_size))
    else:
        known = what_it_is(args.file) if os.path.lexists(args.file) else ""
        raise ModelError(f"{args.file}: {known or 'expected a file that ends with .onnx, .keras or .h5, or a folder'}")


def _recognise(version: str, folder: str, model: ModelConfig) -> str:
    """Writes the metadata that a job would recognise; says in words what the model is."""
    with step("recognising the model"), quiet_stderr():
        metadata = recognised(version, folder, model)
    write_metadata(version, metadata)
    height, width = metadata.input_hw
    size = "images at their own size" if metadata.resize == "none" else f"input {height}x{width} ({metadata.resize})"
    classes = counted(len(metadata.class_names), "class name") if metadata.class_names else "no class names (give --names)"
    return f"{metadata.name}, {family_of(metadata)}, {size}, {classes}, suppression by the {metadata.nms}"


_ON_SAMPLE = "runs on a sample picture; --image tries a photo of yours, and keeps it as a golden image"


def _tried(version: str, image: str | None, source: str) -> str:
    """Says how many objects a job finds in a picture, which becomes a golden image if the user gave it."""
    try:
        write_golden(version, [image or SCENE], version, _DEFAULTS.score_threshold, _DEFAULTS.iou_threshold)
    except NoObjectError:
        return f"warning: no object in {image}" if image else _ON_SAMPLE
    except GoldenError as err:
        raise GoldenError(str(err).replace(version, source)) from err
    golden = os.path.join(version, GOLDEN)
    with open(os.path.join(golden, "detections.jsonl"), encoding="utf-8") as rows:
        count = sum(len(json.loads(row)["detections"]) for row in rows)
    if not image:
        shutil.rmtree(golden)
        return _ON_SAMPLE
    return f"{counted(count, 'object')} in {image}"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = import_darknet.make_parser(darknet_only=False)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("file", nargs="?", metavar="FILE", help="an ONNX or Keras file, or the folder of a SavedModel")
    parser.add_argument("--image", metavar="FILE", help="a photo to try the model on, which becomes a golden image")
    return parser


if __name__ == "__main__":
    sys.exit(main())
