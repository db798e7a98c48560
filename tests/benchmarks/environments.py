"""The environments of other frameworks: one virtual environment for each below `.bench/envs`, with pinned versions.

python -m tests.benchmarks.environments [NAME ...]
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.benchmarks.images import BENCH

_OPENCV = "opencv-python-headless==4.14.0.94"
_TENSORFLOW = ["tensorflow==2.21.0", _OPENCV, "numpy==2.4.6"]
REQUIREMENTS = {
    # tf2onnx 1.17 wants this TensorFlow, and that NumPy 2.1; it makes the network that ONNX Runtime and OpenVINO run
    "onnxruntime": ["onnxruntime==1.31.1", "tf2onnx==1.17.0", "tensorflow-cpu==2.19.1", _OPENCV],
    "daft": ["daft==0.7.26", *_TENSORFLOW],
    "ray": ["ray[data]==2.60.0", *_TENSORFLOW],
    # PyTriton 0.7 wants NumPy 1, and so this OpenCV
    "triton": ["nvidia-pytriton==0.7.0", "tensorflow==2.21.0", "opencv-python-headless==4.11.0.86"],
}


def make_environments(names: list[str] | None = None) -> dict[str, str]:
    """Makes what is missing or has other versions; returns those that cannot be made, each with the reason."""
    failed = {}
    for name in names or REQUIREMENTS:
        try:
            _make(name)
        except subprocess.CalledProcessError as err:
            failed[name] = (err.stderr or str(err)).strip().splitlines()[-1]
    return failed


def python_of(name: str) -> str:
    """The interpreter of an environment."""
    return str(BENCH / "envs" / name / "bin" / "python")


def _make(name: str) -> None:
    folder, wanted = BENCH / "envs" / name, "\n".join(REQUIREMENTS[name])
    ready = folder / "ready.txt"
    if ready.exists() and ready.read_text() == wanted:
        return
    print(f"making {folder}", file=sys.stderr, flush=True)
    _run([_base_python(name), "-m", "venv", "--clear", str(folder)])
    _run([python_of(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[name]])
    ready.write_text(wanted)


def _base_python(name: str) -> str:
    """Triton's program loads the system's shared library of Python, so its modules have to be of that Python too."""
    system = shutil.which("python3", path="/usr/bin")
    return system if name == "triton" and system else sys.executable


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    problems = make_environments(sys.argv[1:])
    sys.exit("\n".join(f"{name}: {reason}" for name, reason in problems.items()))
