"""Converts a YOLO model in Darknet's format to a SavedModel; `detect-objects import` is the command."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from models.base.quiet import quiet_stderr
from models.class_names import read_class_names
from models.darknet.cfg import DarknetError
from models.darknet.network import parse_network
from models.darknet.weights import read_weights
from models.export import export_detector
from models.metadata import DetectorMetadata, Resize


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
    with _naming(cfg_path):
        network = parse_network(Path(cfg_path).read_text(encoding="utf-8-sig"), input_hw)
    with _naming(names_path):
        names = read_class_names(names_path)
        if len(names) != network.classes:
            raise DarknetError(
                f"expected {network.classes} names, one a line, for the cfg's classes={network.classes}, got {len(names)}"
            )
    resize = resize or ("letterbox" if network.letter_box else "stretch")
    metadata = DetectorMetadata(name or Path(cfg_path).stem, network.input_hw, resize, names)
    print("1 of 2: reading the weights", file=sys.stderr, flush=True)
    weights = read_weights(weights_path, network)
    if odd := [layer.line for layer, w in zip(network.convolutions, weights, strict=True) if not w.is_finite]:
        print(
            f"warning: {weights_path}: {len(odd)} of {len(weights)} convolutions, the first on line {odd[0]} of the cfg, "
            "have weights that are no finite numbers (or negative variances): the model may detect nothing",
            file=sys.stderr,
        )
    print("2 of 2: writing the SavedModel", file=sys.stderr, flush=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet_stderr():  # takes seconds, so only after the files were checked
        import tensorflow as tf

        from models.darknet.detector import DarknetDetector

    with contextlib.suppress(RuntimeError):  # TensorFlow runs in this process already
        tf.config.set_visible_devices([], "GPU")  # the export needs no GPU, and must not take the memory of a serving process
    detector = DarknetDetector(network, weights)
    in_float16 = functools.partial(detector, dtype=tf.float16)
    export_detector(detector, metadata, output_dir, variables=detector.variables, predict_float16=in_float16)
    h, w = network.input_hw
    return (
        f"{metadata.name}, Darknet, {len(network.layers)} layers, {network.value_count:,} values, {network.classes} class"
        f"{'es' * (network.classes != 1)}, input {h}x{w} ({metadata.resize})"
    )


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors of a file's content name the file."""
    try:
        yield
    except UnicodeDecodeError as err:
        hint = "; are --cfg and --weights swapped?" if path.endswith(".weights") else ""
        raise DarknetError(f"{path}: expected text, got {err.object[err.start]:#x} as byte {err.start}{hint}") from err
    except ValueError as err:
        raise DarknetError(f"{path}: {err}") from err
