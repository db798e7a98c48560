"""Fixtures that many tests share: real SavedModels and real image files, made once a session."""

import gc
import itertools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import settings

from models.base.quiet import gc_paused
from pipeline.process import PROCESS
from tests.bright_model import export_bright_model
from tests.emulator_fixtures import (  # noqa: F401  fixtures
    _azure_process,
    _gcs_process,
    _pubsub_process,
    _s3_process,
    _strict_gcs_process,
    azure_container,
    bucket,
    forget_detectors,
    gcs_bucket,
    pubsub_emulator,
    s3_bucket,
    strict_gcs_bucket,
)
from tests.forked_jobs import Moment, run_forked

REPO = Path(__file__).resolve().parent.parent
os.environ["PATH"] = f"{REPO / '.tools'}{os.pathsep}{os.environ.get('PATH', '')}"  # programs that `make` has put there
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)  # else a `make` that a test starts takes itself for a part of the one that runs the tests
os.environ["PYTHONPATH"] = f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # of processes that begin in another folder
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of hundreds of interpreters compiles the same modules anew

settings.register_profile("suite", deadline=None, derandomize=True)  # the same cases each time; `make fuzz` looks for new ones
settings.register_profile("fuzz", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", "2000")))
settings.load_profile("fuzz" if os.environ.get("FUZZ") == "1" else "suite")


# `make test-fast` leaves out whole jobs, emulators, files that load several models or install things, and each test that takes
# more than a second of a core, which is marked where it stands
_SLOW_FOLDERS = {"launch", "runners", "deploy", "fuzz", "flink", "spark"}
_SLOW_FILES = {
    *("test_canary.py", "test_candidates.py", "test_compiled.py", "test_etag_stores.py", "test_families.py", "test_golden.py"),
    *("test_model_versions.py", "test_openvino_engine.py", "test_other_formats.py", "test_power_cut.py", "test_secrets.py"),
    *("test_served_metrics.py", "test_stuck_jobs.py"),
}
# more than fifteen seconds of a core
_LONG_FILES = {
    *("test_batcher.py", "test_canary.py", "test_candidates.py", "test_compact.py", "test_compiled.py", "test_decode_hostile.py"),
    *("test_detector.py", "test_engines.py", "test_families.py", "test_feeder.py", "test_model_versions.py"),
    *("test_openvino_engine.py", "test_read_images.py", "test_remote_model.py", "test_results_folders.py", "test_run.py"),
    *("test_tensorflow_setup.py", "test_tiles_photos.py", "test_tune.py"),
}
_SLOW_FIXTURES = {"gcs_bucket", "pubsub_emulator", "run_job"}
_ON_STORAGE = {"gs", "gcs", "s3", "abfs", "storage"}  # parameters

# `make test` also leaves out what shows a contract a second time: on another store, runner or engine, at further moments; and
# fresh environments, a browser, demos, hours in short, random input. Single tests are marked where they stand
_MATRIX_FOLDERS = {"fuzz"}
_MATRIX_FILES = {"test_packaging.py", "test_page_in_browser.py", "test_quantize.py", "test_real_yolo.py", "test_soak.py"}
_MATRIX_FIXTURES = {"azure_container", "s3_bucket", "strict_gcs_bucket"}
_MATRIX_PARAMETERS = {*_ON_STORAGE, "PrismRunner", "openvino"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes long; files that take longest come first, so that no process is left with one of them at the end."""
    items.sort(key=lambda item: not _is_any(item, {"launch", "runners"}, _LONG_FILES, set(), set()))
    for item in items:
        if _is_any(item, _MATRIX_FOLDERS, _MATRIX_FILES, _MATRIX_FIXTURES, _MATRIX_PARAMETERS):
            item.add_marker("matrix")
        if item.get_closest_marker("matrix") or _is_any(item, _SLOW_FOLDERS, _SLOW_FILES, _SLOW_FIXTURES, _ON_STORAGE):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported here stays: no garbage collection looks at it again, which takes 0.3 s of a core at a detector's end."""
    with gc_paused():
        collected = yield
    gc.freeze()
    return collected


def _is_any(item: pytest.Item, folders: set[str], files: set[str], fixtures: set[str], parameters: set[str]) -> bool:
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return bool(
        item.path.name in files
        or folders & {*item.path.parts}
        or fixtures & {*getattr(item, "fixturenames", ())}
        or parameters & {parameter for parameter in given if isinstance(parameter, str)}
    )


@pytest.fixture(autouse=True, scope="module")
def _no_model_outlives_its_module():
    """Models that a process shares take memory, and TensorFlow keeps the precision of the last one for all later graphs."""
    yield
    forget_detectors()
    if tf := sys.modules.get("tensorflow"):
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": False})


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A service that fails in one test, or a library that logs less, changes nothing for the next test of this process."""
    level = logging.getLogger().level
    yield
    PROCESS.failing.clear()
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="session")
def bright_model(tmp_path_factory) -> str:
    """A SavedModel that finds the bright rectangle of an image, stretched to its input."""
    return export_bright_model(tmp_path_factory.mktemp("models") / "stretch" / "3", resize="stretch")


@pytest.fixture(scope="session")
def bright_letterbox_model(tmp_path_factory) -> str:
    """The same, letterboxed."""
    return export_bright_model(tmp_path_factory.mktemp("models") / "letterbox" / "3", resize="letterbox")


@pytest.fixture
def out(tmp_path):
    """The results folder of `arguments`."""
    return tmp_path / "out"


@pytest.fixture
def arguments(tmp_path, bright_model, out) -> list:
    """The arguments of a job over the images in the folder `in`."""
    return ["--input", tmp_path / "in", "--output", out, "--model", bright_model]


@pytest.fixture(scope="session")
def bright_png(tmp_path_factory) -> bytes:
    """An image in which the bright models find one object."""
    path = tmp_path_factory.mktemp("images") / "bright.png"
    write_bright_image(path, (64, 48), (10, 12, 30, 36))
    return path.read_bytes()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Tests fill a cache of their own with their models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def run_job(tmp_path_factory):
    """Runs the command line in a process of its own: (exit code, stdout, stderr).

    `at` says what happens to it; with an `env` of its own it is a new interpreter. The model is the bundled one unless the
    arguments name another.
    """
    folder = tmp_path_factory.mktemp("jobs")
    numbers = itertools.count()

    def run(*args: object, at: Moment | None = None, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        args = args if "--model" in map(str, args) else ("--model", "digits", *args)
        if env:
            command = [sys.executable, "-m", "pipeline.run", *map(str, args)]
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, env=env, check=False)
            return done.returncode, done.stdout, without_progress(done.stderr)
        said, errors = (folder / f"{next(numbers)}" for _ in range(2))
        code = run_forked(args, said, at, errors=errors)
        return code, said.read_text(), without_progress(errors.read_text())

    return run


def without_stamps(said: str) -> str:
    """What a job said on standard error, less the time at which it said so."""
    return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", "", said, flags=re.MULTILINE)


def without_progress(said: str) -> str:
    """What a job said on standard error, less its time stamps and progress: a line every ten seconds, on a slow machine."""
    return re.sub(r"^ *\d+ s  .*\n", "", without_stamps(said), flags=re.MULTILINE)


def write_bright_image(path: Path, image_wh: tuple[int, int], box_xyxy: tuple[int, int, int, int]) -> None:
    """A black image with one white rectangle, in whatever format the name says."""
    pixels = np.zeros((image_wh[1], image_wh[0], 3), np.uint8)
    x0, y0, x1, y1 = box_xyxy
    pixels[y0:y1, x0:x1] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), pixels)
