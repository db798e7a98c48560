"""Loads a model version for the engine of the settings. For OpenVINO another process converts it, once for each user."""

from __future__ import annotations

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import remote_model, saved_model
from pipeline.detect.load_in_subprocess import Preparation
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.openvino_graph import check_installed
from pipeline.detect.prepared_cache import entry_of, read_prepared
from pipeline.detect.prepared_model import PreparedModel, start
from pipeline.detect.remote_server import check_engine
from pipeline.detect.server_protocols import PROTOCOLS
from pipeline.detect.versions import files_of, lacking, locate
from pipeline.errors import ModelError


def load(model: ModelConfig, detect: DetectConfig) -> LoadedModel:
    """Loads a detector for its engine, and warms it.

    Raises:
      ModelError: The model is missing, damaged or being written, has no matching signature, or fails on a blank image; or the
        engine is not installed, or does not fit the model's path.
    """
    check_engine(model, detect.engine)
    if detect.precision == "int8" and detect.engine != "openvino":
        raise ModelError(f"precision int8: expected --engine openvino, got {detect.engine}")
    if detect.engine == "openvino":
        return start(converted_model(model, detect), detect)
    return remote_model.load(model, detect) if detect.engine in PROTOCOLS else saved_model.load(model, detect)


def converted_model(model: ModelConfig, detect: DetectConfig) -> PreparedModel:
    """A detector for OpenVINO: from the user's cache, else converted by another process and stored there.

    Raises:
      ModelError: As `load`.
    """
    check_installed()
    folder, version = locate(model.path, model.model_version)
    files = files_of(folder)
    if missing := lacking(files):
        raise ModelError(f"model {folder}: lacks {missing}; copy it whole, then start again")
    with saved_model.local_copy(folder) as local:
        entry = entry_of(local, folder, version, model, detect, gpu=False)
        cached = read_prepared(entry, local, folder, version, model=model, detect=detect)
        prepared = cached or Preparation(folder, version, model, detect, gpu=False).result()  # which keeps it in the cache
        if files_of(folder) != files:
            raise ModelError(f"model {folder}: its files changed while it was loaded; start again once it is copied")
    return prepared
