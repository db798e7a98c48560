"""`python -m models.golden`: writes golden images, with the detections of a trusted version, into a model version."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.manifest import MANIFEST, write_manifest
from models.own_python import command_of, environment

_GOLDEN = "assets.extra/golden"

_DESCRIPTION = """\
Detects in a few images with a trusted version of a model, and stores images and detections inside a version. A job that loads
that version detects in these images first, and refuses the version if the detections agree less than --min-agreement."""

_EPILOG = """\
example:
  python -m models.golden --model /models/yolov4/7 golden/*.jpg --out /models/yolov4/8

Twenty to a hundred images that show all classes are enough. Use the thresholds of the jobs that will load the version.
Exit code: 0 done; 2 the model, an image or the arguments cannot be used (one line on stderr says why; nothing is written)."""


class GoldenError(Exception):
    """No golden images were written; the message has one line."""


class NoObjectError(GoldenError):
    """The model finds no object in the images, so they would show nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_args(argv)
    out = args.out or args.model
    try:
        count = write_golden(args.model, args.images, out, args.score_threshold, args.iou_threshold, config=args.config)
    except (GoldenError, OSError) as err:
        print(f"golden: {err}", file=sys.stderr)
        return 2
    print(f"{os.path.join(out, _GOLDEN)}: {count} images with what {args.model} found in them")
    return 0


def write_golden(
    model: str, images: Sequence[str], out: str, score_threshold: float, iou_threshold: float, *, config: str | None = None
) -> int:
    """Writes the golden images of a version, all or none.

    Args:
      model: The SavedModel of the trusted version, or a folder of versions, whose newest counts.
      images: Files, folders or globs on this machine.
      out: The SavedModel to write them into.
      score_threshold: Least confidence of an expected detection.
      iou_threshold: For suppression.
      config: A job's config with the settings of the model.

    Returns:
      The number of images.

    Raises:
      GoldenError: The model or an image cannot be used, no image has an object, or the version has golden images already.
      OSError: A file cannot be read or written.
    """
    target = Path(out, _GOLDEN)
    if "://" in out or not any(Path(out, name).is_file() for name in ("saved_model.pb", "model.onnx")):
        raise GoldenError(f"{out}: expected the folder of a model on this machine as --out, such as /models/yolov4/8")
    if target.exists():
        raise GoldenError(f"{target} is there already; remove it first")
    thresholds = {"score_threshold": score_threshold, "iou_threshold": iou_threshold}
    with tempfile.TemporaryDirectory(prefix=".golden-", dir=out) as scratch:
        rows = _detected(model, images, thresholds, config, os.path.join(scratch, "job"))
        if not any(row["detections"] for row in rows):
            raise NoObjectError(
                f"{model} finds no object in {len(rows)} images, which would show nothing; give images with objects"
            )
        ready = Path(scratch, "golden")
        ready.mkdir()
        with (ready / "detections.jsonl").open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, 1):
                file.write(json.dumps(_kept(row, number, ready, thresholds), ensure_ascii=False) + "\n")
        target.parent.mkdir(exist_ok=True)
        ready.rename(target)
        if Path(out, MANIFEST).exists():
            write_manifest(out)
    return len(rows)


def _detected(
    model: str, images: Sequence[str], thresholds: Mapping[str, float], config: str | None, output: str
) -> list[dict[str, Any]]:
    """The rows of a job over the images, which runs as a command: `models/` imports nothing from `pipeline/`."""
    settings = {
        "--mode": "batch",
        "--runner": "DirectRunner",
        "--output": output,
        "--model": model,
        "--score-threshold": thresholds["score_threshold"],
        "--iou-threshold": thresholds["iou_threshold"],
        "--min-agreement": 0,  # its detections become the expected ones
        "--max-dead-share": 1,
        **({"--config": config} if config else {}),
    }
    flags = [str(part) for setting in settings.items() for part in setting]
    command = command_of("pipeline.run", "--input", *images, *flags)
    done = subprocess.run(  # noqa: S603  this program itself, without a shell
        command, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"the job ended with {done.returncode}"]
        raise GoldenError(said[-1].removeprefix("error: "))
    if dead := _read(output, "dead_letters"):
        raise GoldenError(f"{len(dead)} images cannot be used, such as {dead[0]['image'].get('uri')}: {dead[0]['message']}")
    return _read(output, "detections")


def _read(output: str, kind: str) -> list[dict[str, Any]]:
    files = sorted(Path(output, kind).glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: str(row["image"].get("uri")))


def _kept(row: Mapping[str, Any], number: int, folder: Path, thresholds: Mapping[str, float]) -> dict[str, Any]:
    """Copies the image of a row, and returns the row with the name of the copy."""
    name = f"{number:04}-{os.path.basename(row['image']['uri'])}"
    shutil.copyfile(row["image"]["uri"], folder / name)
    image = {"uri": name, "width": row["image"]["width"], "height": row["image"]["height"]}
    return {"image": image, "model": row["model"], **thresholds, "detections": row["detections"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.golden",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("images", nargs="+", help="files, folders or globs on this machine")
    parser.add_argument("--model", required=True, help="SavedModel of the trusted version, or a folder of versions")
    parser.add_argument("--out", help="SavedModel to write them into (default: the one of --model)")
    parser.add_argument("--score-threshold", type=float, default=0.25, help="that of the jobs (default: 0.25)")
    parser.add_argument("--iou-threshold", type=float, default=0.45, help="that of the jobs (default: 0.45)")
    parser.add_argument("--config", metavar="FILE", help="a job's config, for a model that does not describe itself")
    return parser


if __name__ == "__main__":
    sys.exit(main())
