"""Jobs with tiles: batch and stream give the same rows, which are others than those without tiles."""

import signal

import numpy as np
import pytest

from tests.conftest import write_bright_image
from tests.launch.jobs import rows_of
from tests.processes import wait_until
from tests.streaming_job import StreamingJob

TILES = ("--tiles", "128", "--tile-overlap", "0.25")


@pytest.mark.slow
def test_batch_and_stream_give_equal_rows_and_tiles_are_part_of_what_is_done(pubsub_emulator, tmp_path, bright_model, run_job):
    """One row an image; the same command does nothing, and one without tiles, or with others, detects again."""
    photos, out = tmp_path / "in", tmp_path / "out"
    for n in range(4):
        write_bright_image(photos / f"{n}.png", (500, 300), (20 + 90 * n, 30, 50 + 90 * n, 70))
    (photos / "broken.png").write_bytes(b"no image")
    batch = ["--input", photos, "--output", out, "--model", bright_model]
    assert run_job(*batch, *TILES)[0] == 0
    rows, dead = rows_of(out), rows_of(out, "dead_letters")
    assert (len(rows), len(dead)) == (4, 1)
    (found,) = rows[0]["detections"]
    assert np.abs(np.subtract(found["box_xyxy"], [20, 30, 50, 70])).max() < 1

    with StreamingJob(
        pubsub_emulator, tmp_path, bright_model, *TILES, "--allow-uri-prefix", photos, "--shard-seconds", "1"
    ) as job:
        job.publish(*(row["image"]["uri"].encode() for row in (*rows, *dead)))
        wait_until(lambda: (len(rows_of(job.archive)), len(rows_of(job.archive, "dead_letters"))) == (4, 1), job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    assert [row["detections"] for row in rows_of(job.archive)] == [row["detections"] for row in rows]

    assert "nothing is new" in run_job(*batch, *TILES)[1]
    for more in ([], ["--tiles", "64"], [*TILES, "--tile-whole"]):
        assert " 4 detected" in run_job(*batch, *more)[1]
