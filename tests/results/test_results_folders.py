"""Any results folder agrees with an oracle: no row that counts is lost, hidden or doubled, whatever is damaged or planted."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.errors import UnreadableError
from pipeline.records import DeadLetter, DetectedImage, ImageRef
from pipeline.results import reader, row_rule
from pipeline.results.check import check
from pipeline.results.compact import compact
from pipeline.results.completion import RowVersion, row_keys
from pipeline.results.current import current_batches
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import ResultsFolder, done_keys
from pipeline.results.rows import FORMATS, dead_letters_table, detections_table
from pipeline.results.shards import write_shard
from pipeline.results.wanted import ALL, Wanted
from tests.results.rows_oracle import Row, by_key, current, stored
from tests.shard_rows import detected as detected_image

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2000")) if os.environ.get("FUZZ") == "1" else 50
KINDS = (DETECTIONS, DEAD_LETTERS)
MERGED = {b"sources": b"[]", b"level": b"+", b"rule": b"1"}

made = st.tuples(*(st.sampled_from(choices) for choices in ("ab", ["1", "2", ""], "mn", "12", "st")), st.booleans())
files = st.tuples(
    st.lists(made, max_size=3),
    st.lists(st.integers(0, 30), max_size=2),
    st.sampled_from(["whole"] * 5 + ["cut off", "values", "key"]),
)
plants = st.lists(st.sampled_from(["merged", "fewer", "garbage", "folder", "link", "newer rule", "mark"]), max_size=3)


class Killed(BaseException):
    pass


def version_of(row):
    return RowVersion(row.model, row.version, row.settings, f"{row.settings} with limits")


def table_of(row):
    """The row as a table; its number is its time, and the width of its image or its message."""
    ref, version = ImageRef(row.uri, row.generation), version_of(row)
    if not row.detected:
        return dead_letters_table([DeadLetter(ref, "decode", "corrupt", str(row.number))], version, "run", float(row.number))
    found = detected_image(row.uri).detections
    image = DetectedImage(ref, row.number, 480, row.model, row.version, found)
    return detections_table([image], version, "run", float(row.number))


def damaged(path, how):
    """Damages a shard: its end, or the last byte of the values of a column."""
    content = bytearray(Path(path).read_bytes())
    if how == "cut off":
        del content[-20:]
    else:
        names = ("key",) if how == "key" else ("confidence", "message")
        facts = pq.read_metadata(path).row_group(0)
        columns = [facts.column(place) for place in range(facts.num_columns)]
        chunk = next(column for column in columns if column.path_in_schema.rpartition(".")[2] in names)
        content[min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))) + chunk.total_compressed_size - 1] ^= (
            0xFF
        )
    Path(path).write_bytes(bytes(content))


def laid(output, described, planted):
    """Writes a folder; returns the rows of its whole shards, and the paths of damaged ones."""
    rows, every, broken = [], [], set()
    for new, copies, health in described:
        added = [Row(len(every) + place, *one[:1], one[1] or "1" * one[5], *one[2:]) for place, one in enumerate(new, 1)]
        every += added
        added += [every[place % len(every)] for place in copies if every]  # as a bundle that was tried again
        for kind in KINDS:
            of_kind = [row for row in added if row.detected == (kind == DETECTIONS)]
            if not of_kind:
                continue
            path = write_shard(output, kind, pa.concat_tables(map(table_of, of_kind)).sort_by("uri"), "run")
            if health == "whole":
                rows += of_kind
            else:
                damaged(path, health)
                broken.add(path)
    for number, what in enumerate(planted):
        plant(output, what, number, rows)
    return rows, broken


def plant(output, what, number, rows):
    """Puts something into a folder that is no row of a job."""
    os.makedirs(folder := f"{output}/{DETECTIONS}", exist_ok=True)
    name = f"{folder}/20261121T020000Z-compact-{number:032x}.parquet"
    names = [path.name for path in Path(folder).glob("*.parquet")]
    copied = [table_of(row) for row in rows if row.detected][:1] if what == "fewer" else []
    table = pa.concat_tables([FORMATS[DETECTIONS].schema.empty_table(), *copied])
    if what in ("merged", "fewer"):
        pq.write_table(table.replace_schema_metadata({**MERGED, b"sources": json.dumps(names).encode()}), name)
    elif what == "newer rule":
        pq.write_table(table.replace_schema_metadata({**MERGED, b"rule": b"999"}), name)
    elif what == "folder":
        os.mkdir(name)
    elif what == "link":
        os.symlink(names[0] if names else "nothing", name)
    elif what == "mark":
        Path(folder, f".damaged-{names[0].removesuffix('.parquet') if names else 'x'}").write_bytes(b"")
    else:
        Path(folder, "notes.parquet").write_bytes(b"PAR1")


def numbers(batches, kind):
    """The numbers of rows; a damaged shard is an error once all others are read."""
    found = []
    with contextlib.suppress(UnreadableError):
        for _, batch in batches:
            found += batch["width"].to_pylist() if kind == DETECTIONS else map(int, batch["message"].to_pylist())
    assert len(found) == len(set(found)), "doubled"
    return set(found)


def read(output, wanted=ALL):
    """The numbers of the rows that count."""
    return set().union(*(numbers(current_batches(output, wanted, (kind,)), kind) for kind in KINDS))


def numbered(rows):
    return {row.number for row in rows}


def agrees(output, rows):
    """Whether a folder has the rows of the oracle, for each way to choose."""
    assert read(output) == numbered(current(rows))
    assert read(output, Wanted(version="2")) == numbered(current(row for row in rows if row.version == "2"))
    assert read(output, Wanted(settings="s", model="m")) == numbered(
        current(row for row in rows if row.settings == "s" and row.model == "m")
    )
    of_key = by_key(rows)
    # a dead letter without a generation may go once its image is detected
    assert numbered(row for row in of_key if row.generation) <= read(output, Wanted(every=True)) <= numbered(of_key)
    for version in {version_of(row) for row in rows}:
        for kind in KINDS:
            done = [row for row in of_key if version_of(row) == version and row.detected == (kind == DETECTIONS)]
            every = {row for row in rows if version_of(row) == version and row.detected == (kind == DETECTIONS)}
            keys = {*done_keys(output, version, kind).tolist()}
            assert {*row_keys(row.key for row in done if row.generation).tolist()} <= keys
            assert keys <= {*row_keys(row.key for row in every).tolist()}


def unreadable_now(output, patch, place):
    """Nothing that reads takes a shard that cannot be opened now for an absent one, and nothing is changed."""
    shards, before = reader.list_shards(output), sorted(Path(output).rglob("*"))
    if not shards:
        return
    victim, opened = os.fsencode(shards[place % len(shards)].path), pa.OSFile

    def failing(path):
        if path == victim:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path)

    with patch.context() as now:
        now.setattr(reader.pa, "OSFile", failing)
        for work in (lambda: [*current_batches(output)], lambda: compact(output), lambda: check(output)):
            with pytest.raises(UnreadableError, match="cannot be read now"):
                work()
    assert sorted(Path(output).rglob("*")) == before


def killed_compaction(output, patch, steps):
    """A compaction that ends before one of its changes of the disk."""
    left = steps

    def counting(change):
        def changed(*args, **how):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return change(*args, **how)

        return changed

    with patch.context() as now, contextlib.suppress(Killed):
        for name in ("replace", "remove"):
            now.setattr(os, name, counting(getattr(os, name)))
        compact(output)


LETTER, FOUND = ("a", "", "m", "2", "s", False), ("a", "1", "m", "1", "s", True)


@pytest.mark.slow
@example([([LETTER], [], "whole")], ["merged"], 1, 0)  # no detection at all
@example([([LETTER, FOUND], [], "whole")], [], 1, 0)  # of another version, whose letter still counts for its own
@example([([LETTER, (*FOUND[:3], "2", "t", True)], [], "whole")], [], 1, 0)  # of other settings
@example([([FOUND, (*FOUND[:4], "t", True), (*FOUND[:5], False)], [], "whole")], [], 1, 0)  # tried again after other settings
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(files, max_size=5), plants, st.integers(1, 12), st.integers(0, 9))
def test_a_folder_has_the_rows_of_the_oracle_whatever_happened_to_it(described, planted, steps, place):
    output = f"{tempfile.mkdtemp()}/out"
    try:
        with pytest.MonkeyPatch.context() as patch:
            os.makedirs(output)
            patch.setattr(row_rule, "_HELD_ROWS", place)  # further ones are on the disk
            rows, broken = laid(output, described, planted)
            unreadable_now(output, patch, place)
            assert {*check(output).damaged} == broken
            agrees(output, rows)
            killed_compaction(output, patch, steps)
            agrees(output, rows)
            compact(output)
            agrees(output, rows)
            whole = [shard for shard in ResultsFolder(output).shards if shard.path not in broken]
            of_newer_rule = planted.count("newer rule")
            assert sum(pq.read_metadata(shard.path).num_rows for shard in whole) <= len(stored(rows)) + of_newer_rule
            compact(output, keep_latest=True)
            assert read(output) == numbered(current(rows))
            assert all(os.path.exists(path) for path in broken)
    finally:
        shutil.rmtree(os.path.dirname(output))
