"""The engines, each with what it can do: loading, `tune`, `doctor`, the help and the pages ask this table."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence

AUTO = "auto"
SAVED_MODEL, ONNX, SERVER = "SavedModel", "ONNX file", "model on a server"
_INT8 = "int8"  # of versions that `detect-objects quantize` writes, of SavedModels alone
_BY_DEFAULT = "tensorflow"  # the extra that is part of an installation, unless it was made without


@dataclasses.dataclass(frozen=True)
class EngineKind:
    """What an engine runs, and on what.

    Attributes:
      opener: The function that opens a model, as `package.module:function`; `pipeline.detect.engine.OpenModel` is its type.
      files: Kinds of models.
      precisions: By device, `cpu` or `gpu`; a server chooses both itself, and has float32 under an empty name.
      package: The package that it needs.
      extra: The extra of this project that installs it.
      libraries: The package with the libraries that it needs beside; empty for none.
      on_gpu: What to install for a GPU instead; empty for nothing.
      batches: Whether it gains from several images a call.
      compiles: Whether XLA compiles its models on a GPU, unless the setting `compiled` says no.
    """

    opener: str
    files: tuple[str, ...]
    precisions: Mapping[str, tuple[str, ...]]
    package: str
    extra: str
    libraries: str = ""
    on_gpu: str = ""
    batches: bool = True
    compiles: bool = False

    @property
    def installed(self) -> bool:
        """Whether its packages are there."""
        return all(importlib.util.find_spec(each) for each in (self.package, self.libraries) if each)

    def has_device(self, device: str) -> bool:
        """Whether it runs on the device of the settings: `auto`, `cpu`, `gpu` or `gpu:<number>`."""
        return device == AUTO or "" in self.precisions or device.partition(":")[0] in self.precisions

    def device_on(self, *, gpu: bool) -> str:
        """The device that it takes on a machine with or without a GPU; empty for one at a server."""
        return "" if "" in self.precisions else "gpu" if gpu and "gpu" in self.precisions else "cpu"

    def precisions_on(self, *, gpu: bool) -> tuple[str, ...]:
        """On the device that it takes on a machine with or without a GPU; none if the machine lacks it."""
        return self.precisions.get(self.device_on(gpu=gpu), ())


ENGINES = {  # in the order in which `auto` and `tune` try them; a new engine is a row here and a module
    "tensorflow": EngineKind(
        "pipeline.detect.tensorflow_engine:open_model",
        (SAVED_MODEL,),
        {"cpu": ("float32", "bfloat16"), "gpu": ("float32", "float16")},
        "tensorflow",
        _BY_DEFAULT,
        on_gpu="tensorflow[and-cuda]",
        compiles=True,
    ),
    "openvino": EngineKind(
        "pipeline.detect.openvino_engine:open_model",
        (SAVED_MODEL, ONNX),
        {"cpu": ("float32", "bfloat16", _INT8)},
        "openvino",
        "openvino",
        batches=False,
    ),
    "onnxruntime": EngineKind(
        "pipeline.detect.onnxruntime_engine:open_model",
        (ONNX,),
        {"cpu": ("float32",), "gpu": ("float32", "float16")},
        "onnxruntime",
        "onnxruntime",
        on_gpu="onnxruntime-gpu[cuda,cudnn], onnx, onnxconverter-common",
    ),
    "tensorrt": EngineKind(
        "pipeline.detect.onnxruntime_engine:open_model",
        (ONNX,),
        {"gpu": ("float32", "float16")},
        "onnxruntime",
        "onnxruntime",
        libraries="tensorrt",
        on_gpu="onnxruntime-gpu[cuda,cudnn], onnx, onnxconverter-common, tensorrt",
    ),
    "triton": EngineKind("pipeline.detect.remote_engine:open_model", (SERVER,), {"": ("float32",)}, "tritonclient", "triton"),
    "tf-serving": EngineKind(
        "pipeline.detect.remote_engine:open_model", (SERVER,), {"": ("float32",)}, "tensorflow_serving", _BY_DEFAULT
    ),
}


def engines_for(files: str, device: str = AUTO) -> list[str]:
    """Engines that run such a model on such a device."""
    return [name for name, kind in ENGINES.items() if files in kind.files and kind.has_device(device)]


def choose_engine(files: str, device: str, precision: str, *, gpu: bool) -> str:
    """The engine that `auto` means: the first one that fits, and is installed; on a GPU one that uses it.

    Args:
      files: Kind of the model.
      device: Of the settings.
      precision: Of the settings.
      gpu: Whether the machine has a GPU that the settings allow.
    """
    fitting = _with_precision(files, device, precision, gpu=gpu) or engines_for(files, device) or engines_for(files)
    if gpu:
        fitting.sort(key=lambda name: "gpu" not in ENGINES[name].precisions)
    return next((name for name in fitting if ENGINES[name].installed), fitting[0])


def misfit(engine: str, files: str, device: str, precision: str, *, gpu: bool) -> str:
    """Why an engine does not run such a model with such settings, and what to use; empty if it does, or is one of one's own.

    Args:
      engine: Its name.
      files: Kind of the model.
      device: Of the settings.
      precision: Of the settings.
      gpu: Whether the machine has a GPU that the settings allow.
    """
    kind = ENGINES.get(engine)
    if not kind:
        return ""
    others = _named([name for name in _with_precision(files, device, precision, gpu=gpu) if name != engine])
    if files not in kind.files:
        return f"engine {engine}: expected {' or '.join(kind.files)}, got {files}; {others or 'leave out --engine'}"
    if not kind.has_device(device):
        expected = f"expected device auto or {' or '.join(kind.precisions)}, got {device}"
        return f"engine {engine}: {expected}{others and f'; {others}'}"
    if why := lacks_precision(engine, precision, gpu=gpu):
        where = "; a server has a precision of its own, leave out --precision" if files == SERVER else others and f"; {others}"
        return f"{why}{where}"
    if _is_of_no_engine(files, precision):
        return (
            f"precision {precision}: expected a version of a {SAVED_MODEL} that detect-objects quantize wrote, got {files}; "
            "export the model as a SavedModel, or leave out --precision, also for a file that has been quantized elsewhere"
        )
    return ""


def lacks_precision(engine: str, precision: str, *, gpu: bool) -> str:
    """Why an engine lacks a precision on the device that it takes; empty if it has it, or the machine lacks the device."""
    kind = ENGINES[engine]
    has, device = kind.precisions_on(gpu=gpu), kind.device_on(gpu=gpu)
    where = f" on a {device.upper()}" if device else ""
    return "" if precision in has or not has else f"precision {precision}: engine {engine} has {_listed(has)}{where}"


def _with_precision(files: str, device: str, precision: str, *, gpu: bool) -> list[str]:
    if _is_of_no_engine(files, precision):
        return []
    return [name for name in engines_for(files, device) if precision in ENGINES[name].precisions_on(gpu=gpu)]


def _is_of_no_engine(files: str, precision: str) -> bool:
    return precision == _INT8 and files == ONNX


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _named(engines: Sequence[str]) -> str:
    return f"use --engine {' or '.join(engines)}" if engines else ""


def engine_lines() -> Iterator[tuple[str, str]]:
    """Each engine's name, and in words what it can do."""
    for name, kind in ENGINES.items():
        devices = [f"{device.upper()} ({', '.join(precisions)})" for device, precisions in kind.precisions.items() if device]
        yield name, f"{' and '.join(kind.files)}{': ' if devices else ''}{', '.join(devices)}"


def engine_help() -> str:
    """The help of the setting `engine`."""
    named = "; ".join(f"{name} runs {what}" for name, what in engine_lines())
    extras = [name for name, kind in ENGINES.items() if kind.extra == name != _BY_DEFAULT]
    others = "; ".join(f"{name} needs {kind.on_gpu}" for name, kind in ENGINES.items() if kind.libraries)
    return (
        "what runs the model; auto: tensorflow for a SavedModel, for an ONNX file openvino on a CPU and onnxruntime on a GPU; "
        f"{named}; or package.module:function; {_listed(extras)} need the extra of their name; {others}"
    )
