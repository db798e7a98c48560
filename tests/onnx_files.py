"""Writes small ONNX files as protobuf by hand, without the package onnx: https://onnx.ai/onnx/repo-docs/IR.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

HW = (64, 96)
NAMES = ("ant", "bee", "cow")
STRIDES = (8, 16, 32)
CELLS = [(x, y, s) for s in STRIDES for y in range(HW[0] // s) for x in range(HW[1] // s)]
_FLOAT, _INT64 = 1, 7  # TensorProto.DataType


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _tensor(name: str, array: np.ndarray) -> bytes:
    kind = _FLOAT if array.dtype == np.float32 else _INT64
    return b"".join(_field(1, size) for size in array.shape) + _field(2, kind) + _field(8, name) + _field(9, array.tobytes())


def _value(name: str, shape: Sequence[int | str]) -> bytes:
    sizes = b"".join(_field(1, _field(1, size) if isinstance(size, int) else _field(2, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, _FLOAT) + _field(2, sizes)))


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: int | list[int]) -> bytes:
    found = b""
    for name, value in attributes.items():
        many = b"".join(_field(8, each) for each in value) + _field(20, 7) if isinstance(value, list) else b""
        found += _field(5, _field(1, name) + (many or _field(3, value) + _field(20, 2)))  # type: ignore[arg-type]
    return b"".join(_field(1, each) for each in inputs) + _field(2, output) + _field(4, kind) + found


def head() -> tuple[np.ndarray, np.ndarray]:
    """The toy's weights `(7, 3)` and offsets `(1, 7, M)`: what it makes of the mean of each channel in each cell."""
    draw = np.random.default_rng(5)
    weights = np.concatenate([draw.uniform(2, 9, (4, 3)), draw.dirichlet([0.4] * 3, 3)]).astype(np.float32)
    offsets = np.zeros((1, 7, len(CELLS)), np.float32)
    offsets[0, :4] = np.array([((x + 0.5) * s, (y + 0.5) * s, s, 2 * s) for x, y, s in CELLS], np.float32).T
    return weights, offsets


def write_yolo(
    path: Path, batch: int | str = "batch", *, mixes: bool = False, any_size: bool = False, notes: Mapping[str, str] | None = None
) -> str:
    """Writes a toy with the output of Ultralytics' YOLO, `(N, 4 + C, M)`; returns its path.

    Args:
      path: Where to.
      batch: Images of each call; a text for any number.
      mixes: Whether it answers for a whole batch as for one image, as a file does that was exported for one image and made free.
      any_size: Whether it takes images of any size, and no axis of its output has a size before it runs, as of recent exports.
      notes: Its properties; default: as Ultralytics writes them.
    """
    weights, offsets = head()
    constants = {"weights": weights, "offsets": offsets, "flat": np.array([1 if mixes else 0, 3, -1], np.int64)}
    nodes = []
    for stride in STRIDES:
        size = [stride, stride]
        nodes.append(_node("AveragePool", ["images"], f"pool{stride}", kernel_shape=size, strides=size))
        nodes.append(_node("Reshape", [f"pool{stride}", "flat"], f"cells{stride}"))
    nodes.append(_node("Concat", [f"cells{stride}" for stride in STRIDES], "cells", axis=2))
    nodes.append(_node("MatMul", ["weights", "cells"], "mixed"))
    nodes.append(_node("Add", ["mixed", "offsets"], "output0"))
    said = {"names": str(dict(enumerate(NAMES))), "imgsz": str([*HW]), "task": "detect"} if notes is None else notes
    if any_size:  # what is left of two axes, which is all, shows only when it runs
        constants |= {"ones": np.ones(len(CELLS), np.float32), "some": np.ones(7, np.float32), "zero": np.zeros(1, np.float32)}
        nodes[-1] = _node("Add", ["mixed", "offsets"], "all")
        nodes += [_node("Greater", [each, "zero"], f"is_{each}") for each in ("ones", "some")]
        nodes.append(_node("Compress", ["all", "is_ones"], "rows", axis=2))
        nodes.append(_node("Compress", ["rows", "is_some"], "output0", axis=1))
        return _write(path, nodes, constants, (batch, 3, "height", "width"), {"output0": (batch, "rows", "cells")}, said)
    return _write(path, nodes, constants, (batch, 3, *HW), {"output0": (batch, 7, len(CELLS))}, said)


def write_constant(path: Path, hw: tuple[int, int], box: Sequence[float], score: float) -> str:
    """Writes a toy that finds one box in each image, in shares of its input `hw`; returns its path."""
    constants = {
        "as_light": np.array([0, 1, 3], np.int64),
        "no_box": np.zeros((3, 4), np.float32),
        "no_score": np.zeros((3, 1), np.float32),
        "box": np.array([[box]], np.float32),
        "score": np.array([[[score]]], np.float32),
    }
    nodes = [
        _node("AveragePool", ["images"], "light", kernel_shape=[*hw], strides=[*hw]),
        _node("Reshape", ["light", "as_light"], "row"),
        *(_node("MatMul", ["row", f"no_{name}"], f"free_{name}") for name in ("box", "score")),
        _node("Add", ["free_box", "box"], "boxes"),
        _node("Add", ["free_score", "score"], "scores"),
    ]
    return _write(path, nodes, constants, ("batch", 3, *hw), {"boxes": ("batch", 1, 4), "scores": ("batch", 1, 1)}, {})


def _write(
    path: Path,
    nodes: Sequence[bytes],
    constants: Mapping[str, np.ndarray],
    images: Sequence[int | str],
    outputs: Mapping[str, Sequence[int | str]],
    notes: Mapping[str, str],
) -> str:
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, "toy")
    graph += b"".join(_field(5, _tensor(name, array)) for name, array in constants.items())
    graph += _field(11, _value("images", images))
    graph += b"".join(_field(12, _value(name, shape)) for name, shape in outputs.items())
    properties = b"".join(_field(14, _field(1, key) + _field(2, value)) for key, value in notes.items())
    path.write_bytes(_field(1, 8) + _field(8, _field(1, "") + _field(2, 17)) + _field(7, graph) + properties)
    return str(path)
