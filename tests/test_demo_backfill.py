"""The story of runs that add up, as `make demo-backfill` tells it: a kill, a stream, an overwritten image, a backfill."""

import collections
import os

from tests import demo_backfill
from tests.forked_jobs import KILLED, ForkedJob, Moment, run_forked
from tests.shard_rows import rows_in

IMAGES, DONE = 20, 6
AMID = Moment("pipeline.write.write_shards:write_shard", DONE + 1)


def test_every_image_version_has_one_row_at_the_end(pubsub_emulator, tmp_path):
    """Of the overwritten image both versions."""
    photos, out, log = tmp_path / "photos", tmp_path / "results", tmp_path / "log"
    photos.mkdir()
    first = demo_backfill._add(photos, range(IMAGES))
    before = (str(first[0]), _generation(first[0]))
    _, *job = demo_backfill._job(photos, out)
    assert run_forked([*job, "--shard-seconds", 0], log, AMID) == KILLED, log.read_text()
    assert len(rows_in(str(out))) == DONE

    def start(arguments, **environment):
        module, *argv = arguments
        return ForkedJob(argv, log, module=module, environment=environment)

    demo_backfill._go_on(pubsub_emulator, photos, out, IMAGES, start)
    images = [row["image"] for row in rows_in(str(out))]
    rows = collections.Counter((image["uri"], image["generation"]) for image in images)
    assert rows == collections.Counter([before, *((str(path), _generation(path)) for path in photos.iterdir())])


def _generation(path: os.PathLike[str]) -> str:
    """As a row names the version of a local file: size and time of change."""
    stat = os.stat(path)
    return f"{stat.st_size}-{stat.st_mtime_ns}"
