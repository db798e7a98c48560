"""An importer of ONNX models: converts them in an environment of their own, and accepts a result only if it answers as before."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.export import check_output_dir, existing_ancestor
from models.import_darknet import read_names
from models.onnx.environment import OnnxError, python_of_converter
from models.progress import step
from models.quiet import quiet_stderr

TOLERANCE = 1e-3  # of the largest value of a channel
_ZERO = 1e-6  # values below it count as zero
_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "onnx", "worker.py")
SCENE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits", "samples", "scene_000.jpg")

Values = npt.NDArray[Any]
Convert = Callable[[Sequence[str], str], None]


def import_onnx(
    path: str,
    output_dir: str,
    *,
    input_hw: tuple[int, int] | None = None,
    names_path: str | None = None,
    convert: Convert | None = None,
) -> str:
    """Writes an ONNX model as a SavedModel with the same outputs, if they agree with ONNX Runtime's on a photo.

    Args:
      path: The model.
      output_dir: Directory to write, `<model>/<integer version>`; must not exist. It appears whole or not at all.
      input_hw: Height and width of the input, pixels, of a model that takes images of any size.
      names_path: Class names, one a line; default: those in the model's metadata, as Ultralytics writes them.
      convert: Runs the worker's arguments in a scratch folder; default: in the converter's environment, which is made first.

    Returns:
      How far the outputs agree, for a person.

    Raises:
      OnnxError: The model cannot be converted, or the outputs differ by more than `TOLERANCE`.
      DarknetError: The names cannot be used.
      OSError: A file cannot be read, or the output cannot be written.
    """
    check_output_dir(output_dir)
    names = read_names(names_path) if names_path else ()
    Path(path).open("rb").close()
    with tempfile.TemporaryDirectory(prefix=".import-", dir=existing_ancestor(output_dir)) as scratch:
        (convert or in_environment())([os.path.abspath(path), SCENE, *map(str, input_hw or ())], scratch)
        answer = json.loads(Path(scratch, "answer.json").read_text(encoding="utf-8"))
        with np.load(os.path.join(scratch, "reference.npz"), allow_pickle=False) as reference:
            share = _write(scratch, answer["outputs"], dict(reference))
        _write_notes(scratch, answer["notes"], names)
        os.makedirs(os.path.dirname(os.path.abspath(output_dir)), exist_ok=True)
        os.rename(os.path.join(scratch, "model"), output_dir)
    return f"the largest difference from ONNX Runtime is {share:.2g} of the tolerance"


def in_environment(python: str | None = None) -> Convert:
    """Runs the worker with the Python of an environment that has its packages; default: the one in the cache."""
    return functools.partial(_run_worker, os.path.abspath(python) if python else python_of_converter())


def _run_worker(python: str, arguments: Sequence[str], scratch: str) -> None:
    # onnx2tf calls onnxsim by PATH; without it some models convert to garbage with exit code 0
    path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-I", _WORKER, *arguments]
    with step("1 of 2, converting the model (minutes)"):
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"the converter ended with {done.returncode}"]
        raise OnnxError(f"{arguments[0]}: {said[-1]}")


def _write(scratch: str, names: Sequence[str], reference: Mapping[str, Values]) -> float:
    """Writes the converted network as `model/` with the names and axes of the ONNX model; returns the share of the tolerance."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with step("2 of 2, comparing with ONNX Runtime"), quiet_stderr():
        import tensorflow as tf

        try:
            module = _module(os.path.join(scratch, "converted"), names, reference)
            folder = os.path.join(scratch, "model")
            tf.saved_model.save(module, folder, signatures={"serving_default": module.predict})
            return _checked(tf.saved_model.load(folder).signatures["serving_default"], names, reference)
        except (TypeError, ValueError, tf.errors.OpError) as err:  # of TensorFlow
            raise OnnxError(f"refused: the converted model does not run: {' '.join(str(err).split())[:300]}") from err


