"""What bfloat16 and scaled decoding change in the results. Says nothing about speed.

    python -m tests.benchmarks.differences

With the bundled digit detector, which has ground truth: COCO AP (all detections down to a confidence of 0.01), and the
agreement of what a user sees (confidence 0.25 and more): 2 x matched / all of both, matched: same class and IoU >= 0.5, with
the mean IoU and the mean difference in confidence of the matched. The scenes are the detector's committed samples; the large
ones are these enlarged to 12 megapixels, which have no more detail than the small.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models import digits
from models.evaluate import compare, evaluate
from tests.benchmarks import results
from tests.benchmarks.images import BENCH
from tests.shard_rows import rows_in

_SAMPLES = Path(digits.FOLDER, "samples")
_LARGE_SIDE = 4000
_SEEN = 0.25
_DIGITS = ("--model", "digits", "--score-threshold", "0.01")


def main() -> None:
    """Runs the pairs and prints the table."""
    count = len(list(_SAMPLES.glob("*.jpg")))
    rows = [
        [f"bfloat16 / float32, digits, {count} scenes", *_difference(_SAMPLES, ("--precision", "bfloat16"))],
        [f"scaled / full decoding, digits, {count} of 12 MP", *_difference(_large_scenes(), (), ("--no-scaled-decode",))],
    ]
    header = ["first / second", "AP first", "AP second", "agreement", "mean IoU of matched", "mean difference of confidence"]
    print(f"\n### Differences in the results\n\n{results.machine()}\n")
    print(results.table(header, rows), flush=True)


def _difference(images: Path, first: Sequence[str], second: Sequence[str] = ()) -> list[str]:
    """Runs the pipeline with either flags and compares the rows."""
    rows, reference = (_run(images, flags) for flags in (first, second))
    precision = [evaluate(each, images / "ground_truth.json")["AP"] for each in (rows, reference)]
    seen = compare(_seen(rows), _seen(reference))
    figures = [*precision, *(seen[name] for name in ("agreement", "mean_iou", "mean_abs_score_difference"))]
    return [f"{figure:.4f}" for figure in figures]


def _run(images: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    output = BENCH / "out" / "differences"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "pipeline.run", "--input", f"{images}/*.jpg", "--output", str(output), *_DIGITS, *flags]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return rows_in(str(output))


def _seen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "detections": [one for one in row["detections"] if one["confidence"] >= _SEEN]} for row in rows]


def _large_scenes() -> Path:
    """A folder of the samples, upright and enlarged so that the longer side has `_LARGE_SIDE` pixels, with their ground truth."""
    import cv2

    folder = BENCH / f"scenes-{_LARGE_SIDE}"
    if (folder / "ground_truth.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    truth, scales = json.loads((_SAMPLES / "ground_truth.json").read_text()), {}
    for image in truth["images"]:
        small = cv2.imread(str(_SAMPLES / image["file_name"]))
        scale = scales[image["id"]] = _LARGE_SIDE / max(small.shape[:2])
        large = cv2.resize(small, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
        image["height"], image["width"] = large.shape[:2]
        cv2.imwrite(str(folder / image["file_name"]), large, [cv2.IMWRITE_JPEG_QUALITY, 90])
    for box in truth["annotations"]:
        scale = scales[box["image_id"]]
        box |= {"bbox": [side * scale for side in box["bbox"]], "area": box["area"] * scale**2}
    (folder / "ground_truth.json").write_text(json.dumps(truth))
    return folder


if __name__ == "__main__":
    main()
