"""What each private function of TensorFlow gains: `python -m tests.benchmarks.internals light` (or `heavy`) `[--rounds 5]`.

Each variant does without one of `pipeline/detect/tensorflow_internals.py`, by the public way that comes nearest:

    process_config    sessions run with a `ConfigProto()` of their own
    trace             `tf.function` traces, and `ConcreteFunction.add_to_graph` adds
    forget_functions  graphs keep their functions
    optimise          TensorFlow optimises at the first call of each batch size
    fused             TensorFlow fuses convolutions at the first call of each batch size
    freeze            the model is called as `tf.saved_model.load` returns it, without the batch scheduler

Each measurement is a process of its own, and a round has one of each variant and one that does without nothing. The figures are
medians of the rounds' ratios, without to with. `light` is the benchmarks' detector (24 MB), `heavy` has 268 MB of weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import DetectConfig, ModelConfig
from pipeline.limits import resident_bytes
from tests.benchmarks.images import BENCH
from tests.benchmarks.model import make_model

_PREPARED_IN_ANOTHER_WAY = {"optimise", "fused"}
_DETECT = DetectConfig(device="cpu", batch_sizes=(1, 2, 4), concurrent_batches=2)
_IMAGES = {"light": 48, "heavy": 16}
_THREADS = 4
_SIDE, _LAYERS = 4096, 4
_VARIANTS = {
    "light": ("process_config", "trace", "forget_functions", "optimise", "fused", "freeze"),
    "heavy": ("trace", "forget_functions", "optimise"),
}


def make_heavy() -> Path:
    """A SavedModel of four large matrices; made if it is not there."""
    import tensorflow as tf

    from tests.tiny_models import bright_box, save_model

    folder = BENCH / "model-heavy"
    if not folder.exists():
        random = np.random.default_rng(1)
        weights = [random.normal(0, 0.02, (_SIDE, _SIDE)).astype(np.float32) for _ in range(_LAYERS)]
        constants = [tf.constant(weight) for weight in weights]

        def predict(images: Any) -> dict[str, Any]:
            mixed = tf.ones([tf.shape(images)[0], _SIDE]) * tf.reduce_mean(tf.cast(images, tf.float32), [1, 2])[:, :1]
            for constant in constants:
                mixed = tf.nn.relu(tf.matmul(mixed, constant))
            return {"boxes": bright_box(images)[:, None], "scores": tf.sigmoid(mixed[:, :1])}

        save_model(folder, predict, tf.TensorSpec((None, 96, 128, 3), tf.uint8, "images"))
    return folder


def _without_process_config() -> None:
    import tensorflow as tf

    from pipeline.detect import tensorflow_setup

    tensorflow_setup.process_config = tf.compat.v1.ConfigProto


def _without_trace() -> None:
    import tensorflow as tf

    from pipeline.detect import prepared_model, tensorflow_scheduler

    def trace(run: Callable[..., Any], signature: Any) -> Any:
        return tf.function(run, input_signature=signature, autograph=False).get_concrete_function()

    def call(function: Any, tensors: Any, *, optimised: bool) -> Any:
        function.add_to_graph(tf.compat.v1.get_default_graph())
        return tf.raw_ops.StatefulPartitionedCall(
            args=tensors,
            Tout=[output.dtype for output in function.graph.outputs],
            f=function.name,
            config_proto=tensorflow_scheduler.graph_config(optimised=optimised).SerializeToString(),
        )

    prepared_model.trace = tensorflow_scheduler.trace = trace
    prepared_model.call = call
    tensorflow_scheduler.add_function = lambda graph, function: function.add_to_graph(graph)


def _without_forget_functions() -> None:
    from pipeline.detect import tensorflow_scheduler

    tensorflow_scheduler.forget_functions = lambda graph: None


def _without_optimise() -> None:
    from pipeline.detect import saved_model

    def as_it_is(function: Any, _precision: str, *, fused: bool) -> Any:
        frozen = saved_model.freeze(function)
        graph = frozen.graph.as_graph_def()
        names = sorted(function.structured_outputs)
        fetched = dict(zip(names, (tensor.name for tensor in frozen.outputs), strict=True))
        weights = saved_model._take_weights(graph, keep=fetched.values())
        shape = frozen.inputs[0].shape
        return saved_model.OptimisedGraph(graph, weights, frozen.inputs[0].name, fetched, shape[0], fused=False)

    saved_model._optimised = as_it_is


def _without_fused() -> None:
    from pipeline.detect import saved_model

    optimised = saved_model._optimised
    saved_model._optimised = lambda function, precision, *, fused: optimised(function, precision, fused=False)


_WITHOUT: dict[str, Callable[[], None]] = {
    "process_config": _without_process_config,
    "trace": _without_trace,
    "forget_functions": _without_forget_functions,
    "optimise": _without_optimise,
    "fused": _without_fused,
    "freeze": lambda: None,  # see `_as_loaded`
}


def _as_loaded(path: str) -> tuple[Callable[[list[np.ndarray]], Any], tuple[int, int]]:
    """The model as TensorFlow loads it: its signature, which reads its variables at each call."""
    from pipeline.detect import describe_model, saved_model, tensorflow_setup

    tf = tensorflow_setup.configure_tensorflow(_DETECT)
    loaded = tf.saved_model.load(path)
    signature = loaded.signatures["serving_default"]
    metadata = describe_model.describe(signature, None, ModelConfig(path=path), path)
    function = saved_model._as_function(signature, metadata, _DETECT)
    function.kept = loaded

    def call(images: list[np.ndarray]) -> Any:
        return {name: value.numpy() for name, value in function(tf.constant(np.stack(images))).items()}

    for size in _DETECT.batch_sizes:
        call([np.zeros((*metadata.input_hw, 3), np.uint8)] * size)
    return call, metadata.input_hw


def _prepare(variant: str, path: str, kept: Path) -> None:
    from pipeline.detect import saved_model

    _WITHOUT.get(variant, lambda: None)()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty  # else another variant's model would be read
        began = time.process_time()
        prepared = saved_model.prepared_model(path, "1", ModelConfig(path=path), _DETECT, gpu=False)
    kept.write_bytes(pickle.dumps((prepared, time.process_time() - began), pickle.HIGHEST_PROTOCOL))


def _measure(variant: str, path: str, images: int, kept: Path) -> dict[str, float]:
    """Figures of one process: as at a swap, it gets the model as another process has prepared it."""
    from pipeline.detect.prepared_model import start
    from pipeline.detect.tensorflow_setup import configure_tensorflow

    prepare_cpu = 0.0
    if variant != "freeze":
        prepared, prepare_cpu = pickle.loads(kept.read_bytes())
    configure_tensorflow(_DETECT)
    _WITHOUT.get(variant, lambda: None)()
    began, rss = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if variant == "freeze":
        call, hw = _as_loaded(path)
    else:
        model = start(prepared, _DETECT)
        call, hw = model.engine, model.metadata.input_hw
    started, resident = time.process_time(), resident_bytes()
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, (*hw, 3), np.uint8) for _ in range(4)]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(call, [pixels] * (images // 4)))
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "CPU-s to prepare": prepare_cpu,
        "CPU-s to start": started - began,
        "CPU-s an image": (done - started) / images,
        "MB at the peak": (peak - rss) / 1024,
        "MB in use": resident / 1e6,
    }


def _forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fork: TensorFlow is imported there, and has not begun."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(work(*arguments)))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def main() -> None:
    """Measures in rounds and prints a line for each figure."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("kind", choices=_VARIANTS)
    flags.add_argument("--rounds", type=int, default=5)
    given = flags.parse_args()
    context = multiprocessing.get_context("spawn")
    making = context.Process(target=make_model if given.kind == "light" else make_heavy)
    making.start(), making.join()
    import tensorflow  # noqa: F401  so that no measurement has it

    path = BENCH / ("model" if given.kind == "light" else "model-heavy")
    rounds = []
    kept = {
        variant: BENCH / f"prepared-{given.kind}-{variant if variant in _PREPARED_IN_ANOTHER_WAY else ''}"
        for variant in ("", *_VARIANTS[given.kind])
    }
    for variant in {"", *_PREPARED_IN_ANOTHER_WAY} & {*kept}:
        _forked(_prepare, variant, str(path), kept[variant])
    for _ in range(given.rounds):
        rounds.append({one: _forked(_measure, one, str(path), _IMAGES[given.kind], file) for one, file in kept.items()})
        print(rounds[-1], flush=True)
    for variant in _VARIANTS[given.kind]:
        for name in rounds[0][""]:
            ratio = statistics.median(each[variant][name] / max(each[""][name], 1e-9) for each in rounds)
            with_it, without = (statistics.median(each[one][name] for each in rounds) for one in ("", variant))
            print(f"{given.kind} without {variant}: {name} {with_it:.4g} -> {without:.4g}, x{ratio:.2f}")


if __name__ == "__main__":
    main()
