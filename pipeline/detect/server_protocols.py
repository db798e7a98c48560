"""Protocols of model servers over gRPC: KServe v2 and TensorFlow Serving's own; each call is one request, without retries.

KServe v2, of Triton, OpenVINO Model Server and KServe: https://github.com/kserve/open-inference-protocol.
TensorFlow Serving: https://github.com/tensorflow/serving/tree/master/tensorflow_serving/apis.

A protocol is a class for one model, by its name, its signature (servers without signatures ignore it) and the deadline of each
request. `connect` returns a client with a method `close`, which connects at the first request. `describe` asks for a version
(empty: the highest), and returns its number (empty if the server names none), and inputs and outputs by name. `infer` runs the
model; None stands for an output that the answer lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.detect.engine import check_installed
from pipeline.detect.model_arrays import Arrays, Tensor

_Described = tuple[str, dict[str, Tensor], dict[str, Tensor]]
_CHANNEL = [  # tritonclient replaces its own by these
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC's own grows to two minutes
]


class KServe:
    """The KServe v2 protocol."""

    def __init__(self, name: str, signature: str, timeout_s: float):
        check_installed("triton")
        self._name, self._timeout_s = name, timeout_s

    def connect(self, host: str, *, secure: bool) -> Any:
        from tritonclient.grpc import InferenceServerClient

        return InferenceServerClient(host, ssl=secure, channel_args=_CHANNEL)

    def describe(self, client: Any, version: str) -> _Described:
        from tritonclient.utils import triton_to_np_dtype

        metadata = client.get_model_metadata(self._name, version, client_timeout=self._timeout_s)
        inputs, outputs = (
            {
                one.name: Tensor(_sizes(one.shape), np.dtype(dtype).name)
                for one in tensors
                if (dtype := triton_to_np_dtype(one.datatype))
            }
            for tensors in (metadata.inputs, metadata.outputs)
        )
        numbers = [int(each) for each in metadata.versions if each.isdigit()]
        return version or (str(max(numbers)) if numbers else ""), inputs, outputs

    def infer(self, client: Any, version: str, feed: Arrays, wanted: Sequence[str]) -> dict[str, np.ndarray | None]:
        from tritonclient.grpc import InferInput, InferRequestedOutput
        from tritonclient.utils import np_to_triton_dtype

        inputs = [InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in feed.items()]
        for given, array in zip(inputs, feed.values(), strict=True):
            given.set_data_from_numpy(array)
        outputs = [InferRequestedOutput(name) for name in wanted]
        answer = client.infer(self._name, inputs, version, outputs, client_timeout=self._timeout_s)
        return {name: answer.as_numpy(name) for name in wanted}


class TensorFlowServing:
    """TensorFlow Serving's `PredictionService`. Its stubs come with `tfx-bsl`."""

    def __init__(self, name: str, signature: str, timeout_s: float):
        check_installed("tf-serving")
        self._name, self._signature, self._timeout_s = name, signature, timeout_s

    def connect(self, host: str, *, secure: bool) -> Any:
        import grpc
        from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub

        channel = (
            grpc.secure_channel(host, grpc.ssl_channel_credentials(), _CHANNEL)
            if secure
            else grpc.insecure_channel(host, _CHANNEL)
        )
        stub = PredictionServiceStub(channel)
        return SimpleNamespace(predict=stub.Predict, describe=stub.GetModelMetadata, close=channel.close)

    def describe(self, client: Any, version: str) -> _Described:
        import tensorflow as tf
        from tensorflow_serving.apis.get_model_metadata_pb2 import GetModelMetadataRequest, SignatureDefMap

        request = GetModelMetadataRequest(model_spec=self._spec(version), metadata_field=["signature_def"])
        answer, found = client.describe(request, timeout=self._timeout_s), SignatureDefMap()
        answer.metadata["signature_def"].Unpack(found)
        if self._signature not in found.signature_def:
            raise ValueError(f"it has no signature '{self._signature}' but {sorted(found.signature_def)}; set model.signature")
        signature = found.signature_def[self._signature]

        def tensor(name: str, info: Any) -> Tensor:
            shape = None if info.tensor_shape.unknown_rank else _sizes(dim.size for dim in info.tensor_shape.dim)
            return Tensor(shape, np.dtype(tf.dtypes.as_dtype(info.dtype).as_numpy_dtype).name, name in signature.defaults)

        inputs, outputs = (
            {name: tensor(name, info) for name, info in tensors.items()} for tensors in (signature.inputs, signature.outputs)
        )
        return str(answer.model_spec.version.value), inputs, outputs

    def infer(self, client: Any, version: str, feed: Arrays, wanted: Sequence[str]) -> dict[str, np.ndarray | None]:
        import tensorflow as tf
        from tensorflow_serving.apis.predict_pb2 import PredictRequest

        request = PredictRequest(model_spec=self._spec(version), output_filter=wanted)
        for name, array in feed.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
        outputs = client.predict(request, timeout=self._timeout_s).outputs
        return {name: tf.make_ndarray(outputs[name]) if name in outputs else None for name in wanted}

    def _spec(self, version: str) -> Any:
        from tensorflow_serving.apis.model_pb2 import ModelSpec

        spec = ModelSpec(name=self._name, signature_name=self._signature)
        if version:
            spec.version.value = int(version)
        return spec


def _sizes(shape: Iterable[int]) -> tuple[int | None, ...]:
    """A shape whose -1 stands for any size."""
    return tuple(None if size < 0 else size for size in shape)


PROTOCOLS: dict[str, type[KServe] | type[TensorFlowServing]] = {"triton": KServe, "tf-serving": TensorFlowServing}
"""By the value of `--engine`."""
