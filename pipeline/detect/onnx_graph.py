"""Puts the steps before and behind a network into its ONNX graph, once for ONNX Runtime and OpenVINO alike.

    uint8 (n, H, W, 3) -> cast, scale, mean, order of channels, transposition -> network -> boxes and scores of all candidates
                                                                                        -> the best of them, picked

The steps themselves are those of `model_arrays`, on values of a graph instead of arrays.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.engine import check_package
from pipeline.detect.model_arrays import PICKED, PICKS, Signature, feed_of, has_candidates, split_outputs
from pipeline.detect.versions import ONNX_MODEL, counted_names, first_line, is_number
from pipeline.errors import ModelError

if TYPE_CHECKING:
    import onnx

PREFIX = "steps/"  # of the names of inputs, outputs and values that are not the network's own
PIXELS = PREFIX + "pixels"
_OLDEST_OPSET = 11  # for slices and indices of values


def read_onnx(file: str, folder: str) -> onnx.ModelProto:
    """Reads an ONNX file with its external data.

    Args:
      file: On this machine.
      folder: Where it is from: itself, or the folder of a version.

    Raises:
      ModelError: It is no ONNX file, has weights in a file that its version does not follow, or the package onnx is missing.
    """
    check_package("onnx", f"model {folder}, an ONNX file,")
    import onnx

    try:
        model = onnx.load(file, load_external_data=False)
        _check_external_data(model, file, folder)
        onnx.load_external_data_for_model(model, os.path.dirname(file))
    except ModelError:
        raise
    except Exception as err:
        raise ModelError(f"model {folder}: it cannot be read as an ONNX file: {first_line(err)}") from err
    return model


def _check_external_data(model: onnx.ModelProto, file: str, folder: str) -> None:
    """Refuses weights in a file that the version of the model does not follow, as it is a fingerprint and no number."""
    is_file = folder.endswith(".onnx")
    if not is_file and any(is_number(posixpath.basename(each)) for each in (folder, os.path.dirname(file))):  # or an import of it
        return
    external = (entry for part in (model.graph, *model.functions) for tensor in _tensors(part) for entry in tensor.external_data)
    names = {posixpath.basename(entry.value) for entry in external if entry.key == "location"}
    if not names or not (others := names - counted_names(folder)):
        return
    other, stem = min(others), posixpath.basename(folder).removesuffix(".onnx")
    if is_file:
        todo = f"make a folder of versions: copy the file to {stem}/1/{ONNX_MODEL} and {other} to {stem}/1/{other}"
    else:
        todo, stem = f"make a version with a number: move {ONNX_MODEL} and {other} to {folder}/1/", folder
    why = f"keeps weights in {other}, which its version does not follow"
    raise ModelError(f"model {folder}: {why}; {todo}, and give --model {stem}")


def _tensors(part: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """All that may have external data, also in attributes and branches; onnx has this as a private function."""
    yield from getattr(part, "initializer", ())
    for each in (attribute for node in part.node for attribute in node.attribute):
        yield from (each.t, *each.tensors)
        for graph in (each.g, *each.graphs):  # empty where it has none
            yield from _tensors(graph)


def add_steps(
    model: onnx.ModelProto, signature: Signature, metadata: DetectorMetadata, detect: DetectConfig, folder: str
) -> tuple[bytes, tuple[str, ...]]:
    """An ONNX model that takes `(n, H, W, 3) uint8` as `PIXELS`.

    Args:
      model: The network; it is changed.
      signature: Its inputs and outputs, images `(n, H, W, 3)`.
      metadata: What they mean.
      detect: Thresholds.
      folder: The model, for messages.

    Returns:
      The file's content, and the roles of its outputs, whose names have `PREFIX` before them: of a model with candidates `boxes`,
      `scores`, `best (n, M)`, the best score of each box, and `PICKS`; else as `split_outputs` has them.

    Raises:
      ModelError: The file is too old.
    """
    from onnx import TensorProto, helper, version_converter

    opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    if opset < _OLDEST_OPSET:
        try:
            model, opset = version_converter.convert_version(model, _OLDEST_OPSET), _OLDEST_OPSET
        except Exception as err:
            raise ModelError(
                f"model {folder}: expected ONNX opset {_OLDEST_OPSET} or later, got {opset}; export it again"
            ) from err
    graph = model.graph
    steps = Steps(opset)
    images = next(each for each in graph.input if each.name == metadata.input_name)
    feed = _fed(steps.value(PIXELS), signature, metadata, detect, steps)
    for name, value in feed.items():
        steps.name(value, name)
    network = list(graph.node)
    before, steps.nodes = steps.nodes, []
    answered = {each.name: steps.value(each.name) for each in graph.output}
    answered[metadata.boxes_output].many = _many(signature, metadata)
    outputs = split_outputs(answered, metadata, steps)
    if has_candidates(signature, metadata):
        has_classes = bool(metadata.packed_layout) or signature.outputs[metadata.scores_output].rank == 3  # (n, M, C)
        outputs |= _picked(outputs, detect, steps, _many(signature, metadata), has_classes=has_classes)
    for role, value in outputs.items():
        steps.name(value, PREFIX + role)
    del graph.node[:], graph.output[:], graph.value_info[:]
    graph.node.extend([*before, *network, *steps.nodes])
    graph.initializer.extend(steps.constants)
    constant = {each.name for each in graph.initializer}
    others = [each for each in graph.input if each.name in constant and each.name not in feed]
    batch = images.type.tensor_type.shape.dim[0]
    hw = [size or name for size, name in zip(metadata.graph_hw, (PREFIX + "h", PREFIX + "w"), strict=True)]
    shape = [batch.dim_value or PREFIX + "n", *hw, 3]
    del graph.input[:]
    graph.input.extend([helper.make_tensor_value_info(PIXELS, TensorProto.UINT8, shape), *others])
    kinds = {"picked_classes": TensorProto.INT64, "picked_places": TensorProto.INT64, "passed": TensorProto.INT32}
    kinds |= _kinds_of(signature, metadata)
    for role in outputs:
        graph.output.append(helper.make_tensor_value_info(PREFIX + role, kinds.get(role, TensorProto.FLOAT), None))
    return model.SerializeToString(), tuple(outputs)


def to_float16(model: onnx.ModelProto, folder: str) -> onnx.ModelProto:
    """The network in float16, whose inputs and outputs stay as they are; it is changed. One with float16 weights stays as it is.

    What lies behind its last layers, the decoding of boxes, stays float32: float16 has steps of half a pixel at 640.

    Args:
      model: The network.
      folder: The model, for messages.

    Raises:
      ModelError: It cannot be converted.
    """
    from onnx import TensorProto
    from onnxconverter_common import float16

    graph = model.graph
    if any(each.data_type == TensorProto.FLOAT16 for each in graph.initializer):
        return model
    for number, each in enumerate(graph.node):
        each.name = each.name or f"node {number}"
    outputs = {each.name for each in graph.output}
    others = [each for each in graph.value_info if each.name not in outputs]  # the converter would cast what is listed twice
    del graph.value_info[:]
    graph.value_info.extend(others)
    casts = {each.name for each in graph.node if each.op_type == "Cast"}  # which say themselves what they make
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers that float16 does not have, which it rounds to those that it has
            converted: onnx.ModelProto = float16.convert_float_to_float16(
                model, keep_io_types=True, node_block_list=sorted(casts | _behind_layers(graph)), check_fp16_ready=False
            )
    except Exception as err:
        raise ModelError(f"model {folder}: cannot be converted to float16: {first_line(err)}") from err
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    for output in (each for each in converted.graph.output if each.type.tensor_type.elem_type in floats):
        # behind float32 nodes the converter (1.16) casts outputs to float16
        for cast in (each for each in converted.graph.node if each.op_type == "Cast" and output.name in each.output):
            cast.attribute[0].i = output.type.tensor_type.elem_type = TensorProto.FLOAT
    return converted


def _behind_layers(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes from the outputs back to the last layers: convolutions and products with weights.

    A convolution to one channel is none: that of DFL makes a number of pixels of a distribution.
    """
    makers = {name: each for each in graph.node for name in each.output}
    shapes = {each.name: list(each.dims) for each in graph.initializer}
    found, waiting = set[str](), [each.name for each in graph.output]
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.name in found or _is_layer(node.op_type, [shapes.get(name) for name in node.input]):
            continue
        found.add(node.name)
        waiting += node.input
    return found


