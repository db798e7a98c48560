"""Converter: a network of OpenVINO becomes an int8 one (NNCF, quantisation after training) whose head stays in float32."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from models.progress import shown
from pipeline.detect.openvino_convert import NETWORK, read_description, write_network
from pipeline.detect.versions import first_line
from pipeline.detect.warmup_requests import keep_requests, kept_requests
from pipeline.errors import ModelError

FIGURES = "assets.extra/openvino_int8.json"
_CONVOLUTIONS = ("Convolution", "GroupConvolution")


class _Pixels:
    """Model inputs for NNCF, which goes through them several times; each time shows its progress."""

    def __init__(self, images: Sequence[np.ndarray], batch: int):
        self._images, self._batch = images, batch

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[np.ndarray]:
        for image in shown(self._images, "calibrating", "images"):
            yield np.stack([image] * self._batch)


def check_nncf() -> None:
    """Raises ModelError if NNCF is missing."""
    if not importlib.util.find_spec("nncf"):
        raise ModelError("quantize: NNCF is missing; install the extra: pip install 'hybrid-detection-pipeline[quantize]'")


def quantise(network: str, images: Sequence[np.ndarray], target: str) -> None:
    """Quantises all but the head to int8, weights by channel and activations by what they are on some images.

    Args:
      network: Folder of the network in float32 (`openvino_convert`).
      images: Of the model's input size, `(H, W, 3) uint8`, to calibrate with.
      target: Folder to write.

    Raises:
      ModelError: NNCF is missing or cannot quantise the model.
    """
    check_nncf()
    os.environ["NNCF_CI"] = "1"  # else NNCF reports its use over the network
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(os.path.join(network, NETWORK))
    head = head_of(model)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # NNCF draws bars of its own
            small = nncf.quantize(
                model,
                nncf.Dataset(_Pixels(images, model.inputs[0].shape[0])),
                preset=nncf.QuantizationPreset.MIXED,  # activations may be negative after leaky ReLU, Mish and SiLU
                subset_size=len(images),
                ignored_scope=nncf.IgnoredScope(names=head, validate=False),
            )
    except Exception as err:
        raise ModelError(f"quantize: NNCF cannot quantise the model: {first_line(err)}") from err
    write_network(target, small, read_description(network))
    keep_requests(target, kept_requests(network))


def head_of(model: Any) -> list[str]:
    """Names of the operations to keep in float32: the last convolutions, behind which no other one stands, and all behind them.

    Raises:
      ModelError: No convolution is left to quantise.
    """
    operations = model.get_ordered_ops()
    before_convolution = set()  # operations with a convolution behind them
    for operation in reversed(operations):
        behind = [target.get_node() for output in operation.outputs() for target in output.get_target_inputs()]
        if any(one.get_type_name() in _CONVOLUTIONS or one.get_friendly_name() in before_convolution for one in behind):
            before_convolution.add(operation.get_friendly_name())
    head: dict[str, None] = {}
    body = 0
    for operation in operations:
        name, inputs = operation.get_friendly_name(), [value.get_source_output().get_node() for value in operation.inputs()]
        is_convolution = operation.get_type_name() in _CONVOLUTIONS
        if (is_convolution and name not in before_convolution) or any(one.get_friendly_name() in head for one in inputs):
            head[name] = None
        body += is_convolution and name not in head
    if not body:
        raise ModelError("quantize: expected a model with convolutions before its head, found none; it stays as it is")
    return list(head)
