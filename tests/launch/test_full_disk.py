"""A job on a disk that is full: a real one, a tmpfs of a few megabytes in a namespace of its own mounts."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.launch.jobs import images_of, rows_by_name, write_images

NAMES = [f"{number}.png" for number in range(12)]
NAMESPACE = ["unshare", "--mount"]
# a disk that has no room at all, then room for some rows, then for all
RUNS = """
mount -t tmpfs -o size=1m none disk || exit 1
mkdir disk/out
for ballast in 2000 984 0; do
    head -c "${ballast}k" /dev/zero > disk/ballast 2> head
    "$@" > printed$ballast 2> errors$ballast
    echo $? > code$ballast
    cp -r disk/out results$ballast
done
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_goes_on_once_there_is_room(tmp_path, bright_model):
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace of mounts")
    write_images(tmp_path / "in", *sorted(NAMES))
    (tmp_path / "disk").mkdir()
    job = [sys.executable, "-m", "pipeline.run", "--input=in", "--output=disk/out", f"--model={bright_model}"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO)}
    subprocess.run([*NAMESPACE, "sh", "-c", RUNS, "sh", *job], env=environment, cwd=tmp_path, check=True)
    for ballast in (2000, 984):
        errors = (tmp_path / f"errors{ballast}").read_text()
        assert (tmp_path / f"code{ballast}").read_text() == "1\n", errors
        (line,) = [line for line in errors.splitlines() if "error: " in line]
        assert "No space left on device" in line
        assert {*rows_by_name(tmp_path / f"results{ballast}")} <= {*NAMES}, "each row is whole"
    assert list((tmp_path / "results2000").iterdir()) == []
    assert (tmp_path / "code0").read_text() == "0\n", (tmp_path / "errors0").read_text()
    assert rows_by_name(tmp_path / "results0") == sorted(NAMES) and images_of(tmp_path / "results0")["read"] == len(NAMES)
