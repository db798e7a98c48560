"""What a job costs: the arithmetic by hand, and each constant against a small real run."""

import json
import re
import subprocess
import sys

import pytest

from pipeline.commands import cost
from pipeline.commands.cost import Measured, Usage, Work, estimate
from pipeline.config import WriteConfig
from tests.conftest import REPO

_OF_ROWS = ("row_bytes", "object_bytes", "attribute_bytes", "shard_row_bytes", "shard_object_bytes")
SIMPLE = Measured(
    cpu_ms=50.0,
    row_bytes=100.0,
    object_bytes=50.0,
    shard_row_bytes=20.0,
    shard_object_bytes=10.0,
    attribute_bytes=200.0,
    class_a_a_shard=2.0,
)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        pytest.param(Work(0, startup_minutes=0), Usage(0, 0, 0, 0, 0, 0, 0), id="nothing"),
        pytest.param(
            Work(3_600_000, objects=4, image_kb=100, machines=10, images_per_second=100, startup_minutes=6, bundle_images=1000),
            # 10 machine-hours of work, and a tenth of an hour of each machine's start; 3,600 pages; a shard of each bundle, and
            # one for every 30 s of a machine
            Usage(
                hours=1.1,
                machine_hours=11.0,
                class_a=3600 + (3600 + 1200) * 2,
                class_b=3_600_000,
                read_gb=360.0,
                results_gb=3.6e6 * 60 / 1e9,
                pubsub_gb=0,
            ),
            id="batch",
        ),
        pytest.param(
            Work(160 * 3600, machines=1, cores=8, objects=0, startup_minutes=0),
            # eight cores at 50 ms an image are 160 images/s; 576 pages
            Usage(1.0, 1.0, 576 + (576 + 120) * 2, 576_000, 115.2, 0.01152, 0),
            id="rate of the cores",
        ),
        pytest.param(
            Work(100, objects=0, image_kb=0, images_per_second=0.01, startup_minutes=0, bundle_images=1),
            Usage(2.7778, 2.7778, 0.1 + 100 * 2, 100, 0, 2e-6, 0),
            id="no shard without a row",
        ),
        pytest.param(
            Work(1_000_000, "streaming", objects=0, image_kb=1, machines=2, images_per_second=1e9, hours=24, startup_minutes=0),
            # messages of 1,500 and 300 bytes, the latter billed as 1,000; each published and delivered
            Usage(24.0, 48.0, 8640 * 2, 2_000_000, 1.0, 0.02, 5.0),
            id="streaming",
        ),
    ],
)
def test_a_job_takes_what_it_takes_by_hand(work, expected):
    for name, value in vars(estimate(work, SIMPLE)).items():
        assert value == pytest.approx(getattr(expected, name), rel=1e-3), name


def test_the_document_shows_what_the_command_prints(capsys):
    document = (REPO / "docs" / "COST.md").read_text()
    assert (Work(1).shard_seconds, Work(1).window_s) == (WriteConfig().shard_seconds, WriteConfig().window_s)
    assert cost.main([]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if f"    {line}\n" not in document] == []
    named = ("cpu_ms", *_OF_ROWS, "class_b_an_image", "class_a_a_shard")
    numbers = [f"{getattr(Measured(), name):,.10g}" for name in named]
    assert [number for number in numbers if not re.search(rf"\| .*(?<![\d.]){number} ", document)] == []


def test_prices_stand_below_what_they_are_for_each_by_its_unit(capsys):
    usage = Usage(hours=1, machine_hours=10, class_a=20_000, class_b=5_000, read_gb=2, results_gb=3, pubsub_gb=4)
    prices = {"machine_hours": 0.5, "class_a": 0.05, "class_b": 0.004, "results_gb": 0.02}
    assert cost.costs(usage, prices) == {"machine_hours": 5.0, "class_a": 0.1, "class_b": 0.002, "results_gb": 0.06}
    assert cost.main(["--images", "3.6e6", "--images-per-second", "1000", "--startup-minutes", "0", "--machine-hour", "2"]) == 0
    head, numbers, below = capsys.readouterr().out.splitlines()
    assert (head.split()[-1], numbers.split()[-1], below.split()) == ("cost", "2", ["(2)"])


@pytest.mark.parametrize(
    "argv",
    [
        *(["--mode", "daily"], ["--machines", "0"], ["--images", "-1"]),
        *(["--images", "nan"], ["--hours", "inf"], ["--machine-hour", "-1"]),
    ],
    ids=" ".join,
)
def test_what_is_no_amount_is_one_line_and_exit_code_2(argv, capsys):
    assert cost.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.matrix
def test_each_constant_is_what_a_small_real_run_takes():
    """To within a third: names of images are longer or shorter."""
    command = [sys.executable, "-m", "tests.benchmarks.cost", "--storage", "20", "28"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    measured, of_program = json.loads(done.stdout), vars(Measured())
    names = (*_OF_ROWS, "class_b_an_image", "class_a_a_shard")
    assert {name: of_program[name] for name in names} == pytest.approx({name: measured[name] for name in names}, rel=1 / 3)
    assert measured["class_a_an_image"] == pytest.approx(0, abs=0.25), "no image is written or listed by itself"
