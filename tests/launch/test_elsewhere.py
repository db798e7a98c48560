"""Jobs whose steps work in other processes than the launcher: it loads nothing, and says what they do, as they do it."""

import json
import re
import subprocess
import sys

import pytest

from pipeline.launch.prism import running_prism
from tests.conftest import REPO, without_progress, without_stamps, write_bright_image
from tests.detect.versioned_models import save_version
from tests.flink.cluster import worker_flags
from tests.launch.jobs import needs_prism, rows_of, write_images, write_work

IMAGES, CALL_MS = 400, 50  # ten seconds of work for two processes, however fast: each second they tell how far they are
TWO_PROCESSES = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")

# the command line, with a line of progress every 0.2 s; at the end, whether the launcher has loaded what a model needs
LAUNCHER = """
import sys
from pipeline import run
from pipeline.stats import progress

progress._LINE_SECONDS = 0.2
code = run.main(sys.argv[1:])
print("launcher loaded TensorFlow:", "tensorflow" in sys.modules)
sys.exit(code)
"""


def launch(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-c", LAUNCHER, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
    return done.returncode, done.stdout, without_stamps(done.stderr)


def counts_shown(err: str) -> list[tuple[int, int]]:
    """(images that were done, images that there are) by each line of progress."""
    return [(int(done), int(total)) for done, total in re.findall(r"^ *\d+ s  (\d+) of (\d+) images, ", err, re.MULTILINE)]


def test_processes_detect_and_the_launcher_loads_nothing_but_says_how_far_they_are(tmp_path):
    """With two worker processes of the DirectRunner; progress grows towards the number of images."""
    write_work(tmp_path / "in", IMAGES, image_wh=(64, 48))
    save_version(tmp_path / "model", 7, call_ms=CALL_MS)
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", tmp_path / "model"]
    one_by_one = ("--batch-sizes=1", "--concurrent-batches=1")
    code, out, err = launch(*arguments, *one_by_one, *TWO_PROCESSES)
    assert code == 0, err
    assert "launcher loaded TensorFlow: False" in out
    assert "waiting for workers" in err
    shown = counts_shown(err)
    assert shown == sorted(shown) and 0 < shown[0][0] < IMAGES == shown[0][1], err
    assert len(rows_of(tmp_path / "out")) == IMAGES

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["images"] == {"read": IMAGES, "detected": IMAGES, "dead": 0, "skipped": 0}
    assert summary["submission_seconds"] > 0
    assert re.search(r"images/s in [\d.]+ s after [\d.]+ s of start-up and [\d.]+ s of submission\n", out)


def test_a_model_that_workers_do_not_reach_is_one_line_and_exit_code_2(tmp_path, run_job):
    """Where all images are detected again, the launcher does not look for it, since the machine there may not reach it."""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", tmp_path / "none"]
    code, out, err = run_job(*arguments, "--again", *TWO_PROCESSES)
    said = [line for line in without_progress(err).splitlines() if line.startswith("error: ")]
    assert (code, out, len(said)) == (2, "", 1), err
    assert re.fullmatch(rf"error: model {tmp_path}/none: .* \(the worker on \S+\)", said[0])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.matrix
@needs_prism
def test_workers_of_a_job_server_tell_the_same(tmp_path, bright_model):
    """Prism as any job server, with a worker that it starts as TaskManagers start theirs."""
    from apache_beam.options.pipeline_options import PipelineOptions

    write_images(tmp_path / "in", *(f"{number}.png" for number in range(20)))
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model]
    with running_prism(PipelineOptions([])) as endpoint:
        flags = ["--runner=PortableRunner", f"--job_endpoint={endpoint}", *worker_flags()]
        code, out, err = launch(*arguments, *flags)
    assert code == 0, err
    assert "launcher loaded TensorFlow: False" in out
    assert re.search(r"waiting for workers\n(.*\n)* *\d+ s  1 worker is loading the model", err)
    assert len(rows_of(tmp_path / "out")) == 20
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["submission_seconds"] > 0
