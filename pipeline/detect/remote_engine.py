"""An engine over a model on servers: described by their metadata, with retries and several endpoints."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.config.engines import ENGINES, SERVER
from pipeline.detect.describe_model import describe
from pipeline.detect.engine import FunctionEngine, ImagesRefused, ModelFailed, NoMemoryNow, OpenedModel
from pipeline.detect.model_arrays import Arrays, Signature, channels_last, feed_of, split_outputs
from pipeline.detect.server_protocols import PROTOCOLS
from pipeline.detect.versions import first_line, is_remote
from pipeline.errors import ModelAwayError, ModelError
from pipeline.log_lines import console
from pipeline.process import PROCESS

_PATH = re.compile(r"(grpcs?)://([^/]+)/([^/]+)/?")
_AWAY = ("UNAVAILABLE", "CANCELLED", "NOT_FOUND")  # a server that starts may not have loaded the model yet
_BUSY = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
_FINAL = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "")  # empty: an answer that is not as the server describes it
_TOO_LARGE = re.compile("message larger than max", re.IGNORECASE)  # gRPC's words; its status is that of a lack of memory
_REQUEST_SECONDS = 60.0  # the deadline of one request
_TRIES = 3  # while a server is busy; then the images may be the reason
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_NOTICE_S = 3.0
_MORE_ROUNDS = 8  # some five seconds, for an endpoint that does not answer what another one has refused
_BATCH_SIZES = (1, 2, 4, 8)
_T = TypeVar("_T")


class RemoteServer:
    """One model on one or more endpoints; thread-safe.

    Args:
      model: Its path is `grpc://host:port,host:port/name`; `grpcs` for TLS.
      engine: The servers' protocol, one of `PROTOCOLS`.

    Raises:
      ModelError: The path is malformed, the package is missing, the server has no such model, or is away for too long.

    Attributes:
      version: Pinned in each request; "" if the server names none.
      inputs: By name.
      outputs: By name.
    """

    def __init__(self, model: ModelConfig, engine: str):
        found = _PATH.fullmatch(model.path)
        if not found:
            raise ModelError(f"model {model.path}: expected grpc://host:port/name or grpc://host:port,host:port/name, or grpcs")
        self._path, self._wait_s = model.path, model.server_wait_s
        self._protocol = PROTOCOLS[engine](found[3], model.signature or "serving_default", _REQUEST_SECONDS)
        self._clients = [self._protocol.connect(host, secure=found[1] == "grpcs") for host in found[2].split(",")]
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._announced = False
        self._loading = True
        try:
            described = self._with_retries(lambda client: self._protocol.describe(client, model.model_version or ""))
        except (ModelFailed, NoMemoryNow) as err:
            kind = ModelAwayError if isinstance(err, NoMemoryNow) else ModelError
            raise kind(f"model {self._path}: the server answers: {err}") from err
        self.version, self.inputs, outputs = described
        self.outputs = {name: tensor for name, tensor in outputs.items() if tensor.dtype != "object"}

    def infer(self, feed: Mapping[str, np.ndarray], wanted: Sequence[str]) -> list[np.ndarray]:
        """Runs the model on a batch.

        Args:
          feed: Inputs by name, images with the batch axis first; scalars are settings.
          wanted: Names of outputs.

        Returns:
          The wanted outputs.

        Raises:
          ModelFailed: Each endpoint that answers refuses these images, or all.
          NoMemoryNow: So it is, and one of them for lack of memory at this moment.
          ModelError: The job was stopped, or the server is away for too long.
        """
        return self._with_retries(lambda client: self._request(client, feed, wanted))

    def loaded(self) -> None:
        """From now on a server that does not know the model is waited for."""
        self._loading = False

    def close(self) -> None:
        """Closes the connections; no call may be under way."""
        for client in self._clients:
            client.close()

    def _request(self, client: Any, feed: Mapping[str, np.ndarray], wanted: Sequence[str]) -> list[np.ndarray]:
        arrays, count = list[np.ndarray](), _count(feed)
        for name, array in self._protocol.infer(client, self.version, feed, wanted).items():
            dtype = self.outputs[name].dtype
            if array is None or array.shape[:1] != (count,) or array.dtype != dtype:
                got = "none" if array is None else f"{array.dtype} {array.shape}"
                raise ModelFailed(f"expected output '{name}' {dtype} of {count} images from the server, got {got}")
            arrays.append(array)
        return arrays

    def _with_retries(self, call: Callable[[Any], _T]) -> _T:
        """Calls one endpoint after the other until one answers; waits with growing pauses while none does.

        The call fails once all of them have refused it: one whose device is sick refuses everything. An endpoint that does not
        answer has a few seconds to come back, as one that is started anew.
        """
        pause, first, refusals, last = _FIRST_PAUSE_S, next(self._turns), dict[int, ModelFailed | NoMemoryNow](), math.inf
        for attempt in itertools.count(1):
            place = (first + attempt) % len(self._clients)
            try:
                if place not in refusals:
                    answer = call(self._clients[place])
                    with self._lock:
                        self._away_since, self._announced = None, False
                    return answer
            except Exception as err:  # noqa: BLE001  tritonclient's own, gRPC's and NumPy's, for what the server answers
                if refusal := self._refusal(err, attempt):
                    refusals[place] = refusal
                    last = min(last, attempt + _MORE_ROUNDS * len(self._clients))
            if refusals and (len(refusals) == len(self._clients) or attempt >= last):
                raise max(refusals.values(), key=lambda refusal: isinstance(refusal, NoMemoryNow))  # which may pass
            if attempt % len(self._clients) == 0:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise AssertionError

    def _refusal(self, err: Exception, attempt: int) -> ModelFailed | NoMemoryNow | None:
        """What the call fails with unless another endpoint answers; None if this endpoint, too, may do so later.

        Raises:
          ModelError: The job was stopped, or the server is away for too long.
        """
        code, reason = _code_and_reason(err)
        # a server that has just come may still load a model that it does not know
        is_unknown = self._loading and code == "NOT_FOUND" and self._away_since is None
        may_pass = code in _AWAY and not is_unknown
        if not may_pass and (code not in _BUSY or attempt >= _TRIES):
            is_final = code in _FINAL or _TOO_LARGE.search(reason)
            refusal = (ImagesRefused if is_final else NoMemoryNow if code == "RESOURCE_EXHAUSTED" else ModelFailed)(reason)
            refusal.__cause__ = err
            return refusal
        PROCESS.parts["detector"].progressed()  # waiting is not being stuck
        with self._lock:
            self._away_since = self._away_since or time.monotonic()
            away_s = time.monotonic() - self._away_since
            is_news = away_s > _NOTICE_S and not self._announced
            self._announced |= is_news
        if is_news:
            console.info("waiting for model %s, which has not answered for %g s: %s", self._path, _NOTICE_S, reason)
        if PROCESS.stopped:
            raise ModelError(f"the job was stopped while it waited for model {self._path}") from err
        if away_s > self._wait_s:
            raise ModelAwayError(f"model {self._path} has not answered for {self._wait_s:g} s: {reason}") from err
        return None


def _count(feed: Mapping[str, np.ndarray]) -> int:
    """The number of images."""
    return next(len(array) for array in feed.values() if array.ndim)


def _code_and_reason(err: Exception) -> tuple[str, str]:
    """Name of gRPC's status, empty for other errors, and the server's words."""
    status = getattr(err, "status", None) or getattr(err, "code", None)  # tritonclient's, gRPC's own
    code = str(status() or "").rpartition(".")[2] if callable(status) else ""
    details = getattr(err, "details", None)
    return code, f"[{code}] {details()}" if callable(details) else first_line(err)


def open_model(_local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Describes a server's model, and finds the batch sizes that the server takes; see `ENGINES`.

    Raises:
      ModelError: The server is away for too long, has no such model, or the model is no detector.
      ModelFailed: It fails on a blank image.
      NoMemoryNow: The server has no memory for one.
    """
    server = RemoteServer(model, detect.engine)
    try:
        return _opened(server, folder, model, detect)
    except BaseException:
        server.close()
        raise


