"""Notes of what containers hold: a compaction merges them, and each container stays known."""

import numpy as np

from pipeline.results.compact import compact
from pipeline.results.contents import Contents, known_containers, write_contents


def test_a_compaction_merges_the_notes_of_containers_and_keeps_what_they_say(tmp_path):
    (tmp_path / "detections").mkdir()
    for key in range(5):
        images = np.arange(key, key + 3, dtype="<u8").tobytes()
        write_contents(str(tmp_path), f"run{key}", [Contents(key, f"{key}.tar", images, {".txt": key})])
    write_contents(str(tmp_path), "again", [Contents(4, "4.tar", np.array([9], "<u8").tobytes())])  # the same generation
    damaged = next((tmp_path / "containers").glob("*run0*"))
    damaged.write_bytes(b"no notes")
    (tmp_path / "containers" / "mine.txt").write_text("a file of a user")
    done = {1: np.arange(20, dtype=np.uint64), 2: np.zeros(0, np.uint64)}
    before = known_containers(str(tmp_path), done)
    compact(str(tmp_path))
    files = sorted((tmp_path / "containers").iterdir())
    assert len(files) == 3 and {damaged, tmp_path / "containers" / "mine.txt"} < {*files}
    assert known_containers(str(tmp_path), done) == before and {*before} == {1, 2, 3, 4}
    compact(str(tmp_path))
    assert sorted((tmp_path / "containers").iterdir()) == files, "one file is not written anew"


def test_notes_with_a_part_of_a_key_are_ignored(tmp_path):
    """Whoever can write to the results folder may leave anything there; it ended each job that opens a container."""
    write_contents(str(tmp_path), "run", [Contents(1, "1.tar", bytes(8))])
    (whole,) = (tmp_path / "containers").iterdir()
    part = whole.read_bytes().replace(b"\xc4\x08" + bytes(8), b"\xc4\x07" + bytes(7))  # of MessagePack
    assert len(part) == len(whole.read_bytes()) - 1
    whole.with_name(whole.name.replace("run", "part")).write_bytes(part)
    assert {*known_containers(str(tmp_path), {1: np.zeros(1, np.uint64)})} == {1}
    whole.unlink()
    assert known_containers(str(tmp_path), {1: np.zeros(1, np.uint64)}) == {}


def test_merged_notes_are_of_a_bounded_size(tmp_path, monkeypatch):
    from pipeline.results import contents

    (tmp_path / "detections").mkdir()
    monkeypatch.setattr(contents, "_MERGED_BYTES", 10_000)
    for key in range(8):
        write_contents(str(tmp_path), "run", [Contents(key, f"{key}.tar", bytes(3000))])
    write_contents(str(tmp_path), "large", [Contents(8, "8.tar", bytes(8000))])
    compact(str(tmp_path))
    sizes = sorted(path.stat().st_size for path in (tmp_path / "containers").iterdir())
    assert len(sizes) == 4 and sizes[-1] < 10_000 and sum(sizes) > 8 * 3000 + 8000
    assert len(known_containers(str(tmp_path), {1: np.zeros(1, np.uint64)})) == 9
