"""The story of runs that add up, as `make demo-backfill` tells it: a kill, a stream, an overwritten image, a backfill."""

import collections
import os
import re

from tests import demo_backfill
from tests.forked_jobs import ForkedJob
from tests.shard_rows import rows_in


def test_every_image_version_has_one_row_at_the_end(pubsub_emulator, tmp_path, capfd):
    """Of the overwritten image both versions."""
    photos, out = tmp_path / "photos", tmp_path / "results"
    photos.mkdir()
    first = demo_backfill._add(photos, range(200))
    before = (str(first[0]), _generation(first[0]))

    def start(arguments, **environment):
        module, *argv = arguments
        return ForkedJob(argv, tmp_path / "log", module=module, environment=environment)

    demo_backfill._tell(pubsub_emulator, photos, out, 200, start)
    (killed,) = re.findall(r"\(killed; (\d+) images are done\)", capfd.readouterr().out)
    assert 200 // 3 <= int(killed) < 200
    images = [row["image"] for row in rows_in(str(out))]
    rows = collections.Counter((image["uri"], image["generation"]) for image in images)
    assert rows == collections.Counter([before, *((str(path), _generation(path)) for path in photos.iterdir())])


def _generation(path: os.PathLike[str]) -> str:
    """As a row names the version of a local file: size and time of change."""
    stat = os.stat(path)
    return f"{stat.st_size}-{stat.st_mtime_ns}"
