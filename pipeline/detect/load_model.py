"""Loads a model version for the engine of the settings: opens, checks and warms it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from models.metadata import METADATA_PATH, DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.config.engines import AUTO, ONNX, SERVER, choose_engine, misfit
from pipeline.config.setting import is_own_engine
from pipeline.detect import tensorflow_setup
from pipeline.detect.batcher import Batcher
from pipeline.detect.describe_model import name_of_model, onnx_file, own_metadata
from pipeline.detect.detections import check_outputs
from pipeline.detect.engine import (
    BadOutput,
    ImagesRefused,
    ModelFailed,
    OpenedModel,
    OpenModel,
    OutOfMemory,
    check_installed,
    opener_of,
)
from pipeline.detect.golden import GoldenImage, read_golden
from pipeline.detect.gpus import free_bytes, take_gpu
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.model_arrays import split_metadata
from pipeline.detect.process_memory import cap_malloc_arenas, trim_memory
from pipeline.detect.remote_engine import RemoteServer, check_engine
from pipeline.detect.tensorflow_engine import described_signature
from pipeline.detect.versions import (
    ONNX_MODEL,
    Version,
    as_given,
    files_of,
    given_files,
    incomplete_versions,
    is_remote,
    locate,
    opens_as_given,
    resolve_versions,
)
from pipeline.errors import DeviceFailedError, ModelDeviceError, ModelError
from pipeline.limits import Share, nvidia_gpus
from pipeline.log_lines import console
from pipeline.storage.store import ChangedError, FoundFile
from pipeline.storage.stores import store_of


def name_and_version(model: ModelConfig, engine: str = AUTO) -> tuple[str, str]:
    """Name and version that rows will have, without loading the model.

    Args:
      model: The model.
      engine: What runs it; a model server is asked.

    Raises:
      ModelError: The model is missing or malformed.
    """
    if opens_as_given(model, engine):
        return own_name(model, engine), as_given(model).name
    if is_remote(model.path):
        check_engine(model, engine)
        with contextlib.closing(RemoteServer(model, engine)) as server:
            return name_of_model(model, None, model.path), server.version
    folder, version = locate(model.path, model.model_version)
    for newer in () if model.model_version else incomplete_versions(model.path, newer_than=version):
        missing = f"version {newer.name} is incomplete (missing {newer.missing}) and ignored for now"
        console.info("model %s: %s", model.path, missing)
    if folder.endswith(".onnx"):
        return name_of_model(model, None, folder), version
    with local_copy(folder, METADATA_PATH) as local:
        return name_of_model(model, own_metadata(local, folder), folder), version


def load(model: ModelConfig, detect: DetectConfig, *, beside: bool = False) -> LoadedModel:
    """Loads a detector for its engine, and warms every batch size with blank images.

    Args:
      model: The model.
      detect: How to run it.
      beside: Whether another version is in use meanwhile, whose images go first.

    Raises:
      ModelError: The model is missing, damaged or being written, is no detector, or fails on a blank image (`ModelDeviceError` on
        a GPU, at a server, or for lack of memory); or the engine is not installed, or does not fit the model's path.
    """
    check_engine(model, detect.engine)
    cap_malloc_arenas()
    before, was_gpu, gpus = tensorflow_setup.memory_in_use(), tensorflow_setup.uses_gpu(), nvidia_gpus()
    free = {number: free_bytes(number, gpus) for number in range(gpus)} if detect.device != "cpu" else {}
    as_it_is = opens_as_given(model, detect.engine)
    if is_remote(model.path) and not as_it_is:
        _check_fit(SERVER, detect)
        opened = _open(opener_of(detect.engine), "", model.path, model, detect)
        return _warm(opened, model.path, opened.version, (), beside=beside, timeout_ms=detect.batch_timeout_ms)
    version = as_given(model) if as_it_is else resolve_versions(model.path, model.model_version)[0]
    folder, notes = version.folder, tuple[str, ...]()
    if detect.engine == AUTO:
        detect = dataclasses.replace(detect, engine=engine_of(version.kind, detect))
        notes = (f"model {folder} is an ONNX file: it runs in {detect.engine}",) if version.kind == ONNX else ()
    _check_fit(version.kind, detect)
    if detect.engine == "tensorflow":
        check_installed("tensorflow", needed_by=f"model {folder}, a SavedModel,")
    open_model = opener_of(detect.engine)  # before the model is copied
    with _copy_of_given(version) if as_it_is else local_copy(folder) as local:
        golden = read_golden(local, folder)
        opened = _open(open_model, local, folder, model, detect)
        if is_own_engine(detect.engine):  # resume looks for the name that is known without loading
            described = None if as_it_is or local.endswith(".onnx") else own_metadata(local, folder)
            name = own_name(model, detect.engine) if as_it_is else name_of_model(model, described, folder)
            opened = opened._replace(metadata=dataclasses.replace(opened.metadata, name=name))
    if detect.device == "auto" and gpus and not getattr(opened.engine, "gpu", True):
        notes += (f"model {folder} runs on the CPU, though this machine has a GPU; --device gpu says what is missing",)
    notes += _idle_gpus(opened, detect)
    for note in opened.notes:
        console.info("%s", note)
    if (given_files if as_it_is else files_of)(folder) != version.files:
        opened.engine.close()
        raise _changed(folder)
    loaded = _warm(opened, folder, version.name, golden, beside=beside, timeout_ms=detect.batch_timeout_ms)
    in_use = tensorflow_setup.memory_in_use()  # on a GPU once TensorFlow is there, and not in this process any more
    taken = max(in_use - before if tensorflow_setup.uses_gpu() == was_gpu else in_use, version.size_bytes)
    if free and getattr(opened.engine, "gpu", False) and not tensorflow_setup.uses_gpu():
        had, has = free.get(number := take_gpu(gpus, detect.device)), free_bytes(number, gpus)
        taken = taken if had is None or has is None else max(taken, had - has)
    return dataclasses.replace(
        loaded, memory_bytes=taken, notes=(*notes, *opened.notes, *loaded.notes), engine_name=detect.engine
    )


def own_name(model: ModelConfig, engine: str) -> str:
    """The name in rows of a model of the user's own engine: the config's, else that of its file or folder, else of the module."""
    stem, extension = os.path.splitext(model.path.rstrip("/"))
    return model.name or name_of_model(model, None, stem if extension[1:2].isalpha() else model.path or engine.partition(":")[0])


def _idle_gpus(opened: OpenedModel, detect: DetectConfig) -> tuple[str, ...]:
    """A note where the job leaves GPUs of this machine idle."""
    gpus, processes = nvidia_gpus(), Share.of_environment().of
    if processes >= gpus or detect.device not in ("auto", "gpu") or not getattr(opened.engine, "gpu", False):
        return ()
    return (
        f"this machine has {gpus} GPUs for the job, which uses {processes} of them, one a process; "
        f"a batch job on DirectRunner uses all with --direct_running_mode multi_processing --direct_num_workers {gpus}, "
        "a stream is started once for each, and workers elsewhere need machines with one",
    )


def _open(open_model: OpenModel, local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    try:
        return open_model(local, folder, model, detect)
    except (ModelFailed, OutOfMemory) as err:
        raise _fails_on_blank(folder, err) from err


def _fails_on_blank(folder: str, err: BaseException | None, *, gpu: bool = False) -> ModelError:
    """The error of a model that fails on a blank image; where its device may be to blame, a supervisor repeats it."""
    of_device = (gpu or is_remote(folder) or isinstance(err, OutOfMemory)) and not isinstance(err, BadOutput | ImagesRefused)
    return (ModelDeviceError if of_device else ModelError)(f"model {folder}: fails on a blank image: {err}")


def engine_of(files: str, detect: DetectConfig) -> str:
    """The engine that runs this kind of model here: that of the settings, or the one that `auto` means."""
    if detect.engine != AUTO:
        return detect.engine
    return choose_engine(files, detect.device, detect.precision, gpu=_allows_gpu(detect))


def _check_fit(files: str, detect: DetectConfig) -> None:
    if why := misfit(detect.engine, files, detect.device, detect.precision, gpu=_allows_gpu(detect)):
        raise ModelError(why)


def _allows_gpu(detect: DetectConfig) -> bool:
    return detect.device.startswith("gpu") or (detect.device == "auto" and bool(nvidia_gpus()))


def recognised(local: str, folder: str, model: ModelConfig) -> DetectorMetadata:
    """The metadata that a job would recognise in a model's files on this machine.

    Raises:
      ModelError: It is no detector that is recognised.
    """
    if not onnx_file(local):
        return described_signature(local, folder, model, DetectConfig())[-1]
    detect = DetectConfig(engine=engine_of(ONNX, DetectConfig()))
    opened = _open(opener_of(detect.engine), local, folder, model, detect)
    opened.engine.close()
    return opened.metadata


def _warm(
    opened: OpenedModel, folder: str, version: str, golden: tuple[GoldenImage, ...], *, beside: bool, timeout_ms: float
) -> LoadedModel:
    """An opened model behind a batcher, warm. A model that mixes the images of a batch gets one at a time, with a note."""
    batcher = Batcher(opened.engine, opened.metadata.graph_hw, timeout_ms, check_outputs)
    trim_memory(collect_garbage=True)  # opening took several times the model
    notes: tuple[str, ...] = ()
    try:
        if batcher.batch_sizes != (1,) and (opened.mixes or batcher.mixes_images()):
            batcher.isolate()
            mixes = "picks rows of a whole batch, which would mix its images" if opened.mixes else "mixes the images of a batch"
            notes = (f"model {folder} {mixes}: it gets one image at a time (batch size {batcher.batch_sizes[0]})",)
            console.info("%s", notes[0])
        batcher.warm_up(at_once=not beside or tensorflow_setup.uses_gpu())
    except DeviceFailedError as err:
        batcher.close()
        raise _fails_on_blank(folder, err.__cause__, gpu=getattr(opened.engine, "gpu", False)) from err.__cause__
    except BaseException:
        batcher.close()
        raise
    trim_memory()
    return LoadedModel(split_metadata(opened.metadata), version, batcher, opened.warmup_requests, golden, notes=notes)


@contextlib.contextmanager
def local_copy(folder: str, files: str = "**") -> Iterator[str]:
    """The SavedModel, or some of its files, as a local folder: a temporary copy if it is on object storage."""
    if "://" not in folder:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="model-", ignore_cleanup_errors=True) as copy:
        for file in files_of(folder, files):
            is_data = folder.endswith(".onnx") and file.path != folder  # external data has the name that the ONNX file knows
            name = posixpath.basename(file.path) if is_data else file.path.removeprefix(folder).lstrip("/")
            _download(file, Path(copy, name or ONNX_MODEL), folder)
        yield copy


@contextlib.contextmanager
def _copy_of_given(version: Version) -> Iterator[str]:
    """What `as_given` found, on this machine: a temporary copy of files on object storage, else the text itself."""
    path = version.folder
    if "://" not in path or not version.files:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="model-", ignore_cleanup_errors=True) as copy:
        local = Path(copy, posixpath.basename(path.rstrip("/")))
        for file in version.files:
            _download(file, local / file.path.removeprefix(path).lstrip("/"), path)
        yield str(local)


def _download(file: FoundFile, target: Path, folder: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with store_of(file.path).open(file.path, file.generation) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
    except (FileNotFoundError, ChangedError) as err:
        raise _changed(folder) from err


def _changed(folder: str) -> ModelError:
    return ModelError(f"model {folder}: its files changed while it was loaded; start again once it is copied")
