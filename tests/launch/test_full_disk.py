"""A job on a disk that is full: a real one, a tmpfs of a few megabytes in a namespace of its own mounts."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.launch.jobs import images_of, rows_by_name, write_images

# no room at all, then room for some rows, then for all
FULL = """
mount -t tmpfs -o size=1m none "$OUT" || exit 1
mkdir "$OUT/out"
for kilobytes in 2000 984 0; do
    head -c "${kilobytes}k" /dev/zero > "$OUT/ballast" 2> "$SAID/head"
    "$@" > "$SAID/out$kilobytes" 2> "$SAID/err$kilobytes"
    echo $? > "$SAID/code$kilobytes"
    cp -r "$OUT/out" "$SAID/results$kilobytes"
done
"""


@pytest.fixture(scope="module")
def namespace():
    """A command that gives its arguments a namespace of mounts."""
    command = ["unshare", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace of mounts")
    return command


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_goes_on_once_there_is_room(tmp_path, namespace, bright_model):
    names = [f"{number}.png" for number in range(12)]
    write_images(tmp_path / "in", *names)
    (disk := tmp_path / "disk").mkdir()
    (said := tmp_path / "said").mkdir()
    job = [sys.executable, "-m", "pipeline.run", "--input", tmp_path / "in", "--output", disk / "out", "--model", bright_model]
    command = [*namespace, "sh", "-c", FULL, "sh", *map(str, job)]
    subprocess.run(command, env={"OUT": str(disk), "SAID": str(said), "PATH": "/usr/bin:/bin"}, cwd=REPO, check=True)
    for full in ("2000", "984"):
        printed = (said / f"err{full}").read_text()
        errors = [line for line in printed.splitlines() if "error: " in line]
        assert (said / f"code{full}").read_text() == "1\n", printed
        assert len(errors) == 1 and "No space left on device" in errors[0]
        assert {*rows_by_name(said / f"results{full}")} <= {*names}  # each line is whole
    assert list((said / "results2000").iterdir()) == []
    assert (said / "code0").read_text() == "0\n", (said / "err0").read_text()
    assert rows_by_name(said / "results0") == sorted(names) and images_of(said / "results0")["read"] == len(names)
