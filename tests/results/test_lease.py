"""One run at a time on a range, at the worst moments: killed, paused, taken over, many at once. On local disk and Cloud Storage.

Two emulators of Cloud Storage are used: the usual one ignores preconditions, so what hangs on these runs on the other one only.
Neither honours them on a deletion; that a claim is given up only as it was read is not shown here.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time

import pytest

from pipeline.errors import BusyError, OutputError, TakenOverError
from pipeline.results import cancellation
from pipeline.results.claims import Claim, LeaseTimes
from pipeline.results.claims_cloud import CloudClaims
from pipeline.results.layout import StagedFile
from pipeline.results.lease import LocalClaims, alive, if_dead, leased
from pipeline.results.run import Run, fence
from pipeline.storage.files import list_files, write_file
from pipeline.storage.listing_backends import generation_of
from tests.processes import wait_until
from tests.results.test_run import dies_at

ALL = "x/**"
MAX_PARALLEL = 12


@pytest.fixture(params=["local", "usual emulator", "strict emulator"])
def output(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "out[1]")
    bucket = request.getfixturevalue("gcs_bucket" if request.param == "usual emulator" else "strict_gcs_bucket")
    return f"gs://{bucket.name}/out"


@pytest.fixture(params=["local", "strict emulator"])
def exclusive_output(request, tmp_path):
    """Where of several at the same moment just one can have it."""
    return str(tmp_path / "out") if request.param == "local" else f"gs://{request.getfixturevalue('strict_gcs_bucket').name}/out"


@pytest.fixture
def strict_output(strict_gcs_bucket):
    return f"gs://{strict_gcs_bucket.name}/out"


def lease(output: str, *patterns: str, wait_s: float = 0.0, staging: Run | None = None, lost=lambda: None, **arguments):
    folder = (staging or Run.new(output)).folder
    return leased(folder, patterns or (ALL,), wait_s=wait_s, lost=lost, fence=fence, **arguments)


def wait_for_renewals(output: str, number: int = 1) -> None:
    """Waits until the object of the leases has been written again a few times."""
    for _ in range(number):
        before = generation_of(f"{output}/.lease")
        wait_until(lambda before=before: generation_of(f"{output}/.lease") not in ("", before), lambda: "no renewal")


def left(output: str) -> list[str]:
    if "://" in output:
        return list_files(f"{output}/**")
    return sorted(os.listdir(output))


@contextlib.contextmanager
def process(do):
    """Runs `do(say, hear)` in a process of its own; yields (pid, say, hear), by which the two speak."""
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe()

    def work():
        try:
            do(its.send, its.recv)
        except BaseException as err:  # noqa: BLE001
            its.send(type(err).__name__)
        finally:
            os._exit(0)

    child = fork.Process(target=work)
    child.start()
    try:
        yield child.pid, ours.send, ours.recv
    finally:
        child.kill()
        child.join()


def holding(output: str, *patterns: str):
    """In a process: takes the lease, says so, and ends it when it is told to."""

    def do(say, hear):
        with lease(output, *patterns):
            say("has it")
            hear()
        say("gave it up")

    return process(do)


class TestTwoRuns:
    def test_who_has_it_is_said_with_its_place_and_time(self, output):
        with holding(output) as (pid, _, hear):
            assert hear() == "has it"
            said = rf"output .*out.*: run [0-9a-f]{{12}} \(process {pid} on .*\) works at .*x/\*\* since 20\d\d-.* UTC; --when-"
            with pytest.raises(BusyError, match=said), lease(output):
                pass

    def test_it_is_free_again_at_the_end_and_nothing_is_left(self, output):
        for _ in range(2):
            with lease(output):
                assert len(left(output)) == 1
            assert left(output) == []

    def test_other_ranges_may_be_worked_at(self, output):
        with lease(output, "x/1/**"), lease(output, "x/2/**"), lease(output, "x/3/**", "x/4/**"):
            with pytest.raises(BusyError), lease(output, "x/4/**", "x/5/**"):
                pass
            with pytest.raises(BusyError), lease(output):
                pass
        with lease(output):
            pass

    def test_one_waits_until_the_other_ends_and_says_so_once(self, output, capsys):
        with holding(output) as (_, say, hear):
            assert hear() == "has it"
            threading.Timer(0.2, say, ["end"]).start()
            with lease(output, wait_s=60, times=LeaseTimes(poll_s=0.01)):
                assert hear() == "gave it up"
        said = capsys.readouterr().err
        assert said.startswith("waiting: output ") and said.count("\n") == 1

    def test_a_wait_has_an_end(self, output):
        with lease(output), pytest.raises(BusyError, match=r", and this one waited for 0\.1 s$"), lease(output, wait_s=0.1):
            pass

    def test_a_failure_gives_it_up_as_well(self, output):
        for failure in (ValueError, KeyboardInterrupt):
            with pytest.raises(failure), lease(output):
                raise failure
            assert left(output) == []


@pytest.mark.slow
def test_of_many_that_start_at_the_same_moment_exactly_one_has_it(exclusive_output):
    for _ in range(3):
        gate = os.pipe()

        def start(say, hear, gate=gate):
            os.close(gate[1])
            os.read(gate[0], 1)  # until all copies of the other end are closed
            with lease(exclusive_output):
                say("has it")
                hear()

        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(process(start)) for _ in range(MAX_PARALLEL)]
            os.close(gate[1])
            assert sorted(hear() for _, _, hear in others) == [*["BusyError"] * (MAX_PARALLEL - 1), "has it"]
            for _, say, _ in others:
                say("end")
        os.close(gate[0])


@pytest.mark.slow
def test_of_many_other_ranges_at_the_same_moment_each_is_had(exclusive_output):
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(holding(exclusive_output, f"x/{n}/**")) for n in range(MAX_PARALLEL)]
        assert [hear() for _, _, hear in others] == ["has it"] * MAX_PARALLEL


def test_a_process_that_was_killed_at_any_moment_is_in_nobodys_way(tmp_path):
    number = 0
    while True:
        number += 1
        folder = f"{tmp_path}/{number}"
        killed = dies_at(number, lambda folder=folder: lease(folder).__enter__())
        with lease(folder):
            assert len(left(folder)) == 1
        assert left(folder) == []
        if not killed:
            break
    assert number > 2


@pytest.mark.parametrize("moment", ["before its first renewal", "after it"])
def test_a_process_killed_on_this_machine_is_known_to_be_dead_at_once(moment, output):
    """Nobody waits five minutes for it."""

    def do(say, hear):
        with lease(output, times=LeaseTimes(renew_s=1000.0 if moment == "before its first renewal" else 0.01)):
            if moment == "after it" and "://" in output:
                wait_for_renewals(output)
            say("has it")
            hear()

    with process(do) as (pid, _, hear):
        assert hear() == "has it"
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        with lease(output):
            assert len(left(output)) == 1


def elsewhere(output: str, silent_s: float = 0.0, run: str = "elsewhere") -> Claim:
    """Makes the claim of a process on another machine, that was last heard of a while ago."""
    claim = dataclasses.replace(Claim.of_this_process(run, [ALL]), life="another machine")
    CloudClaims(output)._change(lambda claims, now: {**claims, run: dataclasses.replace(claim, renewed=now - silent_s)})
    return claim


@pytest.fixture(params=["usual emulator", "strict emulator"])
def cloud_output(request):
    return f"gs://{request.getfixturevalue('gcs_bucket' if request.param == 'usual emulator' else 'strict_gcs_bucket').name}/out"


@pytest.fixture
def usual_output(gcs_bucket):
    """Where results can be committed: the strict emulator cannot move objects, for want of batch requests."""
    return f"gs://{gcs_bucket.name}/out"


class TestOnCloudStorage:
    def test_a_claim_elsewhere_is_taken_over_once_it_was_not_renewed_for_five_minutes(self, cloud_output):
        elsewhere(cloud_output, silent_s=290)
        with pytest.raises(BusyError), lease(cloud_output):
            pass
        elsewhere(cloud_output, silent_s=310)
        with lease(cloud_output):
            pass
        assert left(cloud_output) == []

    @pytest.mark.parametrize("wrong_s", [86_400.0, -86_400.0], ids=["ahead", "behind"])
    def test_a_wrong_clock_of_this_machine_changes_nothing(self, wrong_s, cloud_output, monkeypatch):
        """Renewals and expiry go by the server's clock: neither is a living holder taken over, nor a dead one kept."""
        right = time.time
        with holding(cloud_output) as (_, say, hear):
            assert hear() == "has it"
            monkeypatch.setattr(time, "time", lambda: right() + wrong_s)
            with pytest.raises(BusyError), lease(cloud_output):
                pass
            say("end")
            assert hear() == "gave it up"
        with holding(cloud_output) as (_, _, hear):  # the holder's clock is wrong
            assert hear() == "has it"
            monkeypatch.setattr(time, "time", right)
            with pytest.raises(BusyError), lease(cloud_output):
                pass
        monkeypatch.setattr(time, "time", lambda: right() + wrong_s)
        elsewhere(cloud_output, silent_s=310)
        with lease(cloud_output):
            pass

    def test_a_claim_that_is_renewed_stays(self, cloud_output):
        lost = []
        with lease(cloud_output, lost=lambda: lost.append(True), times=LeaseTimes(renew_s=0.01)):
            wait_for_renewals(
                cloud_output, 4
            )  # the server's clock counts seconds, and a renewal within the same one writes nothing
            with pytest.raises(BusyError), lease(cloud_output, times=LeaseTimes(expires_s=2.0)):
                pass
        assert not lost

    def test_who_lost_it_is_told_at_the_next_renewal_and_commits_nothing(self, usual_output):
        staging, told = Run.new(usual_output), threading.Event()
        with (
            pytest.raises(TakenOverError, match="took over"),
            lease(usual_output, staging=staging, lost=told.set, times=LeaseTimes(renew_s=0.01)),
            staging.held({}),
        ):
            files = staged(staging)
            while not told.wait(0.05):
                take_over(usual_output)  # a renewal under way may undo it here, where nothing is written on a condition
            staging.commit(files)
        assert [name for name in left(usual_output) if ".lease" not in name] == []

    def test_who_lost_it_unknowingly_commits_nothing_either(self, usual_output):
        """Before its next renewal, that is: it makes sure when it is about to commit."""
        staging = Run.new(usual_output)
        with pytest.raises(TakenOverError), lease(usual_output, staging=staging), staging.held({}):
            files = staged(staging)
            take_over(usual_output)
            staging.commit(files)
        assert [name for name in left(usual_output) if ".lease" not in name] == []

    def test_who_is_taken_over_between_making_sure_and_commit_is_stopped_by_who_takes_over(self, usual_output):
        staging, other_machine = Run.new(usual_output), LeaseTimes(expires_s=-1.0)
        with (
            pytest.raises(TakenOverError) as ended,
            lease(usual_output, staging=staging, works_here=False),
            contextlib.ExitStack() as other,
            staging.held({}),
            cancellation.confirmed_before_commit(lambda: other.enter_context(lease(usual_output, times=other_machine))),
        ):
            staging.commit(staged(staging))
        assert isinstance(ended.value.__cause__, OutputError)
        assert [name for name in left(usual_output) if ".lease" not in name] == []

    def test_who_was_paused_for_too_long_ends_without_committing_and_the_other_one_has_committed(self, usual_output):
        """SIGSTOP right before it commits, longer than its claim lasts, then SIGCONT."""

        def work(say, hear):
            staging = Run.new(usual_output)
            with lease(usual_output, staging=staging), staging.held({}):
                files = staged(staging, b"paused")
                say(staging.name)
                hear()
                staging.commit(files)

        with process(work) as (pid, say, hear):
            assert len(hear()) == 12
            os.kill(pid, signal.SIGSTOP)
            staging = Run.new(usual_output)
            with lease(usual_output, staging=staging, wait_s=60, times=LeaseTimes(expires_s=1.0, poll_s=0.05)), staging.held({}):
                staging.commit(staged(staging, b"mine"))
            say("go on")
            os.kill(pid, signal.SIGCONT)
            assert hear() == "TakenOverError"
        kept = [name for name in left(usual_output) if "/.staging" not in name]
        assert kept == [f"{usual_output}/detections/detections-00000-of-00001.jsonl"]

    def test_storage_that_fails_for_a_while_takes_nothing_over(self, cloud_output):
        fails, lost = [True] * 3, []

        def fail(event, _args):
            if event == "http.client.send" and fails and threading.current_thread().name == "lease":
                fails.pop()
                raise ConnectionError("storage is gone")

        sys.addaudithook(fail)
        with lease(cloud_output, lost=lambda: lost.append(True), times=LeaseTimes(renew_s=0.01)):
            wait_for_renewals(cloud_output)
        assert not fails and not lost


