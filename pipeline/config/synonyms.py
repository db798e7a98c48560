"""Names of settings in other tools (YOLO, Ultralytics, common guesses), and near names for typos."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NEAR = 0.75  # difflib's ratio of one or two typos

_PICTURES = "detect-objects pictures OUTPUT --annotate FOLDER --crops FOLDER makes them of all images"
_FLAGS = {
    "conf confidence conf-thres conf-threshold confidence-threshold thresh threshold min-score score": "--score-threshold",
    "iou iou-thres iou-thresh nms-threshold nms-iou overlap": "--iou-threshold",
    "max-det max-dets max-boxes topk top-k": "--max-detections",
    "imgsz img img-size image-size input-size size resolution": "model.input_hw in the config file, for models of any input size",
    "source src images image-dir input-dir in data folder path": "--input",
    "weights checkpoint saved-model model-path model-dir": "--model",
    "out output-dir out-dir outdir save-dir results dest exp": "--output",
    "batch batch-size bs": "--batch-sizes, such as 1,2,4,8",
    "filter-classes class labels-to-keep": "--classes",
    "names class-file labels-file": "model.class_names in the config file",
    "gpu gpus cuda": "--device gpu:0",
    "half fp16 amp bf16 bfloat16": "--precision bfloat16",
    "workers threads num-workers j jobs": "--decode-threads and --read-threads",
    "save save-img save-images visualize plot draw render": f"--samples N, which writes N annotated images; {_PICTURES}",
    "crops crop save-crop save-crops annotate annotated samples-all": f"another command, after the run: {_PICTURES}",
    "recursive r": "an input with **, such as 'photos/**/*.jpg'",
    "csv save-csv": "--export csv, or the Parquet files in detections/, which pandas and duckdb read",
    "save-txt txt yolo format": "--export yolo",
    "voc xml pascal-voc": "--export voc",
    "json jsonl save-json save-conf coco": "no flag: detections/*.jsonl is always written; --export coco adds COCO's JSON",
    "q silent": "--quiet",
    "debug v": "--verbose",
    "loglevel": "--log-level",
    "resume continue": "no flag: the same command does what has no row yet",
    "overwrite force exist-ok replace": "--again, which detects what is done again; the newest row counts",
    "skip-existing incremental only-new": "no flag: images that have a row are skipped; --again detects them again",
    "dryrun check": "--dry-run",
}
_KNOWN = {name: flag for names, flag in _FLAGS.items() for name in names.split()}


def synonym_of(flag: str) -> str:
    """The name here for a flag or key of another tool; empty if no tool has it.

    >>> synonym_of("--conf"), synonym_of("conf_thres"), synonym_of("--xyzzy")
    ('--score-threshold', '--score-threshold', '')
    """
    return _KNOWN.get(_bare(flag), "")


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that are close to this one, the nearest first.

    >>> near_names("score_treshold", ["score_threshold", "iou_threshold", "shards"]), near_names("--csv", ["--xla"])
    (['score_threshold'], [])
    """
    of_bare: dict[str, str] = {}
    for each in known:
        of_bare.setdefault(_bare(each), each)
    if _bare(name) in of_bare:
        return [of_bare[_bare(name)]]
    return [of_bare[near] for near in difflib.get_close_matches(_bare(name), of_bare, n=most, cutoff=_NEAR)]


def _bare(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()