def _is_layer(kind: str, shapes: Sequence[list[int] | None]) -> bool:
    if kind in ("MatMul", "Gemm"):
        return any(shapes)
    return kind in ("Conv", "ConvTranspose") and not (len(shapes) > 1 and shapes[1] is not None and shapes[1][0] == 1)


def _fed(pixels: _Value, signature: Signature, metadata: DetectorMetadata, detect: DetectConfig, steps: Steps) -> dict[str, Any]:
    """The network's inputs. Pixels are transposed as bytes where no other step looks at the channels."""
    is_first = metadata.channel_order == "rgb" and not metadata.normalisation
    if signature.channels_first and is_first:
        pixels = steps.transposed(pixels, [0, 3, 1, 2])
    feed = feed_of(pixels, metadata, detect, steps, signature.inputs[metadata.input_name].dtype)
    if signature.channels_first and not is_first:
        feed[metadata.input_name] = steps.transposed(feed[metadata.input_name], [0, 3, 1, 2])
    return feed


def _many(signature: Signature, metadata: DetectorMetadata) -> int | None:
    """How many boxes a model has, where its steps need the number; asked of the model if its description does not tell."""
    spec = signature.outputs[metadata.boxes_output]
    if metadata.box_format != "grid" or (spec.shape and spec.shape[1]):
        return spec.shape[1] if spec.shape else None
    images = signature.inputs[metadata.input_name]
    blank = np.zeros((signature.batch_of(metadata) or 1, *metadata.input_hw, 3), images.dtype)
    return int(signature.run({metadata.input_name: blank})[metadata.boxes_output].shape[1])