class TestPreconditions:
    """What happens between the reading and the writing of a claim."""

    def test_a_renewal_that_comes_before_the_take_over_stands(self, strict_output):
        claim = elsewhere(strict_output, silent_s=310)
        mine, renewed = Claim.of_this_process("mine", [ALL]), []

        class Slow(CloudClaims):
            def _write(self, claims, generation):
                if not renewed:
                    renewed.append(CloudClaims(strict_output).renew(claim))
                return super()._write(claims, generation)

        assert Slow(strict_output).take(mine).run == claim.run
        assert renewed == [True]
        assert CloudClaims(strict_output).renew(claim)

    def test_a_take_over_that_comes_before_the_renewal_stands(self, strict_output):
        claim = elsewhere(strict_output, silent_s=310)
        mine, taken = Claim.of_this_process("mine", [ALL]), []

        class Slow(CloudClaims):
            def _write(self, claims, generation):
                if not taken:
                    taken.append(CloudClaims(strict_output).take(mine))
                return super()._write(claims, generation)

        assert not Slow(strict_output).renew(claim)
        assert taken == [None]
        assert CloudClaims(strict_output).renew(mine)

    def test_an_answer_that_is_lost_on_its_way_does_no_harm(self, strict_output):
        """What was written stands; that the next try is refused for its generation is no loss."""
        mine, lost = Claim.of_this_process("mine", [ALL]), []

        class Unsure(CloudClaims):
            def _write(self, claims, generation):
                if not lost:
                    lost.append(super()._write(claims, generation))
                return super()._write(claims, generation)

        def a_second_ago(claims, _now):  # the server's clock counts seconds, and the same second changes nothing
            return {run: dataclasses.replace(claim, renewed=claim.renewed - 1) for run, claim in claims.items()}

        for act in (CloudClaims.take, CloudClaims.renew, CloudClaims.release):
            lost.clear()
            CloudClaims(strict_output)._change(a_second_ago)
            assert act(Unsure(strict_output), mine) in (None, True)
            assert lost == [True]
        assert left(strict_output) == []


