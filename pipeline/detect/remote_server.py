"""Client of a model on servers that speak the KServe v2 protocol over gRPC: deadlines, retries, several endpoints.

Triton, OpenVINO Model Server and KServe speak it: https://github.com/kserve/open-inference-protocol.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline.config import ModelConfig
from pipeline.detect.versions import first_line, is_remote
from pipeline.errors import ModelError
from pipeline.results.cancellation import stopped
from pipeline.stats.process import PROCESS

_PATH = re.compile(r"(grpcs?)://([^/]+)/([^/]+)/?")
_AWAY = ("UNAVAILABLE", "CANCELLED", "NOT_FOUND")  # a server that starts may not have loaded the model yet
_BUSY = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
_TRIES = 3  # while a server is busy; then the images may be the reason
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_REST_S = 5.0  # an endpoint that failed is left alone for so long, if there is another one
_NOTICE_S = 3.0
_CHANNEL = [  # tritonclient replaces its own by these
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC's own grows to two minutes
]
_T = TypeVar("_T")

LOST = "the model server is lost: "
"""Begins the message of an error that is no image's fault."""


class Tensor(NamedTuple):
    """An input or output by the server's metadata; -1 in the shape: of any size."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class RemoteServer:
    """One model on one or more endpoints; thread-safe.

    Args:
      model: Its path is `grpc://host:port,host:port/name`; `grpcs` for TLS.

    Raises:
      ModelError: The path is malformed, the package is missing, the server has no such model, or is away for too long.

    Attributes:
      version: Pinned in each request; "" if the server names none.
      inputs: By name.
      outputs: By name.
    """

    def __init__(self, model: ModelConfig):
        found = _PATH.fullmatch(model.path)
        if not found:
            raise ModelError(f"model {model.path}: expected grpc://host:port/name or grpc://host:port,host:port/name, or grpcs")
        if not importlib.util.find_spec("tritonclient"):
            raise ModelError(
                "engine triton: its package is missing; install the extra: pip install 'hybrid-detection-pipeline[triton]'"
            )
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import triton_to_np_dtype

        self._path, self._name = model.path, found[3]
        self._timeout_s, self._wait_s = model.server_timeout_s, model.server_wait_s
        secure = found[1] == "grpcs"
        self._clients = [InferenceServerClient(host, ssl=secure, channel_args=_CHANNEL) for host in found[2].split(",")]
        self._failed_at = [-_REST_S] * len(self._clients)
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._announced = False
        self._loading = True
        try:
            metadata = self._patiently(
                lambda client: client.get_model_metadata(self._name, model.model_version or "", **self._deadline)
            )
        except ValueError as err:
            raise ModelError(f"model {self._path}: the server answers: {err}") from err
        numbers = [int(version) for version in metadata.versions if version.isdigit()]
        self.version = model.model_version or (str(max(numbers)) if numbers else "")
        kinds = [
            {
                one.name: Tensor(tuple(one.shape), np.dtype(dtype))
                for one in tensors
                if (dtype := triton_to_np_dtype(one.datatype))
            }
            for tensors in (metadata.inputs, metadata.outputs)
        ]
        self.inputs, outputs = kinds
        self.outputs = {name: tensor for name, tensor in outputs.items() if tensor.dtype != object}

    @property
    def _deadline(self) -> Mapping[str, float]:
        return {"client_timeout": self._timeout_s}

    def infer(self, feed: Mapping[str, np.ndarray], wanted: Sequence[str]) -> list[np.ndarray]:
        """Runs the model on a batch.

        Args:
          feed: Inputs by name, each with the batch axis first.
          wanted: Names of outputs.

        Returns:
          The wanted outputs.

        Raises:
          ValueError: The server refuses these images, and accepts a blank one.
          ModelError: The job was stopped, or the server is away for too long; the message begins with `LOST`.
        """
        blank = {name: np.zeros_like(array[:1]) for name, array in feed.items()}

        def blame() -> bool:
            """Whether the images are the reason: of several the caller tries each one, of one a blank image tells."""
            if len(next(iter(feed.values()))) > 1 or self._loading:
                return True
            try:
                self._request(self._next()[1], blank, wanted)
            except Exception:  # noqa: BLE001  whatever a server answers
                return False
            return True

        return self._patiently(lambda client: self._request(client, feed, wanted), blame)

    def loaded(self) -> None:
        """From now on an error that a blank image meets too is waited for."""
        self._loading = False

    def close(self) -> None:
        """Closes the connections; no call may be under way."""
        for client in self._clients:
            client.close()

    def _request(self, client: Any, feed: Mapping[str, np.ndarray], wanted: Sequence[str]) -> list[np.ndarray]:
        from tritonclient.grpc import InferInput, InferRequestedOutput
        from tritonclient.utils import np_to_triton_dtype

        inputs = [InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in feed.items()]
        for given, array in zip(inputs, feed.values(), strict=True):
            given.set_data_from_numpy(array)
        outputs = [InferRequestedOutput(name) for name in wanted]
        answer = client.infer(self._name, inputs, self.version, outputs, **self._deadline)
        count = len(next(iter(feed.values())))
        arrays = {name: answer.as_numpy(name) for name in wanted}
        for name, array in arrays.items():
            dtype = self.outputs[name].dtype
            if array is None or array.shape[:1] != (count,) or array.dtype != dtype:
                got = "none" if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"expected output '{name}' {dtype} of {count} images from the server, got {got}")
        return list(arrays.values())

    def _patiently(self, call: Callable[[Any], _T], blame: Callable[[], bool] = lambda: True) -> _T:
        """Calls one endpoint after the other until one answers; waits with growing pauses while none does."""
        pause = _FIRST_PAUSE_S
        for attempt in itertools.count(1):
            number, client = self._next()
            try:
                answer = call(client)
            except Exception as err:  # noqa: BLE001  tritonclient's own, gRPC's and NumPy's, for what the server answers
                self._note_failure(number, err, blame, attempt)
            else:
                self._failed_at[number] = -_REST_S
                with self._lock:
                    self._away_since, self._announced = None, False
                return answer
            if attempt % len(self._clients) == 0:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise AssertionError

    def _note_failure(self, number: int, err: Exception, blame: Callable[[], bool], attempt: int) -> None:
        """Returns if another attempt may help, else raises."""
        code, reason = _code(err), first_line(err)
        if code in _AWAY:
            self._failed_at[number] = time.monotonic()
        may_pass = code in _AWAY and not (self._loading and code == "NOT_FOUND")
        if not may_pass and (code not in _BUSY or attempt >= _TRIES) and blame():
            raise ValueError(reason) from err
        PROCESS.parts["detector"].progressed()  # waiting is not being stuck
        with self._lock:
            now = time.monotonic()
            self._away_since = self._away_since or now
            away_s = now - self._away_since
            announce = away_s > _NOTICE_S and not self._announced
            self._announced |= announce
        if announce:
            notice = f"waiting for model {self._path}, which has not answered for {_NOTICE_S:g} s: {reason}"
            print(notice, file=sys.stderr, flush=True)
        if stopped():
            raise ModelError(f"{LOST}the job was stopped while it waited for model {self._path}") from err
        if away_s > self._wait_s:
            raise ModelError(f"{LOST}model {self._path} has not answered for {self._wait_s:g} s: {reason}") from err

    def _next(self) -> tuple[int, Any]:
        """The endpoint whose turn it is, of those that have not failed lately; of all if all have."""
        first, many = next(self._turns), len(self._clients)
        numbers = [(first + n) % many for n in range(many)]
        rested = [n for n in numbers if time.monotonic() - self._failed_at[n] > _REST_S]
        return (chosen := (rested or numbers)[0]), self._clients[chosen]


def _code(err: Exception) -> str:
    """Name of gRPC's status; empty for other errors."""
    status = getattr(err, "status", None)
    return str(status() or "").rpartition(".")[2] if callable(status) else ""


def check_engine(model: ModelConfig, engine: str) -> None:
    """Raises ModelError unless the engine fits the model's path."""
    if is_remote(model.path) != (engine == "triton"):
        expected = "grpc://host:port/name as --model" if engine == "triton" else "--engine triton for a model server"
        raise ModelError(f"model {model.path}: expected {expected}")
