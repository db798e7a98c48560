"""Loads a model version for the engine of the settings: opens, checks and warms it."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import sys

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import tensorflow_setup
from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import ModelFailed, OpenedModel, OpenModel, OutOfMemory, opener_of
from pipeline.detect.golden import GoldenImage, read_golden
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.onnx_file import onnx_file
from pipeline.detect.process_memory import trim_memory
from pipeline.detect.remote_engine import check_engine
from pipeline.detect.saved_model import described_signature, local_copy
from pipeline.detect.versions import files_of, is_remote, resolve_versions
from pipeline.errors import ModelError
from pipeline.limits import NVIDIA_DEVICES


def load(model: ModelConfig, detect: DetectConfig, *, beside: bool = False) -> LoadedModel:
    """Loads a detector for its engine, and warms every batch size with blank images.

    Args:
      model: The model.
      detect: How to run it.
      beside: Whether another version is in use meanwhile, whose images go first.

    Raises:
      ModelError: The model is missing, damaged or being written, is no detector, or fails on a blank image; or the engine is not
        installed, or does not fit the model's path.
    """
    check_engine(model, detect.engine)
    before = tensorflow_setup.memory_in_use()
    if is_remote(model.path):
        opened = _open(opener_of(detect.engine), "", model.path, model, detect)
        return _warm(opened, model.path, opened.version, (), beside=beside, timeout_ms=detect.batch_timeout_ms)
    version = resolve_versions(model.path, model.model_version)[0]
    folder, notes = version.folder, tuple[str, ...]()
    if version.is_onnx and detect.engine == "tensorflow":
        detect = dataclasses.replace(detect, engine=_engine_for_onnx(detect))
        notes = (f"model {folder} is an ONNX file: it runs in {detect.engine}",)
    open_model = opener_of(detect.engine)  # before the model is copied
    with local_copy(folder) as local:
        golden = read_golden(local, folder)
        opened = _open(open_model, local, folder, model, detect)
    if files_of(folder) != version.files:
        opened.engine.close()
        raise ModelError(f"model {folder}: its files changed while it was loaded; start again once it is copied")
    loaded = _warm(opened, folder, version.name, golden, beside=beside, timeout_ms=detect.batch_timeout_ms)
    taken = max(tensorflow_setup.memory_in_use() - before, version.size_bytes)
    return dataclasses.replace(loaded, memory_bytes=taken, notes=(*notes, *loaded.notes))


def _open(open_model: OpenModel, local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    try:
        return open_model(local, folder, model, detect)
    except (ModelFailed, OutOfMemory) as err:
        raise ModelError(f"model {folder}: fails on a blank image: {err}") from err


def _engine_for_onnx(detect: DetectConfig) -> str:
    """OpenVINO on a CPU, ONNX Runtime on a GPU, or the one that is installed."""
    wanted = ["openvino", "onnxruntime"]
    if detect.device.startswith("gpu") or (detect.device == "auto" and glob.glob(NVIDIA_DEVICES)):
        wanted.reverse()
    return next((engine for engine in wanted if importlib.util.find_spec(engine)), wanted[0])


def recognised(local: str, folder: str, model: ModelConfig) -> DetectorMetadata:
    """The metadata that a job would recognise in a model's files on this machine.

    Raises:
      ModelError: It is no detector that is recognised.
    """
    if not onnx_file(local):
        return described_signature(local, folder, model, DetectConfig())[2]
    detect = DetectConfig(engine=_engine_for_onnx(DetectConfig()))
    opened = _open(opener_of(detect.engine), local, folder, model, detect)
    opened.engine.close()
    return opened.described or opened.metadata


def _warm(
    opened: OpenedModel, folder: str, version: str, golden: tuple[GoldenImage, ...], *, beside: bool, timeout_ms: float
) -> LoadedModel:
    """An opened model behind a batcher, warm. A model that mixes the images of a batch gets one at a time, with a note."""
    batcher = Batcher(opened.engine, opened.metadata.graph_hw, timeout_ms)
    trim_memory(collect_garbage=True)  # opening took several times the model
    notes: tuple[str, ...] = ()
    try:
        with contextlib.suppress(OutOfMemory):  # the warm-up finds the batch size that fits
            if batcher.batch_sizes != (1,) and (opened.mixes or batcher.mixes_images()):
                size = opened.batch or 1
                batcher.isolate(size)
                mixes = (
                    "picks rows of a whole batch, which would mix its images" if opened.mixes else "mixes the images of a batch"
                )
                notes = (f"model {folder} {mixes}: it gets one image at a time (batch size {size})",)
                print(notes[0], file=sys.stderr)
        batcher.warm_up(at_once=not beside or tensorflow_setup.uses_gpu())
    except (ModelFailed, OutOfMemory) as err:
        batcher.close()
        raise ModelError(f"model {folder}: fails on a blank image: {err}") from err
    except BaseException:
        batcher.close()
        raise
    trim_memory()
    return LoadedModel(opened.metadata, version, batcher, opened.warmup_requests, golden, notes=notes)
