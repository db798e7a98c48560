"""A job on a disk that is really full: a tmpfs of one megabyte, which only its process sees."""

import contextlib
import ctypes
import json
import os
from pathlib import Path

import pytest

from pipeline import run
from tests.forked_jobs import run_forked
from tests.launch.jobs import rows_by_name, write_images

NAMES = [f"{number}.png" for number in range(12)]
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # of <linux/sched.h>
MAY_NOT_MOUNT = 77


def main(argv: list[str]) -> int:
    """Runs a job without room at all, with room for some of its files, and with room; prints exit codes and rows."""
    disk, *arguments = argv
    libc, users = ctypes.CDLL(None), {"uid_map": f"0 {os.getuid()} 1", "setgroups": "deny", "gid_map": f"0 {os.getgid()} 1"}
    if libc.unshare(NEW_MOUNTS | NEW_USER):
        return MAY_NOT_MOUNT
    for name, content in users.items():
        Path("/proc/self", name).write_text(content)
    if libc.mount(b"none", disk.encode(), b"tmpfs", 0, b"size=1m"):
        return MAY_NOT_MOUNT
    (out := Path(disk, "out")).mkdir()
    for kilobytes in (2000, 984, 0):
        with contextlib.suppress(OSError):
            Path(disk, "ballast").write_bytes(bytes(kilobytes << 10))
        code = run.main([*arguments, "--output", str(out)])
        print(json.dumps([code, rows_by_name(out)]), flush=True)
    return 0


def test_a_full_disk_is_one_line_and_the_same_command_goes_on_once_there_is_room(tmp_path, bright_model):
    """Each row is whole, also where the disk was full in the midst of a file."""
    write_images(tmp_path / "in", *NAMES)
    (tmp_path / "disk").mkdir()
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    arguments = [tmp_path / "disk", "--input", tmp_path / "in", "--model", bright_model]
    ended = run_forked(arguments, printed, module=__name__, errors=errors)
    if ended == MAY_NOT_MOUNT:
        pytest.skip("this user may not mount a disk of its own")
    assert ended == 0, errors.read_text()
    (full, _), (filled, rows), complete = (json.loads(line) for line in printed.read_text().splitlines() if line[0] == "[")
    assert (full, filled, complete) == (1, 1, [0, sorted(NAMES)]) and {*rows} <= {*NAMES}
    lines = [line for line in errors.read_text().splitlines() if line.startswith("error: ")]
    what = "No space left on device; free some space, then run the same command again"
    assert len(lines) == 2 and all(what in line and str(tmp_path / "disk" / "out") in line for line in lines), lines
    assert not any("while running" in line for line in lines)
