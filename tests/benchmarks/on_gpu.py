"""Tries on a GPU what was built without one, in a quarter of an hour, and prints the rows for BENCHMARKS.md.

    python -m tests.benchmarks.on_gpu [--onnx yolov8n.onnx] [--cfg yolov4.cfg [--weights yolov4.weights]] [--minutes 14]
    python -m tests.benchmarks.on_gpu --dry-run

The first table says where a job stands. Its images per second are those from the warm model to the last row. Beside them stand
(a) those of the feed alone, whose processes read, decode and fit the same images for nobody; (b) those of the engine alone,
with three batches of pixels queued; (c) where PyTorch and torchvision are installed, those of YOLOv8n by `torch.compile` behind
a DataLoader; then the job's share of the lesser of (a) and (b), which it cannot pass, and of (c) for the file of `--onnx`; and
the share of time in which `nvidia-smi` sees the GPU busy.

What matters most comes first, in half precision: the DataLoader, the ONNX file that `--onnx` names (a toy without), YOLOv4-tiny
with random weights, and with `--cfg` YOLOv4 at 608x608, without `--weights` with random ones; then the same in float32, TensorRT
and the other engines. With `--minutes` no step begins later, and its row says so. The second table has what must hold: the
boxes in half precision beside those in float32, the choice of a device, the growth and the bound of its memory, smaller batches
after an out-of-memory error, two processes on one GPU, two GPUs. Each row is also printed as soon as it is there. The dry run
takes the same steps with the bundled digits on a CPU, small. It is the default where there is no GPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib.util
import math
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models import digits
from models.darknet.network import parse_network
from models.import_darknet import import_darknet
from pipeline.config import DetectConfig, ModelConfig, ReadConfig, load_config
from pipeline.config.engines import ENGINES, SERVER
from pipeline.detect import tensorflow_setup
from pipeline.detect.batcher import Batcher
from pipeline.detect.detector import feeder_of, open_feeder
from pipeline.detect.engine import FunctionEngine, OutOfMemory
from pipeline.detect.load_detector import load_detector
from pipeline.detect.load_model import load
from pipeline.errors import UserError
from pipeline.feed.fit import ModelInput
from pipeline.records import ImageRef, detection_row
from tests.benchmarks import results
from tests.benchmarks.contenders import CONFIG, Contender, ours
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.rounds import Run, run_once
from tests.models.darknet_cases import random_values, write_weights
from tests.onnx_files import write_yolo

_BOUND_MB = 2048  # of memory, for a model that takes less, and for batches that take more
LARGE = "YOLOv4 at 608"
_TOY = BENCH / "toy.onnx"
_OBJECTNESS = -1.6  # 75 candidates at 608x608
_SIZES, _LARGE_SIZES = (1, 2, 4, 8), (1, 8, 64, 512)
_QUEUED = 3  # batches of the engine alone
LOADER = "YOLOv8n behind a DataLoader"
FIGURES = ("images/s", "feed alone", "engine alone", "of the lesser", "of the DataLoader", "GPU busy", "GPU MB")


class Model(NamedTuple):
    """A detector to try; `described_by` is a job's config, or empty where it describes itself."""

    title: str
    path: str
    described_by: str = ""

    def config(self) -> ModelConfig:
        """The same for `load`."""
        return load_config([self.described_by] if self.described_by else [], {"model.path": self.path}).model

    def job(self, *flags: str) -> Contender:
        """The job that detects with it."""
        return ours(*flags, config=self.described_by, model=Path(self.path))


class Trial(NamedTuple):
    """A model with an engine, on a device, with a precision."""

    model: Model
    engine: str
    device: str
    precision: str = "float32"

    def flags(self) -> list[str]:
        """The flags of its job."""
        return ["--engine", self.engine, "--device", self.device, "--precision", self.precision]


def trials_of(model: Model, engine: str, device: str) -> list[Trial]:
    """The trials of a model with an engine: in half precision where the device has one, then in float32."""
    has = ENGINES[engine].precisions_on(gpu=device == "gpu")
    device = device if "gpu" in ENGINES[engine].precisions else "cpu"
    return [Trial(model, engine, device, one) for one in ("float16", "bfloat16", "float32") if one in (*has, "float32")]


class Machine(NamedTuple):
    """What is tried: a detector on a device, on so many images, until the monotonic clock says so. Without GPUs a dry run."""

    gpus: int
    device: str
    model: Model
    count: int
    ends: float

    def images(self) -> Path:
        """Their folder."""
        source = make_images(SMALL) if self.gpus else Path(digits.FOLDER, "samples")
        return link_images(source, BENCH / f"on-gpu-{source.name}-{self.count}", self.count)


