"""An engine over a model on servers: described by their metadata, and called with NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import check_several_labels, describe
from pipeline.detect.engine import ModelFailed, OpenedModel
from pipeline.detect.numpy_model import by_role, feed_of, role_metadata
from pipeline.detect.remote_server import RemoteServer
from pipeline.detect.signature import Arrays, Signature, channels_last
from pipeline.detect.tensorflow_setup import concurrent_batches_of
from pipeline.detect.versions import first_line
from pipeline.errors import ModelError

_BATCH_SIZES = (1, 2, 4, 8)


class RemoteEngine:
    """A model on servers; an `Engine`.

    Args:
      server: Has the model; the engine closes it.
      signature: Calls it.
      metadata: What it expects and returns.
      detect: How to run it.
    """

    def __init__(self, server: RemoteServer, signature: Signature, metadata: DetectorMetadata, detect: DetectConfig):
        self._server, self._signature, self._metadata, self._detect = server, signature, metadata, detect
        fixed = (signature.inputs[metadata.input_name].shape or (None,))[0]
        self.batch_sizes = self._taken((fixed,) if fixed else detect.batch_sizes or _BATCH_SIZES)
        self.concurrent_batches = concurrent_batches_of(detect, gpu=False)

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Runs a batch; see `Engine`.

        Raises:
          ModelError: The server is away for too long, or the job was stopped meanwhile.
        """
        try:
            found = self._signature.run(feed_of(pixels, self._metadata, self._detect))
        except ValueError as err:
            raise ModelFailed(first_line(err)) from err
        return by_role(found, self._metadata, self._detect.score_threshold)

    def close(self) -> None:
        """Closes the connections; no run may be under way."""
        self._server.close()

    def _taken(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those of some batch sizes that the server takes; raises ModelFailed if it takes none."""
        for number, size in reversed([*enumerate(sizes, 1)]):
            try:
                self.run(np.zeros((size, *self._metadata.input_hw, 3), np.uint8))
            except ModelFailed:
                if number == 1:
                    raise
            else:
                return tuple(sizes[:number])
        raise AssertionError


def open_model(_local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Describes a server's model, and finds the batch sizes that the server takes; see `ENGINES`.

    Raises:
      ModelError: The server is away for too long, has no such model, the model is no detector, or fails on a blank image.
    """
    if detect.precision != "float32" or detect.xla:
        raise ModelError(f"engine {detect.engine}: expected no --precision and no --xla, which are the server's own settings")
    server = RemoteServer(model, detect.engine)
    try:
        return _opened(server, folder, model, detect)
    except (ModelFailed, ValueError) as err:
        server.close()
        raise ModelError(f"model {folder}: fails on a blank image: {' '.join(str(err).split())[:300]}") from err
    except BaseException:
        server.close()
        raise


def _opened(server: RemoteServer, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    wanted = list(server.outputs)

    def run(feed: Arrays) -> Arrays:
        return dict(zip(wanted, server.infer(feed, wanted), strict=True))

    signature, _ = channels_last(Signature(server.inputs, server.outputs, run))
    metadata = describe(signature, None, model, folder)
    if metadata.resize == "none":
        raise ModelError(f"model {folder}: takes images of any size; set model.input_hw and model.resize")
    if detect.labels_per_box == "several":
        check_several_labels(metadata, folder)
    used = {metadata.boxes_output, metadata.scores_output, metadata.classes_output, metadata.count_output}
    wanted = [name for name in wanted if name in used]
    engine = RemoteEngine(server, signature, metadata, detect)
    server.loaded()
    fixed = (signature.inputs[metadata.input_name].shape or (None,))[0]
    return OpenedModel(engine, role_metadata(metadata), fixed, version=server.version)
