"""What a disk holds after a power cut: a recorder of what a command changes in a folder, and what each moment leaves.

A file's content counts up to its last `fsync`, a name once its folder was synced. What the system wrote by itself meanwhile is
not known, so each moment leaves several trees, the extremes of what file systems do:

- `lost`: nothing that was not synced is there, and what was removed is there again.
- `kept`: all names are there, and files whose content was not synced are empty, as ext4 leaves them.
- `removed`: as `lost`, but what was removed is gone.

Python says before each system call what it is about to do (`sys.addaudithook`), except for `os.fsync`, which is replaced by one
that takes notes. Hard links in a folder of the recorder keep the number of a removed file from being given to another one.

    python -m tests.recorded_disk FOLDER RECORD MODULE ARGUMENT …
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.forked_jobs import run_forked

_CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
_KINDS = _LOST, _KEPT, _REMOVED = "lost", "kept", "removed"

Tree = dict[str, bytes | None]


class Cut(NamedTuple):
    """A moment at which the power may go.

    Attributes:
      before: What would have come next.
      live: Path -> content, as it was while there was power; None: a folder.
      left: The trees that it may leave, of which some are equal.
    """

    before: str
    live: Tree
    left: list[Tree]


def recorded(folder: Path, module: str, *argv: object) -> tuple[int, list[Cut]]:
    """Runs a command in a process of its own and records what it does below a folder, which is there, and all in it durable.

    Returns its exit code, and each moment at which what a power cut leaves differs from that of the moment before.
    """
    record, log = folder.parent / f"{folder.name}.record", folder.parent / f"{folder.name}.log"
    record.mkdir()
    code = run_forked([folder, record, module, *argv], log, module="tests.recorded_disk")
    assert (record / "cuts").exists(), log.read_text()[-4000:]
    return code, pickle.loads((record / "cuts").read_bytes())


def laid_out(tree: Tree, folder: Path) -> Path:
    """Writes a tree to a folder, which is made."""
    folder.mkdir()
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
    return folder


def folders_left(cuts: Sequence[Cut], parent: Path, *, live: bool = False) -> Iterator[tuple[Cut, Path, str]]:
    """Each moment with a folder that holds a tree which a power cut leaves (`live`: or a kill), and what describes both.

    Equal trees come once, but for those of the last moment. The folder goes afterwards.
    """
    seen: list[Tree] = []
    for number, cut in enumerate(cuts):
        for kind, tree in {**({"live": cut.live} if live else {}), **dict(zip(_KINDS, cut.left, strict=True))}.items():
            if tree not in seen or cut is cuts[-1]:
                seen.append(tree)
                folder = laid_out(tree, parent / f"{number}-{kind}")
                yield cut, folder, f"{kind} before {cut.before}: {sorted(tree)}"
                shutil.rmtree(folder)


class _Recorder:
    """Notes what is durable below a folder, and the moments at which that changes."""

    def __init__(self, root: str, record: str):
        self._root, self._record = root, record
        self._removed: set[int] = set()
        self._seen: dict[int, int | None] = {}  # a folder's file descriptor
        self._lock = threading.Lock()
        self.cuts: list[Cut] = []
        self._fsync = os.fsync
        self._synced = {number: _content(path) for number, path in self._look().items()}  # as of the last time

    def happen(self, event: str, args: Sequence[Any]) -> None:
        """Called before something happens."""
        is_read = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_CREAT | os.O_TRUNC))
        if event in _CHANGES and not is_read:
            self.note(f"{event} {args[:2]}")
        if event == "os.remove":
            path, folder = args
            with contextlib.suppress(OSError):
                self._removed.add(os.stat(path, dir_fd=folder if folder >= 0 else None, follow_symlinks=False).st_ino)

    def fsync(self, fd: Any) -> None:
        """Stands in for `os.fsync`."""
        fd = fd if isinstance(fd, int) else fd.fileno()
        path, number = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino
        self.note(f"fsync {path}")
        content = _content(path)
        self._fsync(fd)
        with self._lock:
            self._synced[number] = content

    def note(self, before: str) -> None:
        """Notes a moment."""
        with self._lock:
            live = self._look()
            cut = Cut(before, self._live(live), [self._left(live, which) for which in _KINDS])
            if not self.cuts or cut[1:] != self.cuts[-1][1:]:
                self.cuts.append(cut)

    def _look(self) -> dict[int, str]:
        """All files and folders that are there, by their numbers."""
        found = {}
        for folder, _, files in os.walk(self._root):
            for path in (folder, *(f"{folder}/{name}" for name in files)):
                with contextlib.suppress(FileNotFoundError):
                    found[number := os.stat(path).st_ino] = path
                    if number not in self._seen:
                        is_folder = os.path.isdir(path)
                        self._seen[number] = (
                            os.open(path, os.O_RDONLY) if is_folder else os.link(path, f"{self._record}/{number}")
                        )
        return found

    def _live(self, live: dict[int, str]) -> Tree:
        tree: Tree = {}
        for path in sorted(live.values()):
            if path != self._root:
                with contextlib.suppress(FileNotFoundError):
                    tree[os.path.relpath(path, self._root)] = None if os.path.isdir(path) else Path(path).read_bytes()
        return tree

    def _left(self, live: dict[int, str], which: str) -> Tree:
        tree: Tree = {}
        begin = [("", os.stat(self._root).st_ino)]
        while begin:
            folder, number = begin.pop()
            names = _entries(live[number]) if which == _KEPT else self._synced.get(number, {})
            for name, inside in sorted(names.items()):
                if which == _REMOVED and inside in self._removed:
                    continue
                is_folder = self._seen.get(inside) is not None
                tree[folder + name] = None if is_folder else self._synced.get(inside, b"")
                if is_folder and (which != _KEPT or inside in live):
                    begin.append((f"{folder}{name}/", inside))
        return tree


def _content(path: str) -> Any:
    """A file's bytes, or the names in a folder with the numbers of what they name."""
    return _entries(path) if os.path.isdir(path) else Path(path).read_bytes()


def _entries(folder: str) -> dict[str, int]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


def main(argv: Sequence[str]) -> int:
    """Runs a command with a recorder."""
    root, record, module, *rest = argv
    recorder = _Recorder(os.path.realpath(root), record)
    sys.addaudithook(recorder.happen)
    os.fsync = recorder.fsync
    code: int = importlib.import_module(module).main(rest)
    recorder.note("the end")
    Path(record, "cuts").write_bytes(pickle.dumps(recorder.cuts))
    return code
