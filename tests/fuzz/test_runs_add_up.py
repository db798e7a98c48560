"""Runs of any kind, in any order, killed at any moment: in the end each image generation has one row or one dead letter."""

import collections
import itertools
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.conftest import write_bright_image
from tests.forked_jobs import KILLED, ForkedJob, Moment, run_forked
from tests.processes import wait_until
from tests.shard_rows import rows_in

NAMES = [f"{number}.png" for number in range(6)]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "400")) // 200 if os.environ.get("FUZZ") == "1" else 2
RENAMES = st.integers(1, 13).map(lambda number: Moment("os:replace", number))


class RunsAddUp(RuleBasedStateMachine):
    """Images come, change and go; batch jobs, streams and compactions run, and are killed."""

    def __init__(self, folder, emulator, model):
        super().__init__()
        folder = Path(tempfile.mkdtemp(dir=folder))
        self.photos, self.out, self.log = folder / "photos", folder / "out", folder / "log"
        self.emulator = emulator
        self.common = ("--model", model)
        self.places = ("--input", f"{self.photos}/*", "--output", self.out)
        self.batch = (*self.places, "--allow-empty", "--shard-seconds", "0.05", *self.common)
        self.versions = set()
        self.changes = 0

    @initialize()
    def begin(self):
        self.photos.mkdir()
        for name in NAMES[:3]:
            self.put(name, broken=False)

    @rule(name=st.sampled_from(NAMES), broken=st.booleans())
    def put(self, name, broken):
        """A new image, or a new version of one."""
        self.changes += 1
        path = self.photos / name
        if broken:
            path.write_bytes(b"not an image" * self.changes)
        else:
            write_bright_image(path, (64, 48 + self.changes), (10, 10, 30, 30))
        self.versions.add(version(path))

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name):
        (self.photos / name).unlink(missing_ok=True)

    @rule()
    def backfill(self):
        self.run(*self.batch)

    @rule(at=RENAMES)
    def backfill_killed(self, at):
        self.run(*self.batch, at=at)

    @rule()
    def again(self):
        """Adds newer rows, which compaction makes one of each."""
        self.run(*self.batch, "--again")

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1), killed=st.booleans())
    def stream(self, names, killed):
        """Takes what there is of these."""
        paths = [self.photos / name for name in sorted(names) if (self.photos / name).exists()]
        topic, subscription = self.emulator.create()
        (output, results), (letters, dead) = self.emulator.create(), self.emulator.create()
        arguments = ["--config", "configs/streaming_pubsub_direct.yaml", "--input", subscription, "--output", output]
        arguments += ["--dead-letter-topic", letters, "--archive", self.out, "--allow-uri-prefix", self.photos]
        for path in paths:
            self.emulator.publisher().publish(topic, str(path).encode()).result()
        took = []

        def all_came():
            took.extend(self.emulator.take(results, 1, timeout_s=0.5) + self.emulator.take(dead, 1, timeout_s=0.5))
            return len(took) >= len(paths) and "\nreading " in log.read_text()

        log = self.log.with_name(topic.rpartition("/")[2])
        with ForkedJob([*arguments, *self.common], log, environment={"PUBSUB_EMULATOR_HOST": self.emulator.host}) as job:
            wait_until(all_came, log.read_text, job)
            job.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
            assert job.wait() == (KILLED if killed else 0), log.read_text()

    @rule(at=st.none() | RENAMES)
    def compact(self, at):
        if self.out.exists():
            self.run("--output", self.out, at=at, module="pipeline.commands.compact")

    @rule(minutes=st.lists(st.integers(-60, 60), min_size=1))
    def copy(self, minutes):
        """The folder is replaced by a copy of it, whose files are as old as it happens."""
        if self.out.exists():
            copy = shutil.copytree(self.out, self.out.with_name("copy"))
            for minute, path in zip(itertools.cycle(minutes), sorted(copy.rglob("*"))):
                os.utime(path, (time.time() + 60 * minute,) * 2)
            shutil.rmtree(self.out)
            copy.rename(self.out)

    def teardown(self):
        """What must hold at the end, after a last backfill and compaction."""
        self.backfill()
        self.compact(None)
        rows = collections.Counter(
            (row["image"]["uri"], row["image"]["generation"])
            for kind in ("detections", "dead_letters")
            for row in rows_in(str(self.out), kind)
        )
        live = {version(path) for path in self.photos.iterdir()}
        assert {one: rows[one] for one in live} == dict.fromkeys(live, 1)
        assert {one: count for one, count in rows.items() if count > 1 or one not in self.versions} == {}
        if live:
            self.run(*self.places, *self.common, module="pipeline.commands.reconcile")

    def run(self, *argv, at=None, module="pipeline.run"):
        """Runs a command, which may be killed before it comes to that."""
        code = run_forked(argv, self.log, at, module)
        assert code == 0 or (at and code == KILLED), self.log.read_text()[-4000:]


def version(path):
    """As a row names it."""
    return str(path), f"{path.stat().st_size}-{path.stat().st_mtime_ns}"


@pytest.mark.timeout(7200)
def test_each_image_version_has_one_row_at_the_end_whatever_ran(tmp_path, pubsub_emulator, bright_model):
    """Jobs, streams, kills and compactions in a random order."""
    quiet = {"database": None, "report_multiple_bugs": False, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(
        lambda: RunsAddUp(tmp_path, pubsub_emulator, bright_model),
        settings=settings(max_examples=EXAMPLES, stateful_step_count=10, **quiet),
    )
