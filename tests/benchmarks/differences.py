"""What bfloat16 and scaled decoding change in the results. Says nothing about speed.

    python -m tests.benchmarks.differences [--scenes 300] [--large-scenes 48]

With the bundled digit detector, which has ground truth: COCO AP (all detections down to a confidence of 0.01), and the
agreement of what a user sees (confidence 0.25 and more): 2 x matched / all of both, matched: same class and IoU >= 0.5, with
the mean IoU and the mean difference in confidence of the matched. The scenes are those of the test split with a seed of
their own; the large ones are such scenes enlarged to 12 megapixels, which have no more detail than the small. With the
benchmarks' detector, whose random weights make the most of the least difference in pixels, the agreement alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.evaluate import compare, evaluate
from tests.benchmarks import results
from tests.benchmarks.images import BENCH, COUNTS, LARGE, make_images
from tests.benchmarks.model import make_model

_SEED = 21
_LARGE_SIDE = 4000
_SEEN = 0.25
_OURS = ("--config", "tests/benchmarks/ours.yaml")
_DIGITS = ("--model", "digits", "--score-threshold", "0.01")


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=300)
    parser.add_argument("--large-scenes", type=int, default=48)
    args = parser.parse_args()
    make_model()
    scenes, large_scenes = _make_scenes(args.scenes), _make_scenes(args.large_scenes, _LARGE_SIDE)
    bf16, full = ("--precision", "bfloat16"), ("--no-scaled-decode",)
    found = {
        f"bfloat16 / float32, digits, {args.scenes} scenes": _difference(scenes, _DIGITS, bf16),
        f"scaled / full decoding, digits, {args.large_scenes} scenes of 12 MP": _difference(large_scenes, _DIGITS, (), full),
        f"scaled / full decoding, random weights, {COUNTS[LARGE]} photos of 12 MP": _difference(
            make_images(LARGE), _OURS, (), full
        ),
    }
    names = ["AP", "AP_reference", "agreement", "mean_iou", "mean_abs_score_difference"]
    header = [
        "first / second",
        "AP first",
        "AP second",
        "agreement",
        "mean IoU of matched",
        "mean difference of confidence",
    ]
    rows = [
        [name, *(f"{figures[key]:.4f}" if figures.get(key) is not None else "" for key in names)]
        for name, figures in found.items()
    ]
    print(f"\n### Differences in the results\n\n{results.machine()}\n")
    print(results.table(header, rows), flush=True)
    results.keep("differences", found)


def _difference(images: Path, flags: Sequence[str], first: Sequence[str], second: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the pipeline with either flags and compares the rows; with AP where there is ground truth."""
    rows, reference = _run(images, [*flags, *first]), _run(images, [*flags, *second])
    figures = compare(_seen(rows), _seen(reference))
    truth = images / "ground_truth.json"
    if truth.exists():
        figures |= {"AP": evaluate(rows, truth)["AP"], "AP_reference": evaluate(reference, truth)["AP"]}
    return figures


def _run(images: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    output = BENCH / "out" / "differences"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "pipeline.run", "--input", f"{images}/*.jpg", "--output", str(output), *flags]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for file in (output / "detections").glob("*.jsonl") for line in file.open(encoding="utf-8")]


def _seen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "detections": [one for one in row["detections"] if one["confidence"] >= _SEEN]} for row in rows]


def _make_scenes(count: int, long_side: int = 0) -> Path:
    """A folder of digit scenes with their ground truth; enlarged so that the longer side has so many pixels."""
    import cv2

    from models.digits.training.scenes import Scene
    from models.digits.training.write_scenes import coco_ground_truth, compose_sample, encode_jpeg

    folder = BENCH / f"scenes-{count}-{long_side or 'small'}"
    if not (folder / "ground_truth.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        scenes = []
        for index in range(count):
            scene = compose_sample("test", _SEED, index)
            if long_side:
                scale = long_side / max(scene.image.shape[:2])
                image = cv2.resize(scene.image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
                scene = Scene(image, scene.boxes_xyxy * scale, scene.labels)
            (folder / f"{index:04d}.jpg").write_bytes(encode_jpeg(scene.image, 90, 1))
            scenes.append((f"{index:04d}.jpg", scene))
        (folder / "ground_truth.json").write_text(json.dumps(coco_ground_truth(scenes)))
    return folder


if __name__ == "__main__":
    main()
