"""The power goes at any moment of a batch job: what was readable is there, and what has its name is whole."""

import errno
import os
import re
import stat

import pytest

from pipeline.results.reader import ResultsFolder
from pipeline.results.rows import json_rows
from pipeline.storage.files import move_files, sync, write_file
from tests.conftest import write_bright_image
from tests.recorded_disk import folders_left, recorded
from tests.shard_rows import rows_in

IMAGES = 3


def test_a_batch_job_adds_whole_shards_and_loses_no_earlier_row(tmp_path, bright_model, run_job):
    """Each shard that has its name is whole, and a job that ended has all of its rows."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for n in range(IMAGES):
        write_bright_image(tmp_path / "in" / f"{n}.png", (64, 48), (10, 10 + n, 30, 30))
    arguments = ["--input", tmp_path / "in", "--output", disk / "out", "--model", bright_model]
    arguments += ["--shard-seconds", 0, "--batch-sizes", 1]
    assert run_job(*arguments)[0] == 0
    earlier = rows_in(f"{disk}/out")
    code, cuts = recorded(disk, "pipeline.run", *arguments, "--again", "--samples", 1)
    assert code == 0
    for cut, folder, what in folders_left(cuts, tmp_path):
        rows, results = [], ResultsFolder(f"{folder}/out")
        for shard, batch in results.batches():
            rows += json_rows(batch, shard.kind)
        assert not results.damaged, what
        assert all(rows.count(row) >= 1 for row in earlier), what
        assert len(rows) == 2 * IMAGES or cut is not cuts[-1], what


@pytest.fixture
def refusing(monkeypatch):
    """A disk that answers to `fsync` of files, or of folders, with an error."""
    fsync = os.fsync

    def begin(kind, code):
        def fails(fd):
            if kind(os.fstat(fd).st_mode):
                raise OSError(code, os.strerror(code))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", fails)

    return begin


@pytest.mark.parametrize("kind", [stat.S_ISREG, stat.S_ISDIR], ids=["file", "folder"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_what_the_disk_could_not_take_is_an_error(tmp_path, refusing, kind, code):
    write_file(f"{tmp_path}/a", b"old")
    write_file(f"{tmp_path}/b", b"new")
    refusing(kind, code)
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    for change, given in ((write_file, (a, b"new")), (move_files, ({b: a},)), (sync, ([a, str(tmp_path)],))):
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            change(*given)
        assert kind is stat.S_ISDIR or (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_disk_that_syncs_no_folders_is_used_as_it_is(tmp_path, refusing, code):
    refusing(stat.S_ISDIR, code)
    write_file(f"{tmp_path}/new/b", b"new")
    move_files({f"{tmp_path}/new/b": f"{tmp_path}/deep/er/a"})
    assert (tmp_path / "deep/er/a").read_bytes() == b"new"
