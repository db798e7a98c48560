"""A server of the KServe v2 protocol over gRPC, made of the stubs in `tritonclient`; the test's own function is its model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

Arrays = dict[str, np.ndarray]
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


class Refused(Exception):
    """The server answers with this status."""

    def __init__(self, code: grpc.StatusCode, message: str = "no"):
        super().__init__(message)
        self.code = code


class ModelServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves one model on a port of this machine; the port stays its own between `stop` and `start`.

    Args:
      run: Inputs to outputs; raises `Refused`.
      inputs: Datatype and shape by name.
      outputs: As inputs.
      versions: Of the model.
      credentials: Of a server with TLS.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        inputs: Tensors,
        outputs: Tensors,
        versions: tuple[str, ...] = ("3",),
        credentials: grpc.ServerCredentials | None = None,
    ):
        self.run, self.requests = run, 0
        self._inputs, self._outputs, self._versions, self._credentials = inputs, outputs, versions, credentials
        self.port = 0
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Listens, from the second time on at the same port."""
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 1)]
        server = grpc.server(ThreadPoolExecutor(8), options=options)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        place = f"localhost:{self.port}"
        self.port = server.add_secure_port(place, self._credentials) if self._credentials else server.add_insecure_port(place)
        server.start()
        self._server = server

    def stop(self) -> None:
        """Ends at once, also requests under way."""
        if self._server:
            self._server.stop(0).wait()
        self._server = None

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name != "toy":
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {request.name}")
        answer = service_pb2.ModelMetadataResponse(name=request.name, versions=self._versions)
        for tensors, field in ((self._inputs, answer.inputs), (self._outputs, answer.outputs)):
            for name, (datatype, shape) in tensors.items():
                field.add(name=name, datatype=datatype, shape=shape)
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests += 1
        given = {
            tensor.name: np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        try:
            found = self.run(given)
        except Refused as err:
            context.abort(err.code, str(err))
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version=request.model_version)
        for name in (output.name for output in request.outputs if output.name in found):
            answer.outputs.add(name=name, datatype=np_to_triton_dtype(found[name].dtype), shape=found[name].shape)
            answer.raw_output_contents.append(np.ascontiguousarray(found[name]).tobytes())
        return answer


@contextlib.contextmanager
def serving(server: ModelServer) -> Iterator[ModelServer]:
    """The server listens while this lasts."""
    server.start()
    try:
        yield server
    finally:
        server.stop()
