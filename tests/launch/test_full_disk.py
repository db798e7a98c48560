"""A disk that is really full, under a job and other commands: a tmpfs of one megabyte, which only its process sees."""

import contextlib
import ctypes
import importlib
import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline import run
from pipeline.__main__ import VERBS
from pipeline.detect.versions import locate
from tests.fixtures import REPO
from tests.forked_jobs import run_forked
from tests.launch.jobs import rows_by_name, write_images
from tests.models.darknet_cases import HEAD, STEM, random_values, write_weights
from tests.models.test_evaluate import found, row, truth, write_lines
from tests.onnx_files import write_yolo

NAMES = [f"{number}.png" for number in range(12)]
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # of <linux/sched.h>
MAY_NOT_MOUNT = 77
SAMPLES = REPO / "models" / "digits" / "samples"
EVALUATE = "evaluate --resamples 0 --ground-truth {0}/truth.json"


def main(argv: list[str]) -> int:
    """Mounts a disk of one megabyte in a folder, and runs a job or another command there; prints exit codes and what is there."""
    disk, verb, *arguments = argv
    libc, users = ctypes.CDLL(None), {"uid_map": f"0 {os.getuid()} 1", "setgroups": "deny", "gid_map": f"0 {os.getgid()} 1"}
    if libc.unshare(NEW_MOUNTS | NEW_USER):
        return MAY_NOT_MOUNT
    for name, content in users.items():
        Path("/proc/self", name).write_text(content)
    if libc.mount(b"none", disk.encode(), b"tmpfs", 0, b"size=1m"):
        return MAY_NOT_MOUNT
    return _run_jobs(disk, arguments) if verb == "run" else _run(disk, verb, arguments)


def _run(disk: str, verb: str, arguments: list[str]) -> int:
    """Runs a command with room for a part of what it writes; prints its exit code and the names of what is left."""
    (ballast := Path(disk, "ballast")).write_bytes(bytes(1000 << 10))
    code = importlib.import_module(VERBS[verb].module).main(arguments)
    print(json.dumps([code, [str(path) for path in Path(disk).rglob("*") if path != ballast]]), flush=True)
    return 0


def _run_jobs(disk: str, arguments: list[str]) -> int:
    """Runs a job without room at all, with room for some of its files, and with room; prints exit codes and rows."""
    (out := Path(disk, "out")).mkdir()
    for kilobytes in (2000, 984, 0):
        with contextlib.suppress(OSError):
            Path(disk, "ballast").write_bytes(bytes(kilobytes << 10))
        code = run.main([*arguments, "--output", str(out)])
        print(json.dumps([code, rows_by_name(out)]), flush=True)
    return 0


def test_a_full_disk_is_one_line_and_the_same_command_goes_on_once_there_is_room(tmp_path, bright_model):
    """Each row is whole, also where the disk was full in the midst of a file."""
    write_images(tmp_path / "in", *NAMES)
    (tmp_path / "disk").mkdir()
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    arguments = [tmp_path / "disk", "run", "--input", tmp_path / "in", "--model", bright_model]
    ended = run_forked(arguments, printed, module=__name__, errors=errors)
    if ended == MAY_NOT_MOUNT:
        pytest.skip("this user may not mount a disk of its own")
    assert ended == 0, errors.read_text()
    (full, _), (filled, rows), complete = (json.loads(line) for line in printed.read_text().splitlines() if line[0] == "[")
    assert (full, filled, complete) == (1, 1, [0, sorted(NAMES)]) and {*rows} <= {*NAMES}
    lines = [line for line in errors.read_text().splitlines() if line.startswith("error: ")]
    what = "No space left on device; free some space, then run the same command again"
    assert len(lines) == 2 and all(what in line and str(tmp_path / "disk" / "out") in line for line in lines), lines
    assert not any("while running" in line for line in lines)


@pytest.fixture
def models(tmp_path):
    """Files to import: of Darknet, of ONNX, and the bundled SavedModel, which is also there to be quantized."""
    (tmp_path / "small.cfg").write_text(STEM + HEAD)
    write_weights(tmp_path / "small.weights", random_values(STEM + HEAD))
    (tmp_path / "small.names").write_text("cat\ndog\nplant\n")
    write_yolo(tmp_path / "toy.onnx", notes={"author": "x" * 40_000})
    shutil.copytree(locate("digits", None)[0], tmp_path / "digits" / "1")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "failed"),
    [
        pytest.param(
            "import --cfg {}/small.cfg --weights {}/small.weights --names {}/small.names", "nothing was imported", id="Darknet"
        ),
        pytest.param("import {}/toy.onnx", "nothing was imported", id="ONNX"),
        pytest.param("import {}/digits", "nothing was imported", id="SavedModel"),
        pytest.param(
            f"quantize --model {{}}/digits --calibration {SAMPLES}", "nothing is written", id="int8", marks=pytest.mark.matrix
        ),
    ],
)
def test_a_full_disk_is_one_line_with_the_folder_and_no_version(command, failed, models, tmp_path):
    """Other libraries have texts of their own for it."""
    (tmp_path / "disk").mkdir()
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    arguments = [tmp_path / "disk", *command.format(*[models] * 3).split(), "--output", f"{tmp_path}/disk/m/1"]
    ended = run_forked(arguments, printed, module=__name__, errors=errors)
    if ended == MAY_NOT_MOUNT:
        pytest.skip("this user may not mount a disk of its own")
    assert ended == 0, errors.read_text()
    assert json.loads(printed.read_text().splitlines()[-1]) == [1, []]
    what = "No space left on device; free some space, then run the same command again"
    said = [line for line in errors.read_text().splitlines() if "error" in line.lower() or "{{" in line]
    assert said == [f"error: {failed}: {tmp_path}/disk/m/1: {what}"]


@pytest.mark.parametrize(
    ("command", "failed"),
    [
        pytest.param(f"{EVALUATE} --json {{1}}/a.json --detections", "nothing is evaluated", id="figures"),
        pytest.param(f"{EVALUATE} --page {{1}}/a.html --detections", "nothing is evaluated", id="page"),
        pytest.param("view --export {1}", "nothing is shown", id="view"),
    ],
)
def test_a_full_disk_leaves_no_part_of_a_file_under_its_name(command, failed, tmp_path):
    """What a script finds there is whole."""
    (disk := tmp_path / "disk").mkdir()
    images, classes = [f"{tmp_path}/{number}.png" for number in range(400)], [f"class {number:040}" for number in range(400)]
    for image in images:
        Path(image).touch()
    rows = write_lines(tmp_path / "rows.jsonl", [row(*each) for each in zip(images, map(found, classes), strict=True)])
    categories = [{"id": number, "name": name} for number, name in enumerate(classes)]
    (tmp_path / "truth.json").write_text(json.dumps(truth(images, categories=categories)))
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    ended = run_forked([disk, *command.format(tmp_path, disk).split(), rows], printed, module=__name__, errors=errors)
    if ended == MAY_NOT_MOUNT:
        pytest.skip("this user may not mount a disk of its own")
    assert ended == 0, errors.read_text()
    assert json.loads(printed.read_text().splitlines()[-1]) == [1, []]
    what = "No space left on device; free some space, then run the same command again"
    assert errors.read_text().splitlines()[-1] == f"error: {failed}: {disk}: {what}"
