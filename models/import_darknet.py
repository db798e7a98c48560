"""`detect-objects import`, `python -m models.import_darknet`: converts a YOLO model in Darknet's format to a SavedModel."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from models.darknet.cfg import DarknetError
from models.darknet.network import Network, parse_network
from models.darknet.weights import ConvolutionWeights, read_weights
from models.export import check_output_dir, export_detector
from models.metadata import DetectorMetadata, Resize
from models.progress import step
from models.quiet import quiet_stderr

_DESCRIPTION = """\
Converts a YOLO model in Darknet's format (yolov3, yolov4, their -tiny, -spp, -csp and x-mish forms, Yolo-Fastest,
MobileNetV2-YOLOv3) to a SavedModel that the pipeline, TF Serving and Vertex AI run as it is. The SavedModel takes batches,
contains box decoding and non-maximum suppression, and has the thresholds as inputs with defaults."""

_EPILOG = """\
example:
  detect-objects import --cfg yolov4.cfg --weights yolov4.weights --names coco.names --output models/yolov4/1

The output directory is <model>/<integer version>, as TF Serving expects it. It must not exist yet, and appears whole or not at
all. Non-maximum suppression is greedy, by IoU and class, also if the cfg has another nms_kind=.
Exit code: 0 done; 2 the files or the arguments cannot be used (one line on stderr names the reason; nothing is written)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = make_parser().parse_args(argv)
    try:
        said = import_darknet(
            cfg_path=args.cfg,
            weights_path=args.weights,
            names_path=args.names,
            output_dir=args.output,
            input_hw=args.input_size,
            resize=args.resize,
            name=args.name,
        )
    except (DarknetError, OSError) as err:
        reason = f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err)
        print(f"import_darknet: {reason}", file=sys.stderr)
        return 2
    print(f"{args.output}: {said}")
    return 0


def import_darknet(
    cfg_path: str,
    weights_path: str,
    names_path: str,
    output_dir: str,
    *,
    input_hw: tuple[int, int] | None = None,
    resize: Resize | None = None,
    name: str = "",
) -> str:
    """Reads a Darknet model and writes it as a SavedModel.

    Args:
      cfg_path: The cfg.
      weights_path: Its weights.
      names_path: Class names, one a line.
      output_dir: Directory to write, `<model>/<integer version>`; must not exist.
      input_hw: Height and width of the input, multiples of 32; default: those in the cfg.
      resize: How images are resized to the input; default: `letterbox` if the cfg has `letter_box=1`, else `stretch`.
      name: Name of the model; default: that of the cfg.

    Returns:
      A line that says what the model is.

    Raises:
      DarknetError: A file cannot be used; the message names it, and has what was expected and what came.
      OSError: A file cannot be read, or the output cannot be written.
    """
    check_output_dir(output_dir)
    network = _read_network(cfg_path, input_hw)
    metadata = DetectorMetadata(
        name=name or os.path.splitext(os.path.basename(cfg_path))[0],
        input_hw=network.input_hw,
        resize=resize or ("letterbox" if network.letter_box else "stretch"),
        class_names=read_names(names_path, network.classes),
    )
    with step("1 of 3, reading the weights"):
        weights = read_weights(weights_path, network)
    _warn_of_odd_weights(weights_path, network, weights)

    _export(network, weights, metadata, output_dir)
    h, w = network.input_hw
    return (
        f"{metadata.name}, Darknet, {len(network.layers)} layers, {network.value_count:,} values, {network.classes} classes, "
        f"input {h}x{w} ({metadata.resize})"
    )


def _export(network: Network, weights: Sequence[ConvolutionWeights], metadata: DetectorMetadata, output_dir: str) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with step("2 of 3, loading TensorFlow"), quiet_stderr():  # takes seconds, so only after the files were checked
        import tensorflow as tf

        from models.darknet.detector import DarknetDetector

    with contextlib.suppress(RuntimeError):  # TensorFlow runs in this process already
        tf.config.set_visible_devices([], "GPU")  # the export needs no GPU, and must not take the memory of a serving process
    with step("3 of 3, writing the SavedModel"):
        detector = DarknetDetector(network, weights)
        export_detector(detector, metadata, output_dir, variables=detector.variables)


def _read_network(cfg_path: str, input_hw: tuple[int, int] | None) -> Network:
    text = _read_text(cfg_path)
    try:
        return parse_network(text, input_hw)
    except DarknetError as err:
        raise DarknetError(f"{cfg_path}: {err}") from err


def _warn_of_odd_weights(weights_path: str, network: Network, weights: Sequence[ConvolutionWeights]) -> None:
    lines = [layer.line for layer, w in zip(network.convolutions, weights, strict=True) if not w.is_finite]
    if lines:
        print(
            f"import_darknet: warning: {weights_path}: {len(lines)} of {len(weights)} convolutions, the first on line {lines[0]} "
            "of the cfg, have weights that are no finite numbers (or negative variances): the model may detect nothing",
            file=sys.stderr,
        )


def read_names(names_path: str, classes: int | None = None) -> tuple[str, ...]:
    """The class names in a text file, one a line.

    Raises:
      DarknetError: A line is empty, or there are not as many names as `classes`.
    """
    names = tuple(line.strip() for line in _read_text(names_path).rstrip().splitlines())
    if classes is not None and len(names) != classes:
        raise DarknetError(
            f"{names_path}: expected {classes} names, one a line, for the cfg's classes={classes}, got {len(names)}"
        )
    if "" in names:
        raise DarknetError(f"{names_path}: line {names.index('') + 1} is empty, expected a class name")
    return names


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8-sig") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as err:
            raise DarknetError(f"{path}: expected a text file in UTF-8, byte {err.start} is not") from err
    if text.startswith("version https://git-lfs"):
        raise DarknetError(f"{path}: is a Git LFS pointer, not the file itself; run git lfs pull")
    return text


def make_parser(*, darknet_only: bool = True) -> argparse.ArgumentParser:
    """The parser of the command line; the cfg, weights and names are required unless another module takes other formats."""
    parser = argparse.ArgumentParser(
        prog="detect-objects import",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cfg", required=darknet_only, metavar="FILE", help="the network: layers, anchors, input size")
    parser.add_argument("--weights", required=darknet_only, metavar="FILE", help="its weights; must fit the cfg to the byte")
    parser.add_argument(
        "--names", required=darknet_only, metavar="FILE", help="class names, one a line, as many as the cfg has classes"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to write, for example models/yolov4/1")
    parser.add_argument(
        "--input-size",
        type=_input_size,
        metavar="SIZE",
        help="input in pixels, one number or HEIGHTxWIDTH, multiples of 32 in a Darknet model (default: the size in the file); "
        "larger finds smaller objects and takes longer",
    )
    parser.add_argument(
        "--resize",
        choices=("stretch", "letterbox"),
        help="how images become the input: stretch (Darknet's default), or letterbox, which keeps the aspect ratio and pads "
        "(default: letterbox if the cfg has letter_box=1)",
    )
    parser.add_argument("--name", default="", help="name that the model gives itself (default: the cfg's file name)")
    return parser


def _input_size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"expected one number or HEIGHTxWIDTH, for example 608 or 320x640, got {text!r}")
    return int(sides[0]), int(sides[-1])


if __name__ == "__main__":
    sys.exit(main())