@contextlib.contextmanager
def watched(gpus: int) -> Iterator[list[tuple[float, float, float]]]:
    """Samples the GPUs while its block runs: when, per cent of the busiest, MB in use of all."""
    samples, ended = [], threading.Event()

    def sample() -> None:
        while gpus and not ended.wait(0.1):
            rows = np.array([[float(part) for part in line.split(",")] for line in _nvidia("utilization.gpu,memory.used")])
            samples.append((time.time(), float(rows[:, 0].max()), float(rows[:, 1].sum())))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(sample)
        try:
            yield samples
        finally:
            ended.set()


def _busy_and_memory(samples: Sequence[tuple[float, float, float]], run: Run) -> list[str]:
    """Share of a run's work in which the GPU was busy, and most memory."""
    within = [each for each in samples if run.started_at <= each[0] <= run.started_at + run.work_seconds]
    if not within:
        return ["", ""]
    return [f"{statistics.mean(busy for _, busy, _ in within) / 100:.2f}", f"{max(mb for *_, mb in within):.0f}"]


def _nvidia(query: str) -> list[str]:
    """A line for each GPU; none without NVIDIA's driver."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a process of its own, which takes its memory and its settings of TensorFlow with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def chosen(device: str) -> str:
    """The device that TensorFlow uses for a setting, or the refusal."""
    try:
        tf = tensorflow_setup.configure_tensorflow(DetectConfig(device=device))
    except UserError as err:
        return f"refused: {err}"
    return ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in tf.config.get_visible_devices("GPU")) or "CPU"


def memory_mb(model: Model, device: str, bound_mb: int | None) -> int:
    """Memory after a warm-up: of the GPU, or of the process."""
    load(model.config(), DetectConfig(device=device, gpu_memory_mb=bound_mb, batch_sizes=_SIZES))
    return round(tensorflow_setup.memory_in_use() / 1e6)


def sizes_left(model: Model, device: str) -> tuple[int, ...]:
    """The batch sizes that are left after a warm-up in less memory than the largest one needs."""
    if device == "gpu":
        detect = DetectConfig(device=device, gpu_memory_mb=_BOUND_MB, batch_sizes=_LARGE_SIZES)
        return load(model.config(), detect).batcher.batch_sizes
    detect = DetectConfig(device=device, batch_sizes=_SIZES)
    loaded = load(model.config(), detect)

    def with_memory_for_two(pixels: np.ndarray) -> Mapping[str, np.ndarray]:
        if len(pixels) > 2:
            raise OutOfMemory(f"{len(pixels)} images")
        return loaded.batcher.engine.run(pixels)

    batcher = Batcher(FunctionEngine(with_memory_for_two, detect), loaded.metadata.graph_hw)
    batcher.warm_up()
    return batcher.batch_sizes


def alone(trial: Trial, folder: Path) -> tuple[float, float]:
    """Images per second of the feed without an engine, and of the engine without a feed, as the job has them."""
    detect = DetectConfig(engine=trial.engine, device=trial.device, precision=trial.precision)
    with contextlib.closing(feeder_of(detect)) as feeder:
        loaded = load(trial.model.config(), detect)
        open_feeder(feeder, detect, ReadConfig())
        to, engine, size = ModelInput.of(loaded.metadata), loaded.batcher.engine, loaded.batcher.batch_sizes[-1]
        images = [ImageRef(str(path)) for path in sorted(folder.iterdir())]
        first = feeder.start(images[:size], to).result()
        pixels = np.resize(first.pixels, (size, *first.pixels.shape[1:]))
        first.release()
        under_way, began = collections.deque(), time.monotonic()
        for start in range(0, len(images), size):
            under_way.append(feeder.start(images[start : start + size], to))
            if len(under_way) * size > feeder.processes * feeder.images_ahead(to):
                under_way.popleft().result().release()
        for chunk in under_way:
            chunk.result().release()
        fed = len(images) / (time.monotonic() - began)
    batches, began = max(2 * _QUEUED, len(images) // size // 4), time.monotonic()
    with ThreadPoolExecutor(_QUEUED) as pool:
        list(pool.map(engine.run, [pixels] * batches))
    return fed, batches * size / (time.monotonic() - began)


def objects(trial: Trial, images: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """What it finds in each image."""
    detect = DetectConfig(engine=trial.engine, device=trial.device, precision=trial.precision)
    with contextlib.closing(load_detector(trial.model.config(), detect)) as detector:
        rows = [detection_row(found) for found in detector.detect([ImageRef(str(path)) for path in images])]
    return {row["image"]["uri"]: row["detections"] for row in rows}


def boxes_kept(trial: Trial, images: Sequence[Path]) -> str:
    """How many boxes in float32 have one in its precision, and how far away."""
    from tests.real_yolo import agreement  # pytest may not be there

    both = agreement(*(in_child(objects, each, images) for each in (trial._replace(precision="float32"), trial)))
    return f"{both.matched} of {both.wanted} and {both.found}, at an IoU from {both.worst_iou:.3f}"


def loader_rate(folder: Path) -> float:
    """Images per second of PyTorch's DataLoader before a compiled YOLOv8n."""
    from tests.benchmarks import torch_loader  # PyTorch may not be there

    images = len(list(folder.iterdir()))
    return torch_loader.rate(folder, min(32, images // 4))


def checks(machine: Machine, trials: Sequence[Trial]) -> list[list[str]]:
    """The rows of the second table: what, what is expected, what came."""
    model, device, first = machine.model, machine.device, "GPU:0" if machine.gpus else "CPU"
    attempt = functools.partial(_attempt, machine.ends)
    refused, fewer = "refused, in one line", "skipped: this machine has fewer"
    same = "those in float32, at an IoU above 0.98"
    sizes, bound = (_LARGE_SIZES, f"at most {_BOUND_MB}") if machine.gpus else (_SIZES, "as without")
    chosen_by = {"auto": first, "cpu": "CPU", "gpu": first if machine.gpus else refused, "gpu:99": refused}
    photos, halves = sorted(machine.images().iterdir())[:16], [each for each in trials if each.precision != "float32"]
    return [
        *(
            _row(f"boxes of {each.model.title}, {each.engine}, {each.precision}", same, attempt(boxes_kept, each, photos))
            for each in halves
            if ENGINES[each.engine].installed
        ),
        *(_row(f"--device {name}", expected, attempt(in_child, chosen, name)) for name, expected in chosen_by.items()),
        _row("memory, MB", "as needed: not all of the device's", attempt(in_child, memory_mb, model, device, None)),
        _row(f"the same with --gpu-memory-mb {_BOUND_MB}", bound, attempt(in_child, memory_mb, model, device, _BOUND_MB)),
        _row(f"batch sizes {sizes} in too little memory", "the smaller ones", attempt(in_child, sizes_left, model, device)),
        _row("two processes on one device, images/s", "at least one's rate", attempt(_two_processes, machine)),
        _row("all GPUs, images/s", "about as many times one's", attempt(_all_gpus, machine) if machine.gpus > 1 else fewer),
    ]


def _row(*cells: object) -> list[str]:
    row = [str(cell) for cell in cells]
    print(" | ".join(row), file=sys.stderr, flush=True)
    return row


def _two_processes(machine: Machine) -> str:
    job = machine.model.job("--device", machine.device, *(["--gpu-memory-mb", str(_BOUND_MB)] if machine.gpus else []))
    alone = _run("alone", job, machine)
    with ThreadPoolExecutor(2) as both:
        runs = list(both.map(lambda name: _run(name, job, machine), ["first of two", "second of two"]))
    return f"{' + '.join(f'{run.images_per_second:.0f}' for run in runs)}; alone {alone.images_per_second:.0f}"


def _all_gpus(machine: Machine) -> str:
    many = ["--direct_running_mode", "multi_processing", "--direct_num_workers", str(machine.gpus)]
    runs = [_run(f"{len(flags)} flags", machine.model.job("--device", "gpu", *flags), machine) for flags in ([], many)]
    return f"{runs[1].images_per_second:.0f}; one {runs[0].images_per_second:.0f}"


def _run(name: str, job: Contender, machine: Machine) -> Run:
    run = run_once(f"on gpu, {name}", job, 0, machine.images(), BENCH / "out" / name.replace(" ", "_"))
    if run.images != machine.count:
        raise ValueError(f"expected {machine.count} rows, got {run.images}")
    return run


def speeds(machine: Machine, trials: Sequence[Trial]) -> list[list[str]]:
    """The rows of the first table."""
    attempt = functools.partial(_attempt, machine.ends)
    missing = next((name for name in ("torch", "torchvision") if not importlib.util.find_spec(name)), "")
    loader = f"skipped: {missing} is not installed" if missing else attempt(in_child, loader_rate, machine.images())
    shown, empty = loader if isinstance(loader, str) else f"{loader:.1f}", [""] * (len(FIGURES) - 1)
    rows = [_row(LOADER, "PyTorch", machine.device, "float16" if machine.gpus else "float32", shown, *empty)]
    for trial in trials:
        skipped = "" if ENGINES[trial.engine].installed else "is not installed"
        skipped = "needs a server" if SERVER in ENGINES[trial.engine].files else skipped
        images = machine.count // 4 if trial.model.title == LARGE else machine.count  # a quarter of them takes as long
        found = f"skipped: {skipped}" if skipped else attempt(_speed, machine._replace(count=images), trial, loader)
        figures = [found, *empty] if isinstance(found, str) else found
        rows.append(_row(trial.model.title, trial.engine, trial.device, trial.precision, *figures))
    return rows


def _speed(machine: Machine, trial: Trial, loader: float | str) -> list[str]:
    with watched(machine.gpus) as samples:
        run = _run(" ".join((trial.model.title, *trial.flags()[1::2])), trial.model.job(*trial.flags()), machine)
    rate, (fed, engine) = run.images_per_second, in_child(alone, trial, machine.images())
    is_given = trial.model.path.endswith(".onnx") and trial.model.path != str(_TOY)
    of_loader = f"{rate / loader:.2f}" if isinstance(loader, float) and is_given else ""
    shares = [f"{rate / min(fed, engine):.2f}", of_loader]
    return [f"{rate:.1f}", f"{fed:.1f}", f"{engine:.1f}", *shares, *_busy_and_memory(samples, run)]


def _attempt(ends: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a step returns, or why it failed or was left out: the others go on."""
    if time.monotonic() > ends:
        return "not run: the time was over"
    try:
        return function(*arguments)
    except (Exception, SystemExit) as err:  # noqa: BLE001  any failure belongs in the table
        return f"failed: {' '.join(str(err).split())[:300]}"


def _few_objects(cfg: str) -> np.ndarray:
    """Random values for its weights with which an image has some dozens of candidates, as a photo has, and not all of them."""
    values, start = random_values(cfg), 0
    for layer in parse_network(cfg).convolutions:
        if not layer.batch_normalize:  # a head: its biases come first, four of a box, its objectness, its classes
            values[start : start + layer.filters][4 :: layer.filters // 3] += _OBJECTNESS
        start += layer.filters * (4 if layer.batch_normalize else 1) + layer.kernel_count
    return values


def _yolov4(cfg: Path, weights: Path | None) -> Model:
    folder, text = BENCH / "yolov4-608" / "1", cfg.read_text()
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir(parents=True)
    names, made = folder.parent / "names", folder.parent / "random.weights"
    names.write_text("".join(f"class {number}\n" for number in range(parse_network(text).classes)))
    if weights is None:
        write_weights(made, _few_objects(text))
    import_darknet(str(cfg), str(weights or made), str(names), str(folder), input_hw=(608, 608))
    return Model(LARGE, str(folder))


def main() -> None:
    """Tries all, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--images", type=int, help="how many (default: 16384; of a dry run 16); YOLOv4 at 608 gets a quarter")
    parser.add_argument("--cfg", type=Path, help="Darknet's yolov4.cfg, for YOLOv4 at 608")
    parser.add_argument("--weights", type=Path, help="its weights (default: random ones)")
    parser.add_argument("--onnx", type=Path, help="a detector for ONNX Runtime (default: a toy)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no step begins (default: none)")
    args = parser.parse_args()
    ends = time.monotonic() + 60 * args.minutes
    names = [] if args.dry_run else _nvidia("name")
    count = args.images or (16384 if names else 16)
    model = Model("YOLOv4-tiny", str(in_child(make_model).resolve()), CONFIG) if names else Model("digits", digits.FOLDER)
    BENCH.mkdir(exist_ok=True)
    onnx = args.onnx or Path(write_yolo(_TOY))
    device = "gpu" if names else "cpu"
    of_onnx, large = Model(onnx.stem, str(onnx)), [in_child(_yolov4, args.cfg, args.weights)] if args.cfg else []
    trials = trials_of(of_onnx, "onnxruntime", device)
    trials += [each for one in (model, *large) for each in trials_of(one, "tensorflow", device)]
    trials.sort(key=lambda trial: trial.precision == "float32")  # keeps the order of the models
    trials += trials_of(of_onnx, "tensorrt", device)
    trials += [each for name in ("openvino", "triton", "tf-serving") for each in trials_of(model, name, device)]
    machine = Machine(len(names), device, model, count, ends)
    found = ", ".join(names) or "DRY RUN without a GPU: it shows that the steps work, and nothing of a GPU"
    print(f"\n{found}; {results.machine()}")
    header = ["model", "engine", "device", "precision", *FIGURES]
    print("\n" + results.table(header, speeds(machine, trials)), flush=True)
    print("\n" + results.table(["what", "expected", "got"], checks(machine, trials)), flush=True)


if __name__ == "__main__":
    main()
