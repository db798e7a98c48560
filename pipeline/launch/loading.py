"""Loads the detector of this process while the job starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline import graph
from pipeline.config import Config
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import shared_detector
from pipeline.detect.load_model import name_and_version
from pipeline.launch.options import Job
from pipeline.stats.process import PROCESS


def load_detector(config: Config) -> Detector:
    """Loads and warms the detector of this process."""
    PROCESS.waiting_for = "loading the model"
    try:
        detector = shared_detector(config.model, config.detect, graph.samples_kept(config), config.read)
    except BaseException:
        PROCESS.waiting_for = ""
        raise
    PROCESS.waiting_for = "the model is loaded"
    return detector


def model_known(job: Job) -> tuple[str, str]:
    """Name and version of a job's model, as its rows have them; empty where the launcher may not reach it and needs neither.

    Raises:
      ModelError: The model is missing, or is no detector.
    """
    known = job.in_process or not job.config.again
    return name_and_version(job.config.model, job.config.detect.engine) if known else ("", "")


@contextlib.contextmanager
def detector_loading(config: Config) -> Iterator[Future[Detector]]:
    """Loads the detector while the block starts a runner; if both fail, the detector's error is raised."""
    with ThreadPoolExecutor(1, "load") as loader:
        loading = loader.submit(load_detector, config)
        try:
            yield loading
        except Exception:
            loading.result()
            raise
