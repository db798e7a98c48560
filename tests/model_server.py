"""Model servers made of the stubs in `tritonclient` and `tensorflow-serving-api`; the test's own function is the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, ClassVar

import grpc
import numpy as np
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2, prediction_service_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from tests.emulators import free_ports
from tests.without_keras import tf

Arrays = dict[str, np.ndarray]
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


class Refused(Exception):
    """The server answers with this status and text."""


@dataclasses.dataclass(eq=False)
class ModelServer:
    """Serves one model, `toy`, on a port of this machine; the port stays its own between `stop` and `start`.

    Attributes:
      run: Inputs to outputs; raises `Refused`.
      inputs: Datatype, as Triton names it, and shape by name.
      outputs: As inputs.
      versions: Of the model.
      credentials: Of a server with TLS.
      engine: The value of `--engine`.
      add_to: Adds its protocol to a server.
    """

    run: Callable[[Arrays], Arrays]
    inputs: Tensors
    outputs: Tensors
    versions: tuple[str, ...] = ("3",)
    credentials: grpc.ServerCredentials | None = None
    port: int = 0
    requests: int = 0
    engine: ClassVar[str]
    add_to: ClassVar[Callable[[Any, grpc.Server], None]]

    def start(self) -> None:
        """Listens, from the second time on at the same port."""
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 1)]
        server = grpc.server(ThreadPoolExecutor(16), options=options)
        self.add_to(server)
        self.port = self.port or free_ports(1)[0]  # the kernel gives it to nobody while this server is away
        place = f"localhost:{self.port}"
        self.port = server.add_secure_port(place, self.credentials) if self.credentials else server.add_insecure_port(place)
        server.start()
        self._server = server

    def stop(self) -> None:
        """Ends at once, also requests under way."""
        self._server.stop(0).wait()

    def _found(self, given: Arrays, context: Any) -> Arrays:
        self.requests += 1
        try:
            return self.run(given)
        except Refused as err:
            context.abort(*err.args)


class KServeServer(ModelServer, service_pb2_grpc.GRPCInferenceServiceServicer):
    """Speaks the KServe v2 protocol."""

    engine = "triton"
    add_to = service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name != "toy":
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {request.name}")
        answer = service_pb2.ModelMetadataResponse(name=request.name, versions=self.versions)
        for tensors, field in ((self.inputs, answer.inputs), (self.outputs, answer.outputs)):
            for name, (datatype, shape) in tensors.items():
                field.add(name=name, datatype=datatype, shape=shape)
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        given = {
            tensor.name: np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        found = self._found(given, context)
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version=request.model_version)
        for name in (output.name for output in request.outputs if output.name in found):
            answer.outputs.add(name=name, datatype=np_to_triton_dtype(found[name].dtype), shape=found[name].shape)
            answer.raw_output_contents.append(np.ascontiguousarray(found[name]).tobytes())
        return answer


class TensorFlowServer(ModelServer, prediction_service_pb2_grpc.PredictionServiceServicer):
    """Speaks TensorFlow Serving's protocol.

    Attributes:
      signatures: Of the model, by name; default: `serving_default` with the inputs and outputs.
    """

    engine = "tf-serving"
    signatures: Mapping[str, Any] = MappingProxyType({})
    add_to = prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server

    def GetModelMetadata(self, request: Any, context: Any) -> Any:
        if request.model_spec.name != "toy":
            context.abort(grpc.StatusCode.NOT_FOUND, f"Servable not found: unknown model {request.model_spec.name}")
        answer = get_model_metadata_pb2.GetModelMetadataResponse()
        answer.model_spec.version.value = max(map(int, self.versions))
        signatures = get_model_metadata_pb2.SignatureDefMap(signature_def=self.signatures or self._own())
        answer.metadata["signature_def"].Pack(signatures)
        return answer

    def _own(self) -> dict[str, Any]:
        signature = meta_graph_pb2.SignatureDef()
        for tensors, field in ((self.inputs, signature.inputs), (self.outputs, signature.outputs)):
            for name, (datatype, shape) in tensors.items():
                field[name].dtype = tf.as_dtype(triton_to_np_dtype(datatype)).as_datatype_enum
                for size in shape:
                    field[name].tensor_shape.dim.add(size=size)
        return {"serving_default": signature}

    def Predict(self, request: Any, context: Any) -> Any:
        if str(request.model_spec.version.value) not in self.versions:
            context.abort(grpc.StatusCode.NOT_FOUND, "Servable not found for request")
        found = self._found({name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}, context)
        answer = predict_pb2.PredictResponse(model_spec=request.model_spec)
        for name in request.output_filter:
            if name in found:
                answer.outputs[name].CopyFrom(tf.make_tensor_proto(found[name]))
        return answer


@contextlib.contextmanager
def serving(server: ModelServer) -> Iterator[ModelServer]:
    """The server listens while this lasts."""
    server.start()
    try:
        yield server
    finally:
        server.stop()
