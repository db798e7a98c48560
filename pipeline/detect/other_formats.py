"""Recognises models of other formats by name and first bytes, and names the command that converts them to a SavedModel.

Nothing loads such a file: loading it would run code from it, for several of these formats.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

_READ_BYTES = 16
_YOLO = re.compile(r"(yolo|rtdetr)[\w.-]*", re.IGNORECASE)


class _Format(NamedTuple):
    """A format of models.

    Attributes:
      name: For messages.
      endings: Of its files.
      convert: The command; `{path}` is the file, `{base}` the same without its ending, `{stem}` that without the folder.
      begins: Whether these are the first bytes of such a file.
    """

    name: str
    endings: tuple[str, ...]
    convert: str
    begins: Callable[[bytes], bool]


_THEN = "; then give --model {stem}"
_KERAS = (
    'python -c "import sys, keras; keras.saving.load_model(sys.argv[1], compile=False).export(sys.argv[2])" {path} {stem}/1'
    + _THEN
)
_FROZEN = """\
python -c "import sys, tensorflow.compat.v1 as tf; tf.disable_eager_execution(); g = tf.GraphDef(); \
g.ParseFromString(open(sys.argv[1], 'rb').read()); tf.import_graph_def(g, name=''); s = tf.Session(); \
t = lambda *names: {{n: s.graph.get_tensor_by_name(n + ':0') for n in names}}; tf.saved_model.simple_save(s, sys.argv[2], \
t('image_tensor'), t('detection_boxes', 'detection_scores', 'detection_classes', 'num_detections'))" {path} {stem}/1 \
(with the names of its own input and outputs)"""
_FORMATS = (
    _Format(
        "a PyTorch model",
        (".pt", ".pth", ".torchscript"),
        "yolo export model={path} format=saved_model, or with YOLOv5's code python export.py --weights {path} --include "
        "saved_model; then give --model {base}_saved_model",
        lambda begin: begin.startswith((b"\x80\x02", b"\x80\x04")),
    ),
    _Format(
        "an ONNX model",
        (),
        "renaming it to {base}.onnx, which a job takes as --model",
        lambda begin: re.match(rb"\x08[\x01-\x1f][\x12\x1a\x22\x3a]", begin) is not None,
    ),
    _Format("a Keras model", (".keras",), _KERAS, lambda begin: False),
    _Format("a Keras model in HDF5", (".h5", ".hdf5"), _KERAS, lambda begin: begin.startswith(b"\x89HDF\r\n")),
    _Format(
        "a TensorFlow Lite model",
        (".tflite", ".lite"),
        "none does; export a SavedModel from what it was made of",
        lambda begin: begin[4:8] == b"TFL3",
    ),
    _Format(
        "a Darknet model",
        (".weights", ".cfg"),
        "detect-objects import --cfg {base}.cfg --weights {base}.weights --names {base}.names --output {stem}/1" + _THEN,
        lambda begin: re.match(rb"\0\0\0\0[\1-\x09]\0\0\0", begin) is not None,
    ),
    _Format("a frozen graph of TensorFlow", (".pb",), _FROZEN + _THEN, lambda begin: begin.startswith(b"\x0a")),
    _Format(
        "a pointer of Git LFS",
        (),
        "git lfs pull, which fetches the model itself",
        lambda begin: begin.startswith(b"version https://"),
    ),
    _Format(
        "a zip archive, as those of PyTorch and Keras are",
        (),
        "which command, this line says once the file has the ending .pt or .keras again",
        lambda begin: begin.startswith(b"PK\x03\x04"),
    ),
)


def what_it_is(path: str) -> str:
    """The format of the file at a path and the command that converts it; empty if the format is unknown.

    >>> what_it_is("yolov8n")
    'yolov8n is a name, no file; yolo export model=yolov8n.pt format=saved_model makes one; then give --model yolov8n_saved_model'
    """
    if _YOLO.fullmatch(path) and not os.path.exists(path) and not _by_ending(path):
        export = f"yolo export model={path}.pt format=saved_model makes one"
        return f"{path} is a name, no file; {export}; then give --model {path}_saved_model"
    if os.path.isdir(path):
        return next(_in_folder(path), "")
    found = _by_ending(path) or _by_first_bytes(path)
    if not found:
        return ""
    base = os.path.splitext(path)[0]
    named = {"path": path, "base": base, "stem": os.path.basename(base)}
    command = found.convert.format(**{name: shlex.quote(value) for name, value in named.items()})
    return f"it is {found.name}; this makes one of it: {command}"


def _by_ending(path: str) -> _Format | None:
    return next((each for each in _FORMATS if path.lower().endswith(each.endings or ("\n",))), None)


def _by_first_bytes(path: str) -> _Format | None:
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        begin = file.read(_READ_BYTES)
    return next((each for each in _FORMATS if each.begins(begin)), None)


def _in_folder(folder: str) -> Iterator[str]:
    """SavedModels and models of other formats in a folder."""
    names = sorted(os.listdir(folder))
    for name in names:
        if os.path.isfile(f"{folder}/{name}/saved_model.pb"):
            yield f"{folder}/{name} is one; give --model {folder}/{name}"
    for name in names:
        if name.lower().endswith(".onnx"):
            yield f"{folder}/{name} is an ONNX model; give --model {folder}/{name}"
        if os.path.isfile(f"{folder}/{name}") and _by_ending(name):
            yield f"{folder}/{name} lies there: {what_it_is(f'{folder}/{name}')}"
