"""Recognises models of other formats by name, and names the command that converts them to a SavedModel.

Nothing loads such a file: loading it would run code from it, for several of these formats.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

_YOLO = re.compile(r"(yolo|rtdetr)[\w.-]*", re.IGNORECASE)
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
_FORMATS = (  # endings, name, and command; `{path}` is the file, `{base}` without its ending, `{stem}` also without its folder
    (
        (".pt", ".pth", ".torchscript"),
        "a PyTorch model",
        "yolo export model={path} format=saved_model, or with YOLOv5's code python export.py --weights {path} --include "
        "saved_model; then give --model {base}_saved_model",
    ),
    ((".keras", ".h5", ".hdf5"), "a Keras model", _KERAS),
    ((".tflite", ".lite"), "a TensorFlow Lite model", ""),
    (
        (".weights", ".cfg"),
        "a Darknet model",
        "detect-objects import --cfg {base}.cfg --weights {base}.weights --names {names} --output {stem}/1" + _THEN,
    ),
    ((".pb",), "a frozen graph of TensorFlow", _FROZEN + _THEN),
)


def what_it_is(path: str) -> str:
    """The format of the file at a path and the command that converts it; empty if the format is unknown.

    >>> what_it_is("yolov8n")
    'yolov8n is a name, no file; yolo export model=yolov8n.pt format=saved_model makes one; then give --model yolov8n_saved_model'
    """
    if os.path.isdir(path):
        return next(_in_folder(path), "")
    for endings, name, command in _FORMATS:
        if path.lower().endswith(endings):
            base = os.path.splitext(path)[0]
            named = {"path": path, "base": base, "stem": os.path.basename(base), "names": f"{base}.names"}
            quoted = {key: shlex.quote(value) for key, value in named.items()}
            if not os.path.isfile(named["names"]):
                quoted["names"] = "CLASS_NAMES.txt"
            if not command:
                return f"it is {name}, of which no tool makes a SavedModel; export one from what it was made of"
            return f"it is {name}; this makes one of it: {command.format(**quoted)}"
    if _YOLO.fullmatch(path) and not os.path.exists(path):
        export = f"yolo export model={path}.pt format=saved_model makes one"
        return f"{path} is a name, no file; {export}; then give --model {path}_saved_model"
    return ""


def _in_folder(folder: str) -> Iterator[str]:
    """SavedModels and models of other formats in a folder."""
    names = sorted(os.listdir(folder))
    for name in names:
        if os.path.isfile(f"{folder}/{name}/saved_model.pb"):
            yield f"{folder}/{name} is one; give --model {folder}/{name}"
    for name in names:
        if name.lower().endswith(".onnx"):
            yield f"{folder}/{name} is an ONNX model; give --model {folder}/{name}"
        if os.path.isfile(f"{folder}/{name}") and (known := what_it_is(f"{folder}/{name}")):
            yield f"{folder}/{name} lies there: {known}"
