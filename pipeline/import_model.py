"""`detect-objects import`: a dispatcher to the importer of a model's format; of other formats it prints the command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from models import import_darknet
from models.darknet.cfg import DarknetError
from models.import_onnx import import_onnx, in_environment
from models.onnx.environment import OnnxError
from pipeline.detect.other_formats import what_it_is

_DESCRIPTION = """\
Turns a model into a SavedModel that the pipeline runs: an ONNX file, or a YOLO model in Darknet's format (--cfg, --weights and
--names). Of other formats it prints the command that converts them."""

_EPILOG = """\
examples:
  detect-objects import yolov8n.onnx --output models/yolov8n/1
  detect-objects import --cfg yolov4.cfg --weights yolov4.weights --names coco.names --output models/yolov4/1

The first ONNX model makes an environment with the converter, 2.5 GB in the cache folder of this program, and takes minutes. The
result is refused if its outputs differ from ONNX Runtime's on a photo. The output directory is <model>/<integer version>. It must
not exist yet, and appears whole or not at all.
Exit code: 0 done; 130 stopped; 2 refused, or the files or the arguments cannot be used (one line on stderr names the reason)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.file is None:
        return import_darknet.main(arguments)
    if args.cfg or args.weights or args.resize or args.name:
        parser.error("--cfg, --weights, --resize and --name belong to models in Darknet's format, without FILE")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the converter too, and leaves nothing behind
    try:
        print(_import_file(args))
    except (OnnxError, DarknetError, OSError) as err:
        reason = f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err)
        print(f"import: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _import_file(args: argparse.Namespace) -> str:
    if not args.file.lower().endswith(".onnx"):
        if not os.path.lexists(args.file) or not (known := what_it_is(args.file)):
            raise OnnxError(f"{args.file}: expected an ONNX model, a file that ends with .onnx")
        raise OnnxError(f"{args.file}: {known}")
    convert = in_environment(args.converter) if args.converter else None
    return import_onnx(args.file, args.output, input_hw=args.input_size, names_path=args.names, convert=convert)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = import_darknet.make_parser(darknet_only=False)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("file", nargs="?", metavar="FILE", help="an ONNX model")
    parser.add_argument(
        "--converter", metavar="FILE", help="ONNX: Python of an environment with the packages of models/onnx/requirements.txt"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
