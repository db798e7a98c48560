"""Defects, each in a copy of the project, and the test that must find it: `python -m tests.mutants [NAME …]`.

Exit code 0: each test passes without the defect and fails with it; 1: one does not; 2: code that a defect changes is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.conftest import REPO

_PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly")


class Mutant(NamedTuple):
    """A defect: in this file, this text becomes that; and the test that finds it."""

    file: str
    old: str
    new: str
    test: str


MUTANTS = {
    "acknowledges before rows are durable": Mutant(
        "pipeline/stream/archive.py",
        "        self._subscriber.hold([record.ref.message_id for record in records])\n",
        "",
        "tests/stream/test_archive.py::test_a_message_is_held_until_all_of_its_rows_are_in_shards_of_their_window",
    ),
    "renames before it syncs": Mutant(
        "pipeline/storage/files.py",
        "    sync(others)\n    for path in others:\n        os.replace(path, names[path])\n",
        "    for path in others:\n        os.replace(path, names[path])\n    sync(names[path] for path in others)\n",
        "tests/results/test_power_cut.py",
    ),
    "drops dead letters": Mutant(
        "pipeline/outcome/write_shards.py",
        "rows_by_kind(self._records, ",
        "rows_by_kind([one for one in self._records if isinstance(one, DetectedImage)], ",
        "tests/outcome/test_write_shards.py::test_results_become_rows_and_statistics",
    ),
    "letterboxes with the padding on one side": Mutant(
        "models/geometry.py",
        'offset_x=0 if letterbox_rule == "yolox" else (input_w - resized_w) // 2,',
        "offset_x=0,",
        "tests/models/test_geometry.py::test_letterbox_follows_darknet_to_the_pixel",
    ),
    "leaves the settings out of the key": Mutant(
        "pipeline/results/completion.py",
        '"\\0".join(parts)',
        '"\\0".join(parts[:-1])',
        "tests/launch/test_only_new.py::test_other_settings_are_other_rows_and_again_adds_rows",
    ),
    "compacts by deleting first": Mutant(
        "pipeline/results/compact.py",
        "        taken.append(part)\n",
        "        taken.append(part)\n        delete_files([part.shard.path])\n",
        "tests/commands/test_compact.py::test_killed_or_cut_off_from_power_at_any_moment_no_reader_loses_a_row_and_the_next_one_finishes",
    ),
    "ends a job for one damaged shard": Mutant(
        "pipeline/results/reader.py",
        "            raise DamagedError(one_line(err)) from err\n",
        "            pass\n",
        "tests/results/test_shards.py::test_a_damaged_shard_costs_a_line_and_not_the_job",
    ),
    "leaves out shards that a compaction has merged meanwhile": Mutant(
        "pipeline/results/reader.py",
        "            elif begin_anew:\n                raise found\n",
        "",
        "tests/results/test_reader.py::test_a_reader_begins_anew_where_a_compaction_deletes_what_it_has_listed",
    ),
    "takes what cannot be read now for damage": Mutant(
        "pipeline/results/reader.py",
        "if (type(err) is OSError and err.errno is None) or (isinstance(err, _DAMAGE) and not isinstance(err, OSError)):",
        "if isinstance(err, (OSError, *_DAMAGE)):",
        "tests/results/test_results_folders.py::test_a_folder_has_the_rows_of_the_oracle_whatever_happened_to_it",
    ),
    "deletes what it has merged without a look at the merged file": Mutant(
        "pipeline/results/compact.py",
        "    if not (read and all(map(np.array_equal, read[0], wanted))):\n",
        "    if not read:\n",
        "tests/results/test_reader.py::test_what_a_disk_does_not_give_back_as_it_was_written_replaces_nothing",
    ),
    "lets each process of a host take all of it": Mutant(
        "pipeline/limits.py",
        "return whole // self.of + (self.number < whole % self.of)",
        "return whole",
        "tests/test_limits.py::test_the_processes_of_a_launcher_divide_the_cores_of_their_host",
    ),
    "prefers the newest row to a detection": Mutant(
        "pipeline/results/row_rule.py",
        "np.lexsort((made_at, detected, is_chosen, groups))",
        "np.lexsort((detected, made_at, is_chosen, groups))",
        "tests/results/test_reader.py::test_the_current_row_of_an_image_and_a_model",
    ),
    "blames an image for what the device does": Mutant(
        "pipeline/detect/batcher.py",
        "            self._check_device(size)\n",
        "",
        "tests/detect/test_batcher.py::test_an_error_that_no_image_is_to_blame_for_is_for_those_who_wait_and_later_images_are_found",
    ),
    "gives up on a device that failed": Mutant(
        "pipeline/errors.py",
        'a new process may get it to work", retry=True',
        'a new process may get it to work", retry=False',
        "tests/deploy/test_exit_codes.py",
    ),
    "lets identities cross an edge as text": Mutant(
        "pipeline/stream/deduplicate.py",
        "with_output_types(tuple[bytes, Image])",
        "with_output_types(tuple[str, Image])",
        "tests/test_streaming_graph.py::test_no_text_crosses_an_edge_as_text",
    ),
    "forgets who asked for an image whose generation it did not know": Mutant(
        "pipeline/stream/dedup_cache.py",
        "identity = own if own in identities else identities[0]",
        "identity = own",
        "tests/stream/test_dedup_cache.py",
    ),
    "takes images for one whose names are no Unicode": Mutant(
        "pipeline/stream/deduplicate.py",
        "yield name_bytes(ref_of(image).identity), image",
        'yield ref_of(image).identity.encode("utf-8", "replace"), image',
        "tests/stream/test_deduplicate.py::test_each_image_passes_once_and_the_others_are_counted",
    ),
    "accepts new versions without checks": Mutant(
        "pipeline/detect/model_watcher.py",
        " or self._detector.check(loaded)",
        "",
        "tests/detect/test_golden.py::test_a_version_is_refused_while_its_golden_images_lack_their_rows_and_where_it_does_not_agree",
    ),
    "masks nothing": Mutant(
        "pipeline/secrets.py",
        "    text = with_public_addresses(text)\n    for found in (_PAIR, _HEADER, _COOKIE):\n",
        "    for found in ():\n",
        "tests/test_secrets.py::test_nothing_that_leaves_a_job_has_a_secret",
    ),
    "counts skipped images among those that were tried": Mutant(
        "pipeline/outcome/conclude.py",
        "for failed, of_images in stats.dead_shares[: 1 if is_replay else 2]:",
        "for failed, of_images in stats.dead_shares[1:]:",
        "tests/launch/test_batch_job.py::test_too_many_dead_letters_are_a_failure_whose_rows_and_reports_are_there",
    ),
    "counts an object once for each tile that shows it": Mutant(
        "pipeline/detect/merge_tiles.py",
        "kept = order[stays[order]][: detect.max_detections]",
        "kept = order[: detect.max_detections]",
        "tests/detect/test_tiles.py::test_boxes_are_those_of_other_tools",
    ),
    "writes tiles where the model reads others": Mutant(
        "pipeline/feed/process.py",
        "                self._used.get()\n",
        "                pass\n",
        "tests/feed/test_tiles.py::test_portions_wait_for_room_and_take_the_memory_of_two",
    ),
    "swallows the crash of a process that decodes": Mutant(
        "pipeline/feed/chunks.py",
        "        self.chunk.failures[self.singles.popleft()] = failure\n",
        "        self.singles.popleft()\n",
        "tests/feed/test_feeder.py::TestDeath::test_a_crash_costs_exactly_the_image_at_fault",
    ),
}


def main(names: Sequence[str]) -> int:
    """Runs the mutants of these names, or all."""
    chosen = {name: mutant for name, mutant in MUTANTS.items() if not names or name in names}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_project(copy)
        (copy / ".tools").symlink_to(REPO / ".tools")
        gone = [name for name, mutant in chosen.items() if (copy / mutant.file).read_text().count(mutant.old) != 1]
        if gone:
            print(*(f"{MUTANTS[name].file} has changed: write this defect anew: {name}" for name in gone), sep="\n")
            return 2
        if code := _run(copy, *(mutant.test for mutant in chosen.values())):
            print(f"the tests do not pass without a defect: exit code {code}")
            return 1
        return max(_survives(copy, name, mutant) for name, mutant in chosen.items())


def files_of_project(*folders: str) -> list[str]:
    """What the repository holds, and what is about to be added to it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (REPO / name).is_file()]


def copy_project(copy: Path) -> None:
    """Copies these files into a folder."""
    for name in files_of_project():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, copy / name)


def _survives(copy: Path, name: str, mutant: Mutant) -> bool:
    file = copy / mutant.file
    whole = file.read_text()
    file.write_text(whole.replace(mutant.old, mutant.new))
    caught = _run(copy, mutant.test) == 1  # others: it could not run
    file.write_text(whole)
    print(f"{'found' if caught else 'NOT FOUND'}: {name} ({mutant.test})", flush=True)
    return not caught


def _run(copy: Path, *tests: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run([*_PYTEST, *tests], cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
