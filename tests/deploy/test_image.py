"""The image: its versions are the lock file's, and it takes files that are there."""

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from pipeline.software import OF_DOCKERFILE, Software
from tests.conftest import REPO

DOCKERFILE = REPO / "deploy" / "Dockerfile"


def instructions(name: str) -> list[str]:
    """What stands behind each of the Dockerfile's instructions of a name, lines that go on joined."""
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def arguments() -> dict[str, str]:
    return dict(each.split("=", 1) for each in instructions("ARG") if "=" in each)


def pins(path: Path) -> dict[str, str]:
    """Package to version, as a Python of the image's version on Linux takes it."""
    here = {**default_environment(), "python_version": arguments()["PYTHON"], "python_full_version": f"{arguments()['PYTHON']}.0"}
    found = [Requirement(line) for line in path.read_text().splitlines() if re.match(r"[a-z0-9]", line)]
    return {each.name: str(each.specifier).removeprefix("==") for each in found if not each.marker or each.marker.evaluate(here)}


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


def test_every_file_that_is_copied_is_there():
    copied = [part for each in instructions("COPY") if "--from=" not in each for part in shlex.split(each)[:-1]]
    assert copied and [name for name in copied if not (REPO / name).exists()] == []


def test_the_image_has_extras_that_there_are_for_all_that_a_launcher_accepts():
    """Each format, store and engine that a job on this machine takes; what draws, labels and quantizes is no work of workers."""
    wanted = {*arguments()["EXTRAS"].split(",")}
    there = {*importlib.metadata.metadata("hybrid-detection-pipeline").get_all("Provides-Extra")}
    of_each = {"tensorflow"}  # of all installations but those without it
    assert there - wanted - of_each == {"dev", "fiftyone", "quantize", "voc"} and wanted <= there
    assert '".[${EXTRAS}]"' in DOCKERFILE.read_text()


def test_its_labels_are_the_versions_that_launchers_compare_with_their_own():
    (labels,) = instructions("LABEL")
    assert dict(each.split("=") for each in labels.split()) == {
        "detect-objects.python": "${PYTHON}",
        "detect-objects.beam": "${BEAM}",
    }
    assert Software(arguments()["PYTHON"], arguments()["BEAM"]) == OF_DOCKERFILE
    after_the_last_stage = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    assert "\nARG PYTHON\n" in after_the_last_stage and "\nARG BEAM\n" in after_the_last_stage, "each stage declares its own"