def _module(folder: str, names: Sequence[str], reference: Mapping[str, Values]) -> Any:
    import tensorflow as tf

    module = tf.Module()
    module.converted = tf.saved_model.load(folder)
    network = module.converted.signatures["serving_default"]
    ((input_name, spec),) = network.structured_input_signature[1].items()
    keys = sorted(network.structured_outputs, key=lambda key: (len(key), key))  # output_0 … output_10
    if len(keys) != len(names):
        raise OnnxError(f"refused: expected outputs {', '.join(names)} of the converted model, it has {len(keys)}")
    found = network(**{input_name: tf.constant(reference["image_0"])})
    orders = [_order(found[key].numpy(), reference[f"output_0_{place}"]) for place, key in enumerate(keys)]

    def predict(images: Any) -> dict[str, Any]:
        outputs = network(**{input_name: images})
        return {_key(name): tf.transpose(outputs[key], order) for name, key, order in zip(names, keys, orders, strict=True)}

    module.predict = tf.function(predict, autograph=False, input_signature=[tf.TensorSpec(spec.shape, spec.dtype, "images")])
    return module


def _key(name: str) -> str:
    """The name of an output of the ONNX model as one of a SavedModel."""
    return re.sub(r"\W", "_", name)


def _order(got: Values, want: Values) -> tuple[int, ...]:
    """The order of the axes in which `got` has the shape of `want` and is nearest to it: onnx2tf may transpose outputs."""
    orders = [order for order in itertools.permutations(range(got.ndim)) if got.transpose(order).shape == want.shape]
    return min(orders, key=lambda order: tolerances(got.transpose(order), want), default=tuple(range(got.ndim)))


def _checked(network: Any, names: Sequence[str], reference: Mapping[str, Values]) -> float:
    import tensorflow as tf

    worst = 0.0
    for call in range(sum(key.startswith("image") for key in reference)):
        found = network(images=tf.constant(reference[f"image_{call}"]))
        for place, name in enumerate(names):
            got, want = found[_key(name)].numpy(), reference[f"output_{call}_{place}"]
            if got.shape != want.shape:
                raise OnnxError(f"refused: the converted model's output '{name}' is {got.shape}, ONNX Runtime's is {want.shape}")
            worst = max(worst, share := tolerances(got, want))
            if not share <= 1:
                raise OnnxError(
                    f"refused: the converted model's output '{name}' differs from ONNX Runtime's by {share:.3g} times the "
                    f"tolerance, {TOLERANCE:g} of the largest value of each channel"
                )
    return worst


def tolerances(got: Values, want: Values) -> float:
    """The largest difference of two outputs, in tolerances; infinite where only one is a number.

    A channel is a place on the shortest axis after the batch: classes have other scales than boxes, in one output.
    """
    if want.size == 0:
        return 0.0
    channel = 1 + int(np.argmin(want.shape[1:])) if want.ndim > 2 else None
    others = tuple(axis for axis in range(want.ndim) if axis != channel)
    want, got = want.astype(np.float64), got.astype(np.float64)
    scale = np.max(np.abs(np.where(np.isfinite(want), want, 0)), axis=others, keepdims=True)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        shares = np.where(same, 0, np.abs(got - want) / (TOLERANCE * scale + _ZERO))
    return float(np.max(np.where(np.isnan(shares), np.inf, shares)))


def _write_notes(scratch: str, notes: Mapping[str, str], names: Sequence[str]) -> None:
    """Writes `metadata.yaml` as Ultralytics does, which the pipeline reads: the class names and the task."""
    said = {"task": notes.get("task", "detect"), "names": list(names) or _class_names(notes.get("names", "[]"))}
    Path(scratch, "model", "metadata.yaml").write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")


def _class_names(text: str) -> list[str]:
    try:
        said = ast.literal_eval(text)
        return [str(said[number]) for number in range(len(said))]
    except (SyntaxError, ValueError, TypeError, KeyError) as err:
        raise OnnxError(f"expected class names by number in the model's metadata, got {text[:60]!r}; give --names") from err
