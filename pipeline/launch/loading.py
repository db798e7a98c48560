"""Loads the detector of this process while the job starts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline import graph
from pipeline.config import Config
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import shared_detector
from pipeline.detect.load_model import name_and_version
from pipeline.errors import ModelError
from pipeline.launch.options import Job, is_in_image
from pipeline.limits import nvidia_gpus
from pipeline.process import PROCESS


def load_detector(config: Config) -> Detector:
    """Loads and warms the detector of this process."""
    PROCESS.waiting_for = "loading the model"
    try:
        detector = shared_detector(graph.detector_spec(config))
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
    if _only_workers_see_it(job):
        return _named(job.config)
    known = job.in_process or not job.config.again
    return name_and_version(job.config.model, job.config.detect.engine) if known else ("", "")


def _only_workers_see_it(job: Job) -> bool:
    """Whether the model lies in the image of workers, and not on this machine."""
    return job.runner.has_own_machines and is_in_image(job.config) and not os.path.exists(job.config.model.path)


def _named(config: Config) -> tuple[str, str]:
    """Name and version of a model that only workers see, as the job's settings have them; which rows are done depends on them."""
    model = config.model
    version = model.model_version or posixpath.basename(model.path)
    if model.name and version.isdigit():
        return model.name, version
    if config.again:
        return "", ""
    raise ModelError(
        f"model {model.path}: is not on this machine, and may be in the workers' image; expected --name and --model-version, as "
        "its rows have them, so that the launcher knows which rows are done, or --again"
    )


def tried_here(job: Job) -> tuple[Detector | None, Config]:
    """For a dry run, a job's detector on this machine, None where only workers see the model, and the settings that it has here.

    Workers may have a GPU that this machine lacks; then its CPU is tried.
    """
    config = job.config
    if not job.in_process and config.detect.device.startswith("gpu") and not nvidia_gpus():
        config = dataclasses.replace(config, detect=dataclasses.replace(config.detect, device="cpu", precision="float32"))
    return None if _only_workers_see_it(job) else load_detector(config), config


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
