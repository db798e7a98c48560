"""A worker in the converter's environment, without this project: converts an ONNX model and runs it with ONNX Runtime.

    python -I worker.py MODEL.onnx PHOTO [HEIGHT WIDTH]

The current folder is a scratch folder, and PATH begins with the programs of the environment. The worker writes `answer.json` (the
outputs' names, the input's size, the model's metadata), `reference.npz` (images and outputs) and the SavedModel `converted/`.
Another exit code than 0: the model cannot be converted; the last line of standard error is the reason.
"""

import json
import os
import sys
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx2tf
import onnxruntime
import tensorflow as tf

_CALIBRATION = "calibration_image_sample_data_20x128x128x3_float32.npy"  # without it onnx2tf downloads this file


def main(path: str, photo: str, *size_hw: str) -> None:
    """Does all that the module's docstring describes."""
    try:
        model = onnx.load(path)
    except Exception as err:  # noqa: BLE001  protobuf's and onnx's own
        _refuse(f"it cannot be read as ONNX: {' '.join(str(err).split())[:300]}")
    images = _input_of(model)
    channels_first = _fix_sizes(images, [int(side) for side in size_hw])
    del model.graph.value_info[:]  # shapes for other sizes
    onnx.save(model, "model.onnx")
    _write_reference(model, photo, channels_first)
    np.save(_CALIBRATION, np.random.default_rng(0).random((20, 128, 128, 3), np.float32))
    _convert(None if channels_first else [images.name])


def _refuse(reason: str) -> NoReturn:
    sys.exit(reason)


def _input_of(model: Any) -> Any:
    weights = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    if len(inputs) != 1:
        _refuse(f"expected one input of images, it has {len(inputs)}: {', '.join(each.name for each in inputs)}")
    return inputs[0]


def _fix_sizes(images: Any, size_hw: list[int]) -> bool:
    """Gives the input a fixed shape, with batch size 1 where any is possible; returns whether channels come before rows."""
    dims = images.type.tensor_type.shape.dim
    shape = [each.dim_value or each.dim_param or "?" for each in dims]
    if len(dims) != 4 or 3 not in (shape[1], shape[3]):
        _refuse(f"expected images (N, 3, H, W) or (N, H, W, 3) as input '{images.name}', it takes {tuple(shape)}")
    channels_first = shape[1] == 3
    first = 2 if channels_first else 1
    fixed = [each.dim_value for each in dims[first : first + 2]]
    if not (all(fixed) or size_hw):
        _refuse("it takes images of any size; give --input-size, for example 640")
    if size_hw and any(side not in (0, given) for side, given in zip(fixed, size_hw, strict=True)):
        _refuse(f"it takes images of {fixed[0]}x{fixed[1]} only; leave out --input-size")
    dims[0].dim_value = dims[0].dim_value or 1  # onnx2tf fails on YOLOv8 with any batch size
    dims[first].dim_value, dims[first + 1].dim_value = size_hw or fixed
    return channels_first


def _write_reference(model: Any, photo: str, channels_first: bool) -> None:
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (spec,) = session.get_inputs()
        if spec.type not in ("tensor(float)", "tensor(uint8)"):
            _refuse(f"expected an input of float32 or uint8, it is {spec.type}")
        height, width = spec.shape[2:] if channels_first else spec.shape[1:3]
        arrays: dict[str, Any] = {}
        for number, pixels in enumerate(_images(photo, (height, width), spec)):
            arrays[f"image_{number}"] = pixels
            given = pixels.transpose(0, 3, 1, 2) if channels_first else pixels
            answers = session.run(None, {spec.name: given})
            arrays |= {f"output_{number}_{place}": answer for place, answer in enumerate(answers)}
    except Exception as err:  # noqa: BLE001  ONNX Runtime's classes have no common one
        _refuse(f"ONNX Runtime cannot run it: {' '.join(str(err).split())[:300]}")
    np.savez("reference.npz", **arrays)
    names = [each.name for each in session.get_outputs()]
    notes = {each.key: each.value for each in model.metadata_props}
    with open("answer.json", "w", encoding="utf-8") as file:
        json.dump({"outputs": names, "input_hw": [height, width], "notes": notes}, file)


def _convert(kept_inputs: list[str] | None) -> None:
    try:
        onnx2tf.convert(
            input_onnx_file_path="model.onnx",  # changed by it
            output_folder_path="converted",
            output_signaturedefs=True,
            keep_shape_absolutely_input_names=kept_inputs,
            non_verbose=True,
        )
    except (Exception, SystemExit) as err:  # noqa: BLE001  it raises whatever an operation of the graph raises
        if not os.path.isfile("converted/saved_model.pb"):  # the files for TensorFlow Lite, which come later, do not matter
            _refuse(f"onnx2tf cannot convert it: … {' '.join(str(err).split())[-300:]}")  # the end names the operation


def _images(photo: str, size_hw: tuple[int, int], spec: Any) -> list[np.ndarray]:
    """The photo as batches `(N, H, W, 3)`: with values 0..1 and 0..255, since the file does not say which it takes."""
    with open(photo, "rb") as file:
        pixels = tf.image.resize(tf.io.decode_image(file.read(), channels=3, expand_animations=False), size_hw).numpy()
    batch = np.repeat(np.rint(pixels)[None], spec.shape[0], axis=0)
    return [batch.astype(np.uint8)] if spec.type == "tensor(uint8)" else [batch / np.float32(255), batch.astype(np.float32)]


if __name__ == "__main__":
    main(*sys.argv[1:])