class TestAlive:
    """Streams, archives and jobs show by the same protocol that they run."""

    def test_a_run_is_alive_until_it_ends_and_nothing_is_left(self, output):
        with alive(f"{output}/.staging-0a"), if_dead(f"{output}/.staging-0a") as dead:
            assert not dead
        with if_dead(f"{output}/.staging-0b") as dead:
            assert dead == ("://" in output)  # a local folder that is not there has nobody who could have left it
        assert [name for name in left(output) if ".lease" in name] == []

    def test_one_that_was_killed_on_this_machine_is_dead_at_once(self, output):
        def do(say, hear):
            with alive(f"{output}/.staging-0a"):
                say("alive")
                hear()

        with process(do) as (pid, _, hear):
            assert hear() == "alive"
            with if_dead(f"{output}/.staging-0a") as dead:
                assert not dead
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with if_dead(f"{output}/.staging-0a") as dead:
                assert dead

    def test_beside_the_lease_of_the_same_run_it_needs_no_record_of_its_own(self, strict_output):
        staging = Run.new(strict_output)
        with lease(strict_output, staging=staging):
            with alive(staging.folder):
                pass
            with pytest.raises(BusyError), lease(strict_output):
                pass

    def test_many_at_the_same_moment_are_all_alive(self, exclusive_output):
        def do(say, hear, number):
            with alive(f"{exclusive_output}/.staging-{number}"):
                say("alive")
                hear()

        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(process(functools.partial(do, number=n))) for n in range(MAX_PARALLEL)]
            assert [hear() for _, _, hear in runs] == ["alive"] * MAX_PARALLEL
            for n in range(MAX_PARALLEL):
                with if_dead(f"{exclusive_output}/.staging-{n}") as dead:
                    assert not dead
            with lease(exclusive_output):  # it keeps nobody away
                pass

    def test_one_elsewhere_is_dead_five_minutes_after_its_last_renewal(self, cloud_output):
        for silent_s, ended in ((290, False), (310, True)):
            elsewhere(cloud_output, silent_s=silent_s, run="0a")
            with if_dead(f"{cloud_output}/.staging-0a") as dead:
                assert dead is ended

    def test_one_whose_record_expired_while_it_was_paused_is_alive_again_at_its_next_renewal(self, strict_output):
        with alive(f"{strict_output}/.staging-0a", LeaseTimes(renew_s=0.01)):
            CloudClaims(strict_output)._change(lambda _claims, _now: {})
            wait_until(lambda: CloudClaims(strict_output).alive()[0], lambda: "no renewal")
            with if_dead(f"{strict_output}/.staging-0a") as dead:
                assert not dead

    def test_without_its_launcher_a_run_is_alive_while_its_workers_report(self, cloud_output):
        write_file(f"{cloud_output}/.staging-0a/figures/0b", b"{}")
        with if_dead(f"{cloud_output}/.staging-0a") as dead:
            assert not dead
        with if_dead(f"{cloud_output}/.staging-0a", LeaseTimes(silent_s=-10.0)) as dead:
            assert dead


