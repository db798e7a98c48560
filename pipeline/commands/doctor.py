"""`detect-objects doctor`: what this machine and this installation can do, a line for each part; it asks no network.

Exit code 0: OK: all required parts found; 1: something is broken, and the last lines name it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError

from packaging.requirements import Requirement

from models.base.project import PROJECT, pip_install
from pipeline.config.engines import ENGINES, engine_lines
from pipeline.errors import CommandParser
from pipeline.limits import available_cpus, memory_limit_bytes, nvidia_gpus
from pipeline.log_lines import plural
from pipeline.software import OF_DOCKERFILE, here

_SHOWN = ("apache-beam", "tensorflow", "tfx-bsl", "numpy", "opencv-python-headless")
_EMULATORS = ("PUBSUB_EMULATOR_HOST", "STORAGE_EMULATOR_HOST", "BIGQUERY_EMULATOR_HOST", "AWS_ENDPOINT_URL")
# https://cloud.google.com/docs/authentication/application-default-credentials,
# https://docs.aws.amazon.com/boto3/latest/guide/credentials.html, and azure.identity.DefaultAzureCredential
_CREDENTIALS = {  # of each cloud: a variable and a file that its libraries look for, and the command that makes the file
    "Google": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "~/.config/gcloud/application_default_credentials.json",
        "gcloud auth application-default login",
    ),
    "Amazon": ("AWS_ACCESS_KEY_ID", "~/.aws/credentials", "aws configure"),
    "Azure": ("AZURE_STORAGE_CONNECTION_STRING", "~/.azure/azureProfile.json", "az login"),
}
_IMPORTS = """\
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import cv2, apache_beam, tfx_bsl.public.beam, tensorflow as tf
print(", ".join(f"{d.device_type} {tf.config.experimental.get_device_details(d).get('device_name', '')}".strip()
                for d in tf.config.list_physical_devices()))
"""


Finding = tuple[str, str, bool]  # what was looked at; what is there, and what to do; whether the program cannot work so


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings; returns the exit code."""
    flags = make_parser().parse_args(argv)
    broken = []
    for part, found, is_broken in itertools.chain(findings(full=flags.full), _for(flags.place)):
        print(f"{part:<15} {found}", flush=True)
        broken += [part] if is_broken else []
    print(f"broken: {', '.join(broken)}" if broken else "OK: all required parts found")
    return 1 if broken else 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects doctor",
        description="Says what this machine and this installation can do, and what to install.",
        epilog="exit code: 0 OK: all required parts found; 1 something is broken",
    )
    parser.add_argument(
        "--full", action="store_true", help="also import Beam and TensorFlow, and list TensorFlow's devices (slow)"
    )
    parser.add_argument(
        "--for", dest="place", choices=["dataflow"], help="also whether the image of deploy/Dockerfile fits this installation"
    )
    return parser


def _for(place: str | None) -> Iterator[Finding]:
    if place == "dataflow":
        fits = OF_DOCKERFILE.fits(here())
        build = f"build the image with --build-arg PYTHON={here().python} --build-arg BEAM={here().beam}, or launch from those"
        found = f"launcher: {here()}; deploy/Dockerfile: {OF_DOCKERFILE}"
        yield "Dataflow", found if fits else f"{found}; {build}", not fits


def findings(*, full: bool = False) -> Iterator[Finding]:
    """What is there, in the order of the answer; `full` imports the libraries also where no GPU asks for it."""
    yield "Python", f"{sys.version.split()[0]}, {sys.executable}", False
    yield from packages()
    for name, what in engine_lines():
        yield f"  {name}", what if ENGINES[name].installed else f"not installed; {what}", False
    yield from _machine()
    yield _devices(full)
    for cloud, (variable, file, command) in _CREDENTIALS.items():
        found = variable if os.environ.get(variable) else file if os.path.isfile(os.path.expanduser(file)) else ""
        lacking = f"no credentials found; on this cloud's machines none are needed, else {command}"
        yield cloud, f"credentials in {found}" if found else lacking, False
    emulators = [f"{name}={os.environ[name]}" for name in _EMULATORS if os.environ.get(name)]
    yield "emulators", ", ".join(emulators) or f"none: {', '.join(_EMULATORS)} are not set", False


def packages(project: Distribution | None = None) -> Iterator[Finding]:
    """What the program needs and is not installed, then its extras."""
    try:
        project = project or importlib.metadata.distribution(PROJECT)
    except PackageNotFoundError:
        yield "packages", "not checked: this copy is not installed; python -m pip install --editable .", False
        return
    needed = _needed(project, "")
    problems = [problem for each in needed if (problem := _problem(each))]
    versions = [f"{each.name} {importlib.metadata.version(each.name)}" for each in needed if each.name in _SHOWN and not problems]
    yield "packages", "; ".join(problems) or ", ".join([f"all {len(needed)}", *versions]), bool(problems)
    for extra in sorted({*(project.metadata.get_all("Provides-Extra") or ())} - {"dev"}):
        lacking = [problem for each in _needed(project, extra) if each not in needed and (problem := _problem(each))]
        how = f"optional: python -m {pip_install(extra)} ({'; '.join(lacking)})"
        yield f"  [{extra}]", how if lacking else "installed", False


def _needed(project: Distribution, extra: str) -> list[Requirement]:
    every = [Requirement(text) for text in project.requires or ()]
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": extra})]


def _problem(needed: Requirement) -> str:
    """What is wrong with a package that is absent or of another version; empty if nothing is."""
    try:
        version = importlib.metadata.version(needed.name)
    except PackageNotFoundError:
        return f"{needed.name} is not installed"
    fits = needed.specifier.contains(version, prereleases=True)
    return "" if fits else f"{needed.name} is {version}, expected {needed.specifier}"


def _machine() -> Iterator[Finding]:
    cpus = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    fast = "; --precision bfloat16 is fast here" if not nvidia_gpus() and re.search(r"\b(avx512|amx)_bf16\b", cpus) else ""
    yield "CPUs", f"{available_cpus()} usable of {os.cpu_count()}{fast}", False
    total, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit_bytes()
    yield "memory", f"{total / 1e9:.1f} GB; limit of the container: {f'{limit / 1e9:.1f} GB' if limit else 'none'}", False
    try:
        folder = tempfile.gettempdir()
        yield "temporary", f"{folder}, {shutil.disk_usage(folder).free / 1e9:.1f} GB free", False
    except OSError as err:
        yield "temporary", f"{err.strerror}; set TMPDIR to a folder that can be written", True


def _devices(full: bool) -> Finding:
    """TensorFlow's devices; it is imported only where there is a GPU, or on request."""
    gpus = nvidia_gpus()
    if not ENGINES["tensorflow"].installed:
        return "devices", f"{plural(gpus, 'NVIDIA GPU')}; TensorFlow is not installed, so only ONNX files run", False
    if not (gpus or full):
        return "devices", "CPU; no NVIDIA GPU here, so TensorFlow was not imported (--full imports it)", False
    print("importing TensorFlow and Beam to list the devices …", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=False)  # noqa: S603  own code
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return "devices", f"the libraries cannot be imported (exit code {done.returncode}): {last}", True
    unused = "; TensorFlow uses no GPU: install tensorflow[and-cuda]" if gpus and "GPU" not in done.stdout else ""
    return "devices", done.stdout.strip() + unused, False
