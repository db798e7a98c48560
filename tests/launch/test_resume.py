"""A job that is killed goes on, by the same command, from its last checkpoint."""

import json
import os
import signal
import sys

import pytest

from tests.launch.test_batch_job import files_of, write_work
from tests.launch.test_only_new import rows_by_name
from tests.launch.test_results_folder import images_of, write_images

# Python imports a module of this name at its start: the process is killed before or after the n-th rename to a name like this
KILL_AT = """
import os, signal, sys

name, number, after = os.environ["KILL_AT"].split(":")
left = [int(number)]
rename = os.rename

def killed(source, target, **options):
    hit = name in str(target)
    left[0] -= hit
    if hit and not left[0] and after == "after":
        rename(source, target, **options)
    if hit and not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, **options)

os.rename = killed
"""


@pytest.fixture
def kill_at(tmp_path):
    """The environment of a job that is killed at a `<part of a file's new name>:<its how-manieth>:<before or after>`."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(KILL_AT)
    return lambda place: {**os.environ, "PYTHONPATH": str(tmp_path / "hook"), "KILL_AT": place}


@pytest.fixture(scope="module")
def work(tmp_path_factory, bright_model):
    """The arguments of a job of a second or more, but for its output."""
    folder = tmp_path_factory.mktemp("work") / "in"
    write_work(folder)
    (folder / "broken.png").touch()
    return ["--input", folder, "--model", bright_model, "--request-images", 16, "--shards", 2, "--checkpoint-s", 0.1, "--coco"]


@pytest.fixture(scope="module")
def undisturbed(work, tmp_path_factory):
    """The files of the job that nobody disturbed."""
    import subprocess

    from tests.conftest import REPO

    out = tmp_path_factory.mktemp("undisturbed") / "out"
    subprocess.run([sys.executable, "-m", "pipeline.run", *map(str, work), "--output", str(out)], cwd=REPO, check=True)
    return files_of(out)


@pytest.mark.parametrize(
    ("place", "goes_on"),
    [
        (".checkpoint:1:before", False),
        (".checkpoint:1:after", True),
        (".checkpoint:4:before", True),
        ("ready.json:1:before", True),
        ("commit.json:1:before", True),
        ("commit.json:1:after", False),
        ("index/detections-:1:before", False),
        ("index/detections-:1:after", False),
        ("published.json:1:before", False),
    ],
)
def test_a_job_killed_at_any_moment_ends_with_the_files_of_one_that_was_not(
    place, goes_on, kill_at, work, undisturbed, tmp_path, run_job
):
    """What stands in a checkpoint is not done again; what was complete gets its names, and then is made anew."""
    out = tmp_path / "out"
    assert run_job(*work, "--output", out, env=kill_at(place))[0] == -signal.SIGKILL

    code, said, err = run_job(*work, "--output", out)

    assert (code, err) == (0, "")
    assert files_of(out) == undisturbed
    assert images_of(out) == {"read": 2001, "detected": 2000, "dead": 1, "skipped": 0}
    assert ("were done by a run of this command that was killed" in said) == goes_on
    assert not list(out.glob(".*"))


def test_a_job_that_adds_goes_on_too_and_another_command_does_not(kill_at, tmp_path, run_job, bright_model):
    write_images(tmp_path / "in", "a.png", "b.png", "c.png")
    out = tmp_path / "out"
    arguments = ["--output", out, "--model", bright_model, "--checkpoint-s", 0, "--input"]
    assert run_job(*arguments, tmp_path / "in" / "a.png")[0] == 0
    adds = [*arguments, tmp_path / "in", "--only-new"]
    assert run_job(*adds, env=kill_at("ready.json:1:before"))[0] == -signal.SIGKILL
    code, said, _ = run_job(*adds)
    assert code == 0 and "  2 of them were done by a run of this command that was killed\n" in said
    assert rows_by_name(out) == ["a.png", "b.png", "c.png"]
    assert images_of(out) == {"read": 3, "detected": 2, "dead": 0, "skipped": 1}
    assert json.loads((out / "summary.json").read_text())["done_before"] == 1
