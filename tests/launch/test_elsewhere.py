"""Jobs whose steps work in other processes than the launcher: it loads nothing, and says what they do, as they do it."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from pipeline.results.current import current_rows
from tests.conftest import REPO, without_stamps
from tests.detect.versioned_models import save_version
from tests.launch.jobs import rows_of, rows_written, write_work
from tests.processes import running, wait_until

IMAGES, CALL_MS = 400, 50  # ten seconds of work for two processes, however fast: each second they tell how far they are
FOUR_PROCESSES = ("--direct_running_mode=multi_processing", "--direct_num_workers=4")
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


def current(output):
    return list(current_rows(str(output)))


def test_processes_detect_and_the_launcher_loads_nothing_but_says_how_far_they_are(tmp_path, out):
    """With two worker processes of the DirectRunner; progress grows towards the number of images."""
    write_work(tmp_path / "in", IMAGES, image_wh=(64, 48))
    save_version(tmp_path / "model", 7, call_ms=CALL_MS)
    arguments = [f"--input={tmp_path}/in", f"--output={out}", f"--model={tmp_path}/model"]
    command = [sys.executable, "-c", LAUNCHER, *arguments, "--batch-sizes=1", "--concurrent-batches=1", *TWO_PROCESSES]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    assert "launcher loaded TensorFlow: False" in done.stdout
    assert "waiting for workers" in done.stderr
    lines = re.findall(r"^ *\d+ s  (\d+) of (\d+) images?, ", without_stamps(done.stderr), re.MULTILINE)
    shown = [(int(count), int(total)) for count, total in lines]
    assert shown == sorted(shown) and any(0 < count < IMAGES == total for count, total in shown), done.stderr
    assert len(rows_of(out)) == IMAGES

    summary = json.loads((out / "summary.json").read_text())
    assert summary["images"] == {"read": IMAGES, "detected": IMAGES, "dead": 0, "skipped": 0}
    assert summary["submission_seconds"] > 0
    assert re.search(r"images/s in [\d.]+ s after [\d.]+ s of start-up and [\d.]+ s of submission\n", done.stdout)


@pytest.mark.matrix
def test_killed_with_one_of_its_four_processes_a_job_does_only_the_rest_by_its_command(tmp_path, out):
    """At two thirds; what it had detected was readable before."""
    write_work(tmp_path / "in", IMAGES, image_wh=(64, 48))
    save_version(tmp_path / "model", 7, call_ms=CALL_MS)
    arguments = [f"--input={tmp_path}/in", f"--output={out}", f"--model={tmp_path}/model", "--shard-seconds=0.5"]
    command = [sys.executable, "-m", "pipeline.run", *arguments, "--batch-sizes=1", "--concurrent-batches=1", *FOUR_PROCESSES]
    printed = tmp_path / "printed"
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        wait_until(lambda: rows_written(out) >= IMAGES * 2 / 3, printed.read_text, job)
        children = psutil.Process(job.pid).children(recursive=True)
        first, *others = [each for each in children if "sdk_worker_main" in " ".join(each.cmdline())]
        assert len(others) >= 3
        first.kill()
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    done = current(out)
    assert IMAGES * 2 / 3 <= len(done) < IMAGES
    again = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
    assert again.returncode == 0, again.stderr
    images = json.loads((out / "summary.json").read_text())["images"]
    assert images == {"read": IMAGES, "detected": IMAGES - len(done), "dead": 0, "skipped": len(done)}
    rows = current(out)
    assert len(rows) == IMAGES and all(row in rows for row in done)
