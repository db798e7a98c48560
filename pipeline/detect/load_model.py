"""Loads a model version for the engine of the settings: opens, checks and warms it."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import sys

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import tensorflow_setup
from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import ModelFailed, OpenedModel, OutOfMemory
from pipeline.detect.engines import opener_of
from pipeline.detect.golden import GOLDEN, GoldenImage, read_golden
from pipeline.detect.loaded_model import LoadedModel, Memory
from pipeline.detect.onnx_file import onnx_file
from pipeline.detect.process_memory import return_free_memory
from pipeline.detect.remote_server import check_engine
from pipeline.detect.saved_model import described_signature, local_copy
from pipeline.detect.versions import files_of, first_line, is_onnx, is_remote, lacking, locate
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
        opened = opener_of(detect.engine)("", model.path, model, detect)
        return _warm(opened, model.path, opened.version, (), detect, beside=beside)
    folder, version = locate(model.path, model.model_version)
    files = files_of(folder)
    if missing := lacking(files):
        raise ModelError(f"model {folder}: lacks {missing}; copy it whole, then start again")
    notes: tuple[str, ...] = ()
    if is_onnx(files) and detect.engine == "tensorflow":
        detect = dataclasses.replace(detect, engine=_engine_for_onnx(detect))
        notes = (f"model {folder} is an ONNX file: it runs in {detect.engine}",)
    open_model = opener_of(detect.engine)
    with local_copy(folder) as local:
        golden = _golden_in(local, folder)
        opened = open_model(local, folder, model, detect)
    if files_of(folder) != files:
        opened.engine.close()
        raise ModelError(f"model {folder}: its files changed while it was loaded; start again once it is copied")
    loaded = _warm(opened, folder, version, golden, detect, beside=beside)
    weights = sum(file.size_bytes for file in files)
    working = max(0, tensorflow_setup.memory_in_use() - before - weights)
    memory = Memory(weights, working, tensorflow_setup.gpu_bytes(detect))
    return dataclasses.replace(loaded, memory=memory, notes=(*notes, *loaded.notes))


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
    engine = _engine_for_onnx(DetectConfig())
    opened = opener_of(engine)(local, folder, model, DetectConfig(engine=engine))
    opened.engine.close()
    return opened.described or opened.metadata


def _golden_in(local: str, folder: str) -> tuple[GoldenImage, ...]:
    try:
        return read_golden(local)
    except (OSError, ValueError) as err:
        raise ModelError(f"model {folder}: {GOLDEN} cannot be read: {first_line(err)}; repair or remove it") from err


def _warm(
    opened: OpenedModel, folder: str, version: str, golden: tuple[GoldenImage, ...], detect: DetectConfig, *, beside: bool
) -> LoadedModel:
    """An opened model behind a batcher, warm."""
    batcher = Batcher(opened.engine, opened.metadata.graph_hw, detect.batch_timeout_ms)
    return_free_memory(circles=True)  # opening took several times the model
    try:
        notes = _isolate_if_mixing(batcher, opened, folder)
        batcher.warm_up(at_once=not beside or tensorflow_setup.uses_gpu())
    except (ModelFailed, OutOfMemory) as err:
        batcher.close()
        raise ModelError(f"model {folder}: fails on a blank image: {err}") from err
    except BaseException:
        batcher.close()
        raise
    return_free_memory()
    return LoadedModel(opened.metadata, version, batcher, opened.warmup_requests, golden, notes=notes)


def _isolate_if_mixing(batcher: Batcher, opened: OpenedModel, folder: str) -> tuple[str, ...]:
    """Gives a model that mixes the images of a batch one at a time; returns a note of it."""
    try:
        if batcher.batch_sizes == (1,) or not (opened.mixes or batcher.mixes_images()):
            return ()
    except OutOfMemory:
        return ()  # the warm-up finds the batch size that fits
    size = opened.batch or 1
    batcher.isolate(size)
    mixes = "picks rows of a whole batch, which would mix its images" if opened.mixes else "mixes the images of a batch"
    note = f"model {folder} {mixes}: it gets one image at a time (batch size {size})"
    print(note, file=sys.stderr)
    return (note,)