def _kinds_of(signature: Signature, metadata: DetectorMetadata) -> dict[str, int]:
    """ONNX's types of the outputs that stay as they are."""
    from onnx import helper

    names = {"classes": metadata.classes_output, "count": metadata.count_output}
    kept = {} if metadata.packed_layout else {role: signature.outputs[name].dtype for role, name in names.items() if name}
    return {role: int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))) for role, dtype in kept.items()}


def _picked(
    outputs: dict[str, Any], detect: DetectConfig, steps: Steps, many: int | None, *, has_classes: bool
) -> dict[str, Any]:
    """The best boxes, or pairs of box and class, of each image; see `model_arrays.picked_candidates`."""
    boxes, scores, several = outputs["boxes"], outputs["scores"], has_classes and detect.labels_per_box == "several"
    found = {}
    if several:
        best = steps.do("Reshape", scores, np.array([0, -1]))
    elif has_classes:
        best = found["best"] = steps.max(scores, -1)
    else:
        best = scores
    threshold = np.float32(detect.score_threshold)
    over = steps.do("Or", steps.do("Greater", best, threshold), steps.do("Equal", best, threshold))  # not so for NaN
    sure, places = steps.top(steps.do("Where", over, best, np.float32(-1)), None if several else many)
    rows = places
    if several:
        classes_of_row = steps.do("Gather", steps.do("Shape", scores), np.array(2))
        rows = steps.do("Div", places, classes_of_row)
        classes = steps.do("Sub", places, steps.do("Mul", rows, classes_of_row))
    elif has_classes:
        classes = steps.do("ArgMax", steps.rows(scores, rows), axis=2, keepdims=0)
    else:
        classes = steps.do("Mul", places, np.array(0))
    picks = (steps.rows(boxes, rows), sure, classes, places, steps.count(over))
    return {**found, **dict(zip(PICKS, picks, strict=True))}


@dataclasses.dataclass
class _Value:
    """A value of a graph, with the operators that the steps use; those with a constant array give another value."""

    steps: Steps
    name: str
    many: int | None = None  # length of the second axis, where it is known

    @property
    def shape(self) -> tuple[None, int | None, None]:
        """As far as it is known."""
        return None, self.many, None

    def __mul__(self, other: Any) -> _Value:
        return self.steps.do("Mul", self, other)

    def __add__(self, other: Any) -> _Value:
        return self.steps.do("Add", self, other)

    def __sub__(self, other: Any) -> _Value:
        return self.steps.do("Sub", self, other)

    def __truediv__(self, other: Any) -> _Value:
        return self.steps.do("Div", self, other)

    def __neg__(self) -> _Value:
        return self.steps.do("Neg", self)

    def __radd__(self, other: float) -> _Value:
        return self.steps.do("Add", np.float32(other), self)

    def __rtruediv__(self, other: float) -> _Value:
        return self.steps.do("Div", np.float32(other), self)

    def __getitem__(self, key: tuple[Any, int | slice]) -> _Value:
        """Part of the last axis, `value[..., 4]` or `value[..., :4]`."""
        _ellipsis, last = key
        if isinstance(last, int):
            return self.steps.do("Gather", self, np.array(last), axis=-1)
        step = last.step or 1
        least, most = (0, 2**31 - 1) if step > 0 else (-1, -(2**31))
        start, stop = (default if edge is None else edge for edge, default in ((last.start, least), (last.stop, most)))
        part = self.steps.do("Slice", self, *(np.array([number]) for number in (start, stop, -1, step)))
        part.many = self.many
        return part


