"""Exports the committed weights as a SavedModel.

    python -m models.digits.export --output build/models/digits/1

The export takes seconds and needs no network connection.
"""

from __future__ import annotations

import argparse
import os
import sys

from models.metadata import DetectorMetadata

WEIGHTS_PATH = os.path.join(os.path.dirname(__file__), "weights.npz")
# letterbox, since the proportions of a digit tell a 0 from a 6 and a 1 from a 7
METADATA = DetectorMetadata(name="digits", input_hw=(320, 320), resize="letterbox", class_names=tuple("0123456789"))


def export_digits(output_dir: str, weights_path: str = WEIGHTS_PATH) -> None:
    """Writes the digit detector's SavedModel.

    Args:
        output_dir: local directory that does not exist yet, `<model>/<integer version>`.
        weights_path: weights in the layout of the committed ones.

    Raises:
        FileExistsError: `output_dir` exists.
        OSError: the weights cannot be read or the output cannot be written.
        ValueError: the weights do not fit the network.
    """
    from models.digits.network import FoldedNetwork, load_weights
    from models.export import export_detector

    network = FoldedNetwork(load_weights(weights_path))
    export_detector(network.predict, METADATA, output_dir, variables=network.variables)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.digits.export", description="Export the bundled digit detector.")
    parser.add_argument("--output", required=True, help="directory to write, <model>/<integer version>; must not exist")
    parser.add_argument("--weights", default=WEIGHTS_PATH, help="weights to export (default: the committed ones)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        export_digits(options.output, options.weights)
    except (OSError, ValueError) as err:
        print(f"models.digits.export: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
