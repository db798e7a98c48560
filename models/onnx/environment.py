"""A cache of the converter's environment: onnx2tf needs other versions of TensorFlow and NumPy than this program has.

The packages of `requirements.txt` are installed once for each user, into a folder that is named after them and the Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from models.progress import step
from models.user_cache import cache_folder

REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "requirements.txt")
_PYTHONS = ("3.12", "3.11", "3.10")  # onnx2tf's packages exist for these
_COMPLETE = "complete"  # an environment without this file was interrupted


class OnnxError(Exception):
    """An ONNX model cannot be imported; the message has one line: what was expected and what came."""


def python_of_converter(cache: str | None = None, install: Callable[[str], None] | None = None) -> str:
    """The Python of the converter's environment, which the first call makes; of several processes one makes it.

    Args:
      cache: Folder of the environments; default: `onnx/` of this program's cache folder.
      install: Makes the environment in a folder that does not exist; default: pip, from the package index.

    Raises:
      OnnxError: The environment cannot be made.
      OSError: The cache cannot be written.
    """
    cache = cache or os.path.join(cache_folder(), "onnx")
    folder = os.path.join(cache, _digest())
    os.makedirs(cache, exist_ok=True)
    with open(f"{folder}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isfile(os.path.join(folder, _COMPLETE)):
            shutil.rmtree(folder, ignore_errors=True)
            (install or _install)(folder)
            with open(os.path.join(folder, _COMPLETE), "wb"):
                """Only now; programs of an environment contain its path, so it cannot be made elsewhere and renamed."""
    return os.path.join(folder, "bin", "python")


def _digest() -> str:
    with open(REQUIREMENTS, "rb") as file:
        return hashlib.sha256(file.read() + sys.version.encode()).hexdigest()[:16]


def _install(folder: str) -> None:
    pip = [os.path.join(folder, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with step("making the converter's environment (once; 2.5 GB, minutes)"):
        _run([_python(), "-m", "venv", folder])
        _run([*pip, "--no-deps", "--only-binary", ":all:", "--requirement", REQUIREMENTS])


def _python() -> str:
    own = ".".join(map(str, sys.version_info[:2]))
    found = sys.executable if own in _PYTHONS else next(filter(None, (shutil.which(f"python{each}") for each in _PYTHONS)), None)
    if not found:
        raise OnnxError(
            f"the converter's packages need a Python {_PYTHONS[-1]} to {_PYTHONS[0]}; install one, such as python3.12"
        )
    return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  this Python and its pip
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise OnnxError(f"the converter's environment cannot be made: {said[-1].strip()}")