def _opened(server: RemoteServer, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    wanted = list(server.outputs)

    def run(feed: Arrays) -> Arrays:
        return dict(zip(wanted, server.infer(feed, wanted), strict=True))

    signature = channels_last(Signature(server.inputs, server.outputs, run))
    metadata = describe(signature, None, model, folder, detect)
    if metadata.resize == "none":
        raise ModelError(f"model {folder}: takes images of any size; set model.input_hw and model.resize")
    used = {metadata.boxes_output, metadata.scores_output, metadata.classes_output, metadata.count_output}
    wanted = [name for name in wanted if name in used]
    batch = signature.batch_of(metadata)

    def detect_in(pixels: np.ndarray) -> Arrays:
        if signature.channels_first:  # moved as bytes; arithmetic keeps the order in memory
            pixels = np.moveaxis(np.ascontiguousarray(np.moveaxis(pixels, -1, 1)), 1, -1)
        feed = feed_of(pixels, metadata, detect, dtype=signature.inputs[metadata.input_name].dtype)
        return split_outputs(signature.run(feed), metadata)

    engine = FunctionEngine(detect_in, detect, batch, sizes=_BATCH_SIZES, close=server.close, recovers_s=model.server_wait_s)
    engine.batch_sizes = _accepted(engine, metadata)
    server.loaded()
    return OpenedModel(engine, metadata, version=server.version)


def _accepted(engine: FunctionEngine, metadata: DetectorMetadata) -> tuple[int, ...]:
    """The batch sizes up to the largest one that the server accepts; raises its refusal if it accepts none."""
    for count, size in reversed([*enumerate(engine.batch_sizes, 1)]):
        try:
            engine.run(np.zeros((size, *metadata.input_hw, 3), np.uint8))
        except (ModelFailed, NoMemoryNow):
            if count == 1:
                raise
        else:
            return engine.batch_sizes[:count]
    raise AssertionError


def check_engine(model: ModelConfig, engine: str) -> None:
    """Raises ModelError unless the engine fits the model's path."""
    servers = [name for name, kind in ENGINES.items() if SERVER in kind.files]
    if ":" not in engine and is_remote(model.path) != (engine in servers):
        wanted = f"--engine {' or '.join(servers)} for a model server"
        expected = "grpc://host:port/name as --model" if engine in servers else wanted
        raise ModelError(f"model {model.path}: expected {expected}")
