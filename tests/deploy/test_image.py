"""The image: its versions are the lock file's, it takes only files that are there, and its steps run in a fresh environment."""

import fnmatch
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.conftest import REPO

DOCKERFILE = REPO / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, lines that go on joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def arguments() -> dict[str, str]:
    return dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")


def copies() -> list[tuple[list[str], str]]:
    """What is copied out of the project, and where to."""
    lines = [shlex.split(rest) for name, rest in instructions() if name == "COPY" and "--from=" not in rest]
    return [(parts[:-1], parts[-1]) for parts in lines]


def pins(path: Path) -> dict[str, str]:
    """Package to version, as a Python of the image's version on Linux takes it."""
    here = {**default_environment(), "python_version": arguments()["PYTHON"], "python_full_version": f"{arguments()['PYTHON']}.0"}
    found = [Requirement(line) for line in path.read_text().splitlines() if re.match(r"[a-z0-9]", line)]
    return {each.name: str(each.specifier).removeprefix("==") for each in found if not each.marker or each.marker.evaluate(here)}


def in_the_context(name: str) -> bool:
    """Whether .dockerignore lets a file of the project through: the last line that speaks of it decides."""
    let = True
    for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split("\n"):
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#") and (fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}/*")):
            let = line.startswith("!")
    return let


def test_beam_is_the_one_of_the_lock_file():
    """Boot entry point and SDK must be of one version, or workers do not start."""
    assert arguments()["BEAM"] == pins(REPO / "requirements.lock")["apache-beam"]


def test_the_cuda_libraries_are_those_that_the_locked_tensorflow_takes():
    if importlib.metadata.version("tensorflow") != pins(REPO / "requirements.lock")["tensorflow"]:
        pytest.skip("another TensorFlow than the lock file's is installed")
    wanted = [Requirement(line) for line in importlib.metadata.requires("tensorflow") or ()]
    wanted = [each for each in wanted if each.marker and each.marker.evaluate({"extra": "and-cuda"})]
    wanted = [each for each in wanted if each.name.startswith("nvidia")]
    pinned = pins(REPO / "deploy" / "cuda.txt")
    assert {each.name for each in wanted} == set(pinned)
    assert [each for each in wanted if not each.specifier.contains(pinned[each.name])] == []


def test_every_file_that_is_copied_is_there_and_in_the_context():
    for sources, _ in copies():
        for source in sources:
            assert (REPO / source).exists(), source
            assert source == "." or in_the_context(source), source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pipeline/run.py", True),
        ("models/digits/1/saved_model.pb", True),
        ("configs/batch_gcs_dataflow_gpu.yaml", True),
        ("deploy/models/yolov4/1/saved_model.pb", True),
        ("requirements.lock", True),
        (".git/HEAD", False),
        (".venv/bin/python", False),
        ("out/demo/report.html", False),
        ("tests/conftest.py", False),
    ],
)
def test_the_context_holds_the_project_and_nothing_else(name, expected):
    assert in_the_context(name) == expected


@pytest.mark.matrix
@pytest.mark.skipif(
    os.environ.get("DOCKERFILE_STEPS") not in ("resolve", "run"),
    reason="takes minutes and the package registry; DOCKERFILE_STEPS=resolve resolves all versions, =run runs every step",
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_steps_run_in_a_fresh_environment(tmp_path, device):
    """As `docker build` would run them, in folders below a temporary one; what other images give is left out."""
    venv.create(tmp_path / "venv", with_pip=True)
    paths = f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": paths, "HOME": str(tmp_path), "DEVICE": device, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "http", "SSL"))}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "opt" / "cache")
    work = tmp_path / "opt" / "detect"
    work.mkdir(parents=True)
    resolve_only = os.environ["DOCKERFILE_STEPS"] == "resolve"
    for name, rest in instructions():
        if name == "COPY" and "--from=" not in rest:
            *sources, target = shlex.split(rest)
            for source in sources:
                copy(source, (tmp_path / target.lstrip("/") if target.startswith("/") else work))
        elif name == "RUN":
            step = {**environment, "PIP_DRY_RUN": "1"} if resolve_only else environment
            subprocess.run(["/bin/sh", "-ec", rest], cwd=work, env=step, check=True, stdout=sys.stderr)
            if resolve_only:
                return
    done = subprocess.run(["detect-objects", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "--score-threshold" in done.stdout
    assert list((tmp_path / "opt" / "cache").rglob("saved_model.pb"))
    assert (tmp_path / "models" / "README.md").is_file()


def copy(source: str, target: Path) -> None:
    """COPY: a folder's content, or a file, as far as the context holds it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", source]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    for name in filter(in_the_context, names):
        below = Path(name).name if name == source else os.path.relpath(name, source)
        (target / below).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, target / below)
