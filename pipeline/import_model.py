"""`detect-objects import`: a dispatcher to the importer of a model's format; of other formats it prints the command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence

from models import import_darknet
from models.darknet.cfg import DarknetError
from models.export import check_output_dir, existing_ancestor
from models.golden import GoldenError, write_golden
from models.import_onnx import SCENE, import_onnx, in_environment
from models.metadata import DetectorMetadata, write_metadata
from models.onnx.environment import OnnxError
from models.progress import step
from models.quiet import quiet_stderr
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import saved_model
from pipeline.detect.golden import GOLDEN
from pipeline.detect.other_formats import what_it_is
from pipeline.detect.versions import locate
from pipeline.errors import ModelError
from pipeline.report.formats import counted

_DESCRIPTION = """\
Turns a model into a SavedModel that the pipeline runs: an ONNX file, a YOLO model in Darknet's format (--cfg, --weights and
--names), or a SavedModel of others, which it copies with a description. Of other formats it
prints the command that converts them."""

_EPILOG = """\
examples:
  detect-objects import yolov8n.onnx --output models/yolov8n/1
  detect-objects import --cfg yolov4.cfg --weights yolov4.weights --names coco.names --output models/yolov4/1
  detect-objects import yolov8n_saved_model --image photo.jpg --output models/yolov8n/1

A SavedModel is refused if the pipeline does not recognise it, or if it fails on a picture. Its golden images are not copied.
The first ONNX model makes an environment with the converter, 2.5 GB in the cache folder of this program, and takes minutes. The
result is refused if its outputs differ from ONNX Runtime's on a photo. The output directory is <model>/<integer version>. It must
not exist yet, and appears whole or not at all.
Exit code: 0 done; 130 stopped; 2 refused, or the files or the arguments cannot be used (one line on stderr names the reason)."""

_DEFAULTS = DetectConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.file is None:
        if args.image:
            parser.error("--image belongs to SavedModels, given as FILE")
        return import_darknet.main(arguments)
    if args.cfg or args.weights or args.resize or args.name:
        parser.error("--cfg, --weights, --resize and --name belong to models in Darknet's format, without FILE")
    folder = os.path.isdir(args.file)
    if folder and (args.input_size or args.converter):
        parser.error("--input-size and --converter belong to other formats than SavedModels")
    if args.image and not folder:
        parser.error("--image belongs to SavedModels, given as a folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the converter too, and leaves nothing behind
    try:
        print(_import_file(args))
    except (OnnxError, DarknetError, ModelError, GoldenError, OSError) as err:
        reason = f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err)
        print(f"import: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _import_file(args: argparse.Namespace) -> str:
    if os.path.isdir(args.file):
        return import_saved_model(args.file, args.output, names_path=args.names, image=args.image)
    if not args.file.lower().endswith(".onnx"):
        if not os.path.lexists(args.file) or not (known := what_it_is(args.file)):
            raise OnnxError(f"{args.file}: expected an ONNX model, a file that ends with .onnx")
        raise OnnxError(f"{args.file}: {known}")
    convert = in_environment(args.converter) if args.converter else None
    return import_onnx(args.file, args.output, input_hw=args.input_size, names_path=args.names, convert=convert)


def import_saved_model(path: str, output_dir: str, *, names_path: str | None = None, image: str | None = None) -> str:
    """Copies a SavedModel, with the metadata that the loader recognises, if it runs on a picture.

    Args:
      path: The SavedModel, or a folder of versions, whose newest counts.
      output_dir: Directory to write, `<model>/<integer version>`; must not exist. It appears whole or not at all.
      names_path: Class names, one a line; default: those in the model's own metadata.
      image: A picture to try, which becomes a golden image; default: a sample scene, which does not.

    Returns:
      A line that says what the model is, and how many objects it finds.

    Raises:
      ModelError: The folder has no SavedModel that the loader recognises.
      GoldenError: The model fails on the picture, or the picture cannot be used.
      DarknetError: The names cannot be used.
      OSError: A file cannot be read, or the output cannot be written.
    """
    check_output_dir(output_dir)
    names = import_darknet.read_names(names_path) if names_path else None
    folder, _ = locate(path, None)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=existing_ancestor(output_dir)) as scratch:
        version = shutil.copytree(folder, os.path.join(scratch, "1"))
        shutil.rmtree(os.path.join(version, GOLDEN), ignore_errors=True)  # of other names or thresholds
        with step("1 of 2, recognising the model"), quiet_stderr():
            model = ModelConfig(path=folder, class_names=names)
            *_, metadata = saved_model.described_signature(version, folder, model, DetectConfig())
        write_metadata(version, metadata)
        with step("2 of 2, trying it on a picture"):
            count = _objects(version, image, folder)
        os.makedirs(os.path.dirname(os.path.abspath(output_dir)), exist_ok=True)
        os.rename(version, output_dir)
    return f"{output_dir}: {_text(metadata)}; {_found(count, image)}"


def _objects(version: str, image: str | None, folder: str) -> int:
    """The number of objects that a job finds in a picture, whose rows stay as golden rows if the user gave it."""
    try:
        write_golden(version, [image or SCENE], version, _DEFAULTS.score_threshold, _DEFAULTS.iou_threshold)
    except GoldenError as err:
        raise GoldenError(str(err).replace(version, folder)) from err
    with open(os.path.join(version, GOLDEN, "detections.jsonl"), encoding="utf-8") as rows:
        count = sum(len(json.loads(row)["detections"]) for row in rows)
    if not image:
        shutil.rmtree(os.path.join(version, GOLDEN))
    return count


def _text(metadata: DetectorMetadata) -> str:
    height, width = metadata.input_hw
    size = "images at their own size" if metadata.resize == "none" else f"input {height}x{width} ({metadata.resize})"
    classes = counted(len(metadata.class_names), "class name") if metadata.class_names else "no class names (give --names)"
    return f"{metadata.name}, {size}, {classes}, suppression by the {metadata.nms}"


def _found(count: int, image: str | None) -> str:
    picture = image or "a sample scene"
    if count:
        return f"{counted(count, 'object')} in {picture}"
    return f"warning: no object in {picture}; try --image with a photo of what the model knows"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = import_darknet.make_parser(darknet_only=False)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("file", nargs="?", metavar="FILE", help="an ONNX model, or the folder of a SavedModel")
    parser.add_argument("--image", metavar="FILE", help="SavedModel: a photo to try it on, which becomes a golden image")
    parser.add_argument(
        "--converter", metavar="FILE", help="ONNX: Python of an environment with the packages of models/onnx/requirements.txt"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