class TestOnNetworkDisks:
    """A disk may lock only files, as NFS does, or nothing."""

    @staticmethod
    def refuse(monkeypatch, kinds):
        flock = fcntl.flock

        def refuse(file, how):
            if stat.S_IFMT(os.fstat(file if isinstance(file, int) else file.fileno()).st_mode) in kinds:
                raise OSError(errno.ENOLCK, "No locks available")
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", refuse)

    def test_without_locks_for_folders_two_that_start_at_the_same_moment_never_both_have_it(self, tmp_path, monkeypatch):
        self.refuse(monkeypatch, {stat.S_IFDIR})
        output, others = str(tmp_path), [LocalClaims(str(tmp_path))]
        refused = []

        def start_another(event, _args):
            if event == "os.rename" and others:
                refused.append(others.pop().take(Claim.of_this_process("other", [ALL])))

        sys.addaudithook(start_another)
        refused.append(LocalClaims(output).take(Claim.of_this_process("mine", [ALL])))
        assert len(refused) == 2 and any(refused)

    def test_without_any_locks_a_job_ends_with_one_line(self, tmp_path, monkeypatch):
        self.refuse(monkeypatch, {stat.S_IFDIR, stat.S_IFREG})
        with pytest.raises(OutputError, match="expected a disk with file locks"), lease(f"{tmp_path}/out"):
            pass


def test_on_a_local_disk_a_paused_process_keeps_it(tmp_path):
    output = str(tmp_path / "out")
    with holding(output) as (pid, say, hear):
        assert hear() == "has it"
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(BusyError), lease(output):
            pass
        os.kill(pid, signal.SIGCONT)
        say("end")
        assert hear() == "gave it up"


def take_over(output: str) -> None:
    """What another machine does that has not heard of the others for too long."""
    claims = CloudClaims(output)
    other = dataclasses.replace(Claim.of_this_process("other", [ALL]), life="another machine")
    claims._change(lambda _, now: {"other": dataclasses.replace(other, renewed=now)})


def staged(staging: Run, content: bytes = b"rows") -> list[StagedFile]:
    name = "detections/detections-00000-of-00001.jsonl"
    write_file(f"{staging.folder}/attempt/{name}", content)
    return [StagedFile(f"{staging.folder}/attempt/{name}", name)]
