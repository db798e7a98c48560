"""Hybrid batch prediction for images: the same detector in batch, streaming and backfill jobs on Beam.

The transforms for a pipeline of one's own, the detector without Beam, and the records that they take and give are offered here by
name (docs/api.md); they are imported when they are first asked for, so that `--help` comes without TensorFlow and Beam.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

# TensorFlow's libraries read this when they are imported; what goes wrong there reaches the user as an error of this project.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Without oneDNN, which it leaves out by default on CPUs without AVX-512, TensorFlow refuses grouped convolutions once fused.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# Else each client of Cloud Storage asks for facts of its bucket for traces, in a thread and on a connection of their own.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")

# On Python 3.10 Google's libraries tell its age at each start.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"google\.api_core")

# Modules of 0.1.0 that ran as commands, and their verbs where these have other names.
_COMMANDS = ("compact", "cost", "doctor", "evaluate", "export", "pictures", "quantize", "reconcile", "tune", "view")
_RENAMED = {"import_model": "import", "load_bigquery": "load", "detect.write_golden": "golden"}
_NEEDED = ("yaml", "pydantic", "numpy", "cv2", "apache_beam")


def _startup_problem() -> str:
    """Why a command of this program cannot run in this Python or this folder, in a line; empty where it can."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    models = importlib.util.find_spec("models")
    if models and models.origin and os.path.dirname(os.path.dirname(os.path.abspath(models.origin))) != home:
        folder = os.path.dirname(models.origin)
        return f"Python takes {folder} for this program's package 'models'; use detect-objects instead, or another folder"
    if missing := [name for name in _NEEDED if not importlib.util.find_spec(name)]:
        return (
            f"{sys.executable} has no {', '.join(missing)}; expected a Python in which this program is installed, such as "
            f"{home}/.venv/bin/python after make demo, or another one after python -m pip install {home}"
        )
    return ""


def _start_verb() -> None:
    """Does what `python -m pipeline.compact` and its like of 0.1.0 did: goes on as `python -m pipeline compact`."""
    place = len(sys.orig_argv) - len(sys.argv)
    before, (module, *flags) = sys.orig_argv[1:place], sys.orig_argv[place:]
    name = module.rpartition("pipeline.")[2]
    if name in (*_COMMANDS, *_RENAMED):
        verb = _RENAMED.get(name, name)
        os.execv(sys.executable, [sys.executable, *before, module.partition("pipeline.")[0] + "pipeline", verb, *flags])  # noqa: S606


# While Python looks for the module of `python -m pipeline.run`, or of another command here, "-m" stands for its name. It looks in
# the current folder first, as the console command does not.
if sys.argv[:1] == ["-m"]:
    if _problem := _startup_problem():
        print(f"error: {_problem}", file=sys.stderr)
        sys.exit(2)
    _start_verb()

if TYPE_CHECKING:
    from pipeline.config import DetectConfig as DetectConfig
    from pipeline.config import ModelConfig as ModelConfig
    from pipeline.detect.detect_objects import DetectObjects as DetectObjects
    from pipeline.detect.detect_objects import detect_images as detect_images
    from pipeline.detect.load_detector import load_detector as load_detector
    from pipeline.listing.read_images import ReadImages as ReadImages
    from pipeline.records import DeadLetter as DeadLetter
    from pipeline.records import DetectedImage as DetectedImage
    from pipeline.records import Detections as Detections
    from pipeline.records import EncodedImage as EncodedImage
    from pipeline.records import ImageRef as ImageRef

_OFFERED = {
    "ReadImages": "pipeline.listing.read_images",
    "DetectObjects": "pipeline.detect.detect_objects",
    "detect_images": "pipeline.detect.detect_objects",
    "load_detector": "pipeline.detect.load_detector",
    "ModelConfig": "pipeline.config",
    "DetectConfig": "pipeline.config",
    "ImageRef": "pipeline.records",
    "EncodedImage": "pipeline.records",
    "DetectedImage": "pipeline.records",
    "Detections": "pipeline.records",
    "DeadLetter": "pipeline.records",
}
__all__ = list(_OFFERED)


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)