class Steps:
    """Collects nodes of an ONNX graph; as the module `xp` of `model_arrays`, it works on values of the graph.

    Args:
      opset: Version of the operators.

    Attributes:
      nodes: In order.
      constants: Initializers.
    """

    def __init__(self, opset: int):
        self._opset, self._names = opset, 0
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def value(self, name: str) -> _Value:
        """A value that is there already."""
        return _Value(self, name)

    def do(self, kind: str, *inputs: Any, **attributes: Any) -> _Value:
        """Adds a node; returns its output."""
        return self._node(kind, inputs, 1, attributes)[0]

    def _node(self, kind: str, inputs: Sequence[Any], outputs: int, attributes: Mapping[str, Any]) -> list[_Value]:
        from onnx import helper

        names = [self._new() for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, [self._named(each) for each in inputs], names, name=names[0], **attributes))
        return [_Value(self, name) for name in names]

    def name(self, value: Any, name: str) -> None:
        """Gives a value, or a constant, a name in the graph."""
        from onnx import helper

        self.nodes.append(helper.make_node("Identity", [self._named(value)], [name], name=name))

    def _new(self) -> str:
        self._names += 1
        return f"{PREFIX}{self._names}"

    def _named(self, value: Any) -> str:
        from onnx import numpy_helper

        if isinstance(value, _Value):
            return value.name
        self.constants.append(numpy_helper.from_array(np.asarray(value), self._new()))
        return str(self.constants[-1].name)

    def asarray(self, value: Any, dtype: str) -> Any:
        """As NumPy's."""
        from onnx import helper

        if not isinstance(value, _Value):
            return np.asarray(value, dtype)
        cast = self.do("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
        cast.many = value.many
        return cast

    def exp(self, value: Any) -> Any:
        """As NumPy's."""
        return self.do("Exp", value)

    def max(self, value: Any, axis: int, *, keepdims: bool = False) -> Any:
        """As NumPy's."""
        return self._reduced("ReduceMax", 18, value, axis, keepdims)

    def sum(self, value: Any, axis: int, *, keepdims: bool = False) -> Any:
        """As NumPy's."""
        return self._reduced("ReduceSum", 13, value, axis, keepdims)

    def _reduced(self, kind: str, axes_are_an_input_from: int, value: Any, axis: int, keepdims: bool) -> Any:
        if self._opset >= axes_are_an_input_from:
            return self.do(kind, value, np.array([axis]), keepdims=int(keepdims))
        return self.do(kind, value, axes=[axis], keepdims=int(keepdims))

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        """As NumPy's."""
        return self.do("Concat", *values, axis=axis)

    def swapaxes(self, value: Any, *_axes: int) -> Any:
        """As NumPy's, of the second and third axis of three."""
        return self.transposed(value, [0, 2, 1])

    def transposed(self, value: Any, order: Sequence[int]) -> Any:
        """The axes in another order."""
        return self.do("Transpose", value, perm=order)

    def top(self, values: Any, many: int | None) -> tuple[Any, Any]:
        """The largest of `(n, M)`, at most `PICKED`, descending, and their places; TensorRT wants to know M."""
        most: Any = np.array([min(PICKED, many or PICKED)])
        if not many:
            known = self.asarray(self.do("Gather", self.do("Shape", values), np.array([1])), "float32")
            most = self.asarray(self.do("Min", known, most.astype(np.float32)), "int64")  # `Min` of integers is newer
        best, places = self._node("TopK", [values, most], 2, {"axis": 1})
        return best, places

    def rows(self, values: Any, places: Any) -> Any:
        """Rows `(n, K, C)` of `(n, M, C)` by their places `(n, K)`."""
        at = self._unsqueezed(places)
        if self._opset >= 12:  # batch_dims
            return self.do("GatherND", values, at, batch_dims=1)
        shape = self.do("Shape", values)
        width = self.do("Concat", np.array([1, 1]), self.do("Gather", shape, np.array([2])), axis=0)
        return self.do("GatherElements", values, self.do("Expand", at, width), axis=1)

    def count(self, chosen: Any) -> Any:
        """How many of `(n, M) bool` are true."""
        return self.sum(self.asarray(chosen, "int32"), 1)

    def _unsqueezed(self, value: Any) -> Any:
        if self._opset >= 13:  # axes are an input
            return self.do("Unsqueeze", value, np.array([2]))
        return self.do("Unsqueeze", value, axes=[2])
