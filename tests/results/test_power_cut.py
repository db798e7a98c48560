"""The power goes at any moment of a batch job or a stream: what was readable or acknowledged is there."""

import errno
import json
import os
import re
import shutil
import stat

import pytest
from pipeline.results.other_runs import finish_dead
from pipeline.results.resume_points import rows_in

from pipeline.storage.files import delete_if_generation_match, generations_of, move_files, sync, write_file
from pipeline.stream.archive import Archive
from tests.archived_bundles import BUNDLES
from tests.clock import Clock
from tests.conftest import write_bright_image
from tests.recorded_disk import laid_out, recorded
from tests.rows_of_files import lines_in, uris_in

LATER = 1795230000.0
IMAGES = 5


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def folders_after(cuts, tmp_path):
    """Each moment, and a folder with each tree that a power cut then leaves; a tree that was there before is left out."""
    seen = []
    for number, cut in enumerate(cuts):
        for kind, tree in zip(("lost", "kept", "removed"), cut.left, strict=True):
            if tree not in seen or cut is cuts[-1]:
                seen.append(tree)
                folder = laid_out(tree, tmp_path / f"{number}-{kind}")
                yield cut, folder, f"{kind} before {cut.before}: {sorted(tree)}"
                shutil.rmtree(folder)


def test_what_a_stream_has_acknowledged_is_in_its_archive(disk, tmp_path):
    (disk / "acknowledged").mkdir()
    code, cuts = recorded(disk, "tests.archived_bundles", f"{disk}/archive", f"{disk}/acknowledged")
    assert code == 0
    for cut, folder, what in folders_after(cuts, tmp_path):
        acknowledged = [rows for number, rows in enumerate(BUNDLES) if f"acknowledged/{number}" in cut.live]
        archive = Archive(f"{folder}/archive", "next", window_s=60.0, clock=Clock(LATER))
        archive.recover()
        archive.finish()
        assert uris_in(f"{folder}/archive") >= {row.row["image"]["uri"] for rows in acknowledged for row in rows}, what
    assert "acknowledged/3" in cuts[-1].live


def test_a_batch_job_has_all_earlier_results_or_all_new_ones_and_its_resume_points(disk, tmp_path, bright_model, run_job):
    (tmp_path / "in").mkdir()
    for n in range(IMAGES):
        write_bright_image(tmp_path / "in" / f"{n}.png", (64, 48), (10, 10 + n, 30, 30))
    shutil.copytree(f"{bright_model}/3", tmp_path / "stretch" / "4")
    arguments = ["--input", tmp_path / "in", "--output", disk / "out", "--resume-point-s", 0, "--batch-sizes", 1]
    assert run_job(*arguments, "--model", bright_model)[0] == 0
    code, cuts = recorded(
        disk, "pipeline.run", *arguments, "--model", tmp_path / "stretch", "--replace", "--parquet", "--samples", 2
    )
    assert code == 0
    points = set()
    for cut, folder, what in folders_after(cuts, tmp_path):
        out = f"{folder}/out"
        if is_merging(cut.live):
            points.update(rows_in(str(path)) for path in folder.glob("out/.staging-*"))
        finish_dead(out)
        versions = sorted(json.loads(line)["model"]["version"] for line in lines_in(out))
        assert versions in ([["4"] * IMAGES] if cut is cuts[-1] else [["3"] * IMAGES, ["4"] * IMAGES]), what
    assert points == {IMAGES}


def is_merging(live):
    """Whether all is spilled and nothing committed."""
    in_staging = [path for path in live if path.startswith("out/.staging-")]
    states = [json.loads(live[path].content)["state"] for path in in_staging if path.endswith("/run.json")]
    return any("/detections/" in path for path in in_staging) and states == ["running"]


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
    for fails in (
        lambda: write_file(f"{tmp_path}/a", b"new"),
        lambda: move_files({f"{tmp_path}/b": f"{tmp_path}/a"}),
        lambda: (
            delete_if_generation_match(generations_of([f"{tmp_path}/a"])) if kind is stat.S_ISDIR else sync([f"{tmp_path}/a"])
        ),
    ):
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            fails()
        assert kind is stat.S_ISDIR or (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_disk_that_syncs_no_folders_is_used_as_it_is(tmp_path, refusing, code):
    refusing(stat.S_ISDIR, code)
    write_file(f"{tmp_path}/new/b", b"new")
    move_files({f"{tmp_path}/new/b": f"{tmp_path}/deep/er/a"})
    assert (tmp_path / "deep/er/a").read_bytes() == b"new"
