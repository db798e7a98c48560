"""Loads the detector of this process, and names it."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import shared_detector
from pipeline.detect.load_model import name_and_version
from pipeline.launch.options import Job
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import REPORT_SAMPLES


def load_detector(config: Config) -> Detector:
    """Loads and warms the detector of this process."""
    PROCESS.waiting_for = "loading the model"
    detector = shared_detector(config.model, config.detect, REPORT_SAMPLES, config.read)
    PROCESS.waiting_for = "the model is loaded"
    return detector


def model_known(job: Job) -> tuple[str, str]:
    """Name and version of a job's model, as its rows have them; empty where the launcher may not reach it and needs neither.

    Raises:
      ModelError: The model is missing, or is no detector.
    """
    known = job.in_process or not job.config.again
    return name_and_version(job.config.model, job.config.detect.engine) if known else ("", "")
