"""Feeder processes: what they make of images, what their deaths cost, and that they end with their job."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec.structs import replace
from PIL import Image

from pipeline.detect.process_memory import trim_memory
from pipeline.errors import AwayError, ModelError
from pipeline.failures import MAY_PASS
from pipeline.feed.decode import decode_image
from pipeline.feed.feeder import Feeder
from pipeline.feed.feeder_process import FeederProcess
from pipeline.feed.fit import ModelInput, fit
from pipeline.feed.shared_memory import size_of
from pipeline.feed.thumbnails import make_thumbnail
from pipeline.feed.work import Coming, Prepared, StoreAnswers, StoreFails, Work
from pipeline.limits import resident_bytes
from pipeline.process import PROCESS
from pipeline.records import EncodedImage, ImageRef, identity_hash
from pipeline.storage.store import FoundFile
from pipeline.storage.stores import store_of
from tests import hostile_images
from tests.feed.feeding import (
    ANY_SIZE,
    BMP,
    LIMITS,
    OTHERS,
    STRETCH,
    WHOLE_DAYS,
    at_work,
    encoded,
    fed,
    feeders,
    feeding,
    in_hand,
    job_at_work,
    places,
    process_at_work,
    slow_image,
    wait_until_gone,
)
from tests.fixtures import REPO
from tests.listing import test_storage_failures as storage_failures
from tests.processes import in_thread, served, wait_until

storage, no_credentials = storage_failures.storage, storage_failures.no_credentials
CONTENTS = [encoded("JPEG", (400, 300)), BMP, encoded("PNG", (7, 90)), encoded("TIFF", (30, 20))]


@pytest.fixture(autouse=True, scope="module")
def _others():
    OTHERS.update(feeders())
    yield
    OTHERS.clear()


@pytest.fixture
def feeder():
    with feeding(processes=2) as feeder:
        yield feeder


@pytest.fixture
def alone():
    """A feeder with one process, which is ready."""
    with feeding() as feeder:
        fed(feeder, in_hand(BMP)).release()
        yield feeder


class TestPixels:
    @pytest.mark.parametrize("to", [STRETCH, ModelInput((50, 30), "letterbox", "ultralytics", 114)], ids=lambda to: to.resize)
    def test_a_chunk_holds_what_fit_makes_of_each_image(self, feeder, to, tmp_path):
        files = [tmp_path / f"{number}.img" for number in range(len(CONTENTS))]
        for file, content in zip(files, CONTENTS, strict=True):
            file.write_bytes(content)
        for images in ([ImageRef(str(file)) for file in files], in_hand(*CONTENTS)):
            chunk = fed(feeder, images, to)
            assert (places(chunk), chunk.failures, {each.thumbnail for each in chunk.fitted}) == ([0, 1, 2, 3], {}, {b""})
            assert np.array_equal(chunk.pixels, [fit(content, to, LIMITS.max_pixels)[1] for content in CONTENTS])
            assert [each.image_wh for each in chunk.fitted] == [(400, 300), (60, 40), (7, 90), (30, 20)]
            assert [each.received_at > 0 for each in chunk.fitted] == [isinstance(images[0], ImageRef)] * 4
            chunk.release()

    def test_failures_keep_their_places(self, feeder, tmp_path):
        (tmp_path / "a.bmp").write_bytes(BMP)
        images = [ImageRef(f"{tmp_path}/a.bmp"), *in_hand(b"text"), ImageRef(f"{tmp_path}/none.bmp"), *in_hand(BMP)]
        chunk = fed(feeder, images)
        assert places(chunk) == [0, 3] and np.array_equal(chunk.pixels, [fit(BMP, STRETCH, 1e8)[1]] * 2)
        found = {place: (failure.stage, failure.reason) for place, failure in chunk.failures.items()}
        assert found == {1: ("decode", "not_an_image"), 2: ("read", "not_found")}
        nothing = fed(feeder, in_hand(b"text", b""))
        assert nothing.pixels.shape[0] == 0 and sorted(nothing.failures) == [0, 1]

    def test_thumbnails_are_made_of_samples_also_where_the_bytes_are_there(self, feeder, tmp_path):
        refs = [ImageRef(f"{tmp_path}/{number}.bmp") for number in range(3)]
        for ref in refs:
            (tmp_path / ref.uri).write_bytes(BMP)
        first = fed(feeder, refs)
        read = [replace(ref, generation=one.generation) for ref, one in zip(refs, first.fitted, strict=True)]
        hashes = [identity_hash(ref.identity) for ref in read]
        below = sorted(hashes)[1]
        sampled = hashes.index(min(hashes))
        first.release()
        chunk = feeder.start([*refs, *(EncodedImage(ref, BMP) for ref in read)], STRETCH, below).result()
        made = {each.place: each.thumbnail for each in chunk.fitted if each.thumbnail}
        assert made == dict.fromkeys([sampled, 3 + sampled], make_thumbnail(decode_image(BMP, 1e8)))
        chunk.release()

    def test_a_thumbnail_of_one_image_is_empty_if_it_is_not_there_any_more(self, feeder):
        assert feeder.thumbnail(*in_hand(CONTENTS[0])) == make_thumbnail(decode_image(CONTENTS[0], 1e8))
        assert feeder.thumbnail(ImageRef("gone.jpg")) == feeder.thumbnail(*in_hand(b"text")) == b""


def address(chunk):
    return chunk.pixels.ctypes.data


def locking(feeder, byte, waiting=False):
    """The processes that hold a lock on a byte of the feeder's file of locks, or wait for it."""
    inode = os.fstat(feeder._locks).st_ino
    found = re.findall(rf"^\d+: (-> )?POSIX .* (\d+) [^ ]+:{inode} {byte} {byte}$", Path("/proc/locks").read_text(), re.MULTILINE)
    return {int(pid) for arrow, pid in found if bool(arrow) == waiting}


def shared_bytes(feeder):
    """The memory that a feeder holds for pixels."""
    return os.fstat(feeder._descriptor).st_blocks * 512


class TestSlots:
    def test_chunks_wait_for_slots_which_are_used_again_once_each_is_released(self):
        with feeding(most_bytes=0) as feeder:
            first, second = (fed(feeder, in_hand(BMP)) for _ in range(2))
            assert address(first) != address(second)
            third = feeder.start(in_hand(BMP), STRETCH)
            assert not third.done()
            first.release()
            assert address(third.result()) == address(first)
            third.result().release()
            third.result().release()  # once more frees nothing
            fourth, fifth = (feeder.start(in_hand(BMP), STRETCH) for _ in range(2))
            assert address(fourth.result()) == address(first) and not fifth.done()

    def test_the_first_images_of_any_size_keep_the_bound_too(self):
        """What an image takes is known once one is done; until then two are in work, of which the other is not counted."""
        content, image_bytes = encoded("PNG", (600, 400)), 600 * 400 * 3
        with stopped(processes=3, most_bytes=3e6) as (feeder, go_on):
            started = [feeder.start(in_hand(content), ANY_SIZE) for _ in range(9)]
            go_on()
            wait_until(lambda: sum(each.done() for each in started) >= 3 and not any(each.images for each in feeder._running))
            assert shared_bytes(feeder) <= 3e6 + image_bytes
            for each in started:
                each.result().release()

    def test_more_chunks_than_slots_wait_for_one(self, monkeypatch):
        monkeypatch.setattr("pipeline.feed.feeder._MOST_SLOTS", 3)
        with feeding() as feeder:
            started = [feeder.start(in_hand(BMP), STRETCH) for _ in range(5)]
            for each in started:
                assert places(each.result()) == [0]
                each.result().release()

    @pytest.mark.slow
    def test_memory_of_large_images_is_given_back(self):
        content = encoded("PNG", (6000, 4000))
        with feeding() as feeder:
            for _ in range(2):
                chunk = fed(feeder, in_hand(content), ANY_SIZE)
                assert chunk.pixels.shape == (1, 4000, 6000, 3) and shared_bytes(feeder) >= chunk.pixels.nbytes
                chunk.release()
                wait_until(lambda: shared_bytes(feeder) == 0)


@contextlib.contextmanager
def stopped(processes=2, **how):
    """A feeder whose processes are ready and stopped until the block calls what it gives."""
    with feeding(processes=processes, **how) as feeder:
        wait_until(lambda: len(feeder._running) == processes and all(each.is_ready for each in feeder._running))
        found = feeders()
        for each in found:
            each.suspend()
        yield feeder, lambda: [each.resume() for each in found]


class TestUnits:
    def test_all_processes_work_at_one_chunk_and_its_images_lie_beside_each_other_in_their_order(self):
        """Without a gap for those that fail."""
        contents = [BMP, b"text", *CONTENTS, BMP, b"", BMP]
        with stopped() as (feeder, go_on):
            started = feeder.start(in_hand(*contents), STRETCH)
            assert sorted(each.images for each in feeder._running) == [4, 5]
            go_on()
            chunk = started.result()
            good = [place for place, content in enumerate(contents) if len(content) > 4]
            assert places(chunk) == good and sorted(chunk.failures) == [1, 7]
            assert np.array_equal(chunk.pixels, [fit(contents[place], STRETCH, LIMITS.max_pixels)[1] for place in good])

    @pytest.mark.parametrize("chunks", [1, 3])
    def test_no_process_is_idle_where_memory_has_room_for_one_chunk_at_a_time(self, chunks):
        """As at 1280x1280 and batches of 64. Two chunks always have room: one is filled while the model has the other."""
        with stopped(processes=3, most_bytes=0) as (feeder, go_on):
            started = [feeder.start(in_hand(*[BMP] * 16), STRETCH) for _ in range(chunks)]
            assert all(each.images >= 4 for each in feeder._running)
            go_on()
            for each in started:
                assert places(each.result()) == [*range(16)]
                each.result().release()

    def test_a_larger_input_keeps_the_bound_of_memory(self):
        """As after a swap to a version with one: what earlier chunks held is given back."""
        large = STRETCH._replace(input_hw=(400, 600))
        with feeding(most_bytes=4e6) as feeder:
            small = [fed(feeder, in_hand(BMP), STRETCH._replace(input_hw=(300, 400))) for _ in range(10)]
            for each in small:
                each.release()
            held = [fed(feeder, in_hand(BMP), large) for _ in range(5)]
            assert shared_bytes(feeder) <= 4e6
            waits = feeder.start(in_hand(BMP), large)
            assert not waits.done() and feeder._waiting
            held[0].release()
            assert places(waits.result()) == [0]


class TestDeath:
    @pytest.mark.slow
    def test_a_crash_costs_exactly_the_image_at_fault(self):
        with feeding(WHOLE_DAYS) as feeder:
            both = [feeder.start(in_hand(*contents), STRETCH) for contents in ([BMP, slow_image(), BMP], [BMP, BMP])]
            crashed = process_at_work()
            crashed.send_signal(signal.SIGSEGV)
            wait_until_gone(crashed)
            process_at_work().send_signal(signal.SIGSEGV)
            chunk = both[0].result()
            assert [*chunk.failures] == [1] and (chunk.failures[1].stage, chunk.failures[1].reason) == ("decode", "decoder_died")
            assert chunk.failures[1].message == "the process that decodes it ended with SIGSEGV" and "decoder_died" in MAY_PASS
            assert places(chunk) == [0, 2] and np.array_equal(chunk.pixels, [fit(BMP, STRETCH, 1e8)[1]] * 2)
            assert places(both[1].result()) == [0, 1]

    def test_a_process_that_was_killed_once_at_work_costs_no_image(self):
        with feeding(WHOLE_DAYS) as feeder:
            fed(feeder, in_hand(BMP)).release()
            (process,) = feeders()
            chunk = feeder.start(in_hand(BMP, hostile_images.jpeg_of_many_scans((1000, 1000), 400), BMP), STRETCH)
            at_work(process, sum(process.cpu_times()[:2]) + 0.1)
            assert not chunk.done()
            process.kill()
            assert (places(chunk.result()), chunk.result().failures) == ([0, 1, 2], {})

    @pytest.mark.slow
    def test_an_image_that_takes_too_long_is_too_much_work(self, alone):
        chunk = fed(alone, in_hand(BMP, slow_image()))
        assert places(chunk) == [0] and chunk.failures[1].reason == "too_much_work"
        assert chunk.failures[1].message.startswith(
            "expected at most 5 s of decoding, or what its format and size take, got an image"
        )

    @pytest.mark.matrix
    def test_an_image_whose_format_and_size_take_longer_has_that_time(self, alone):
        """JPEG 2000 without loss takes a third of a second a megapixel: 20 megapixels more than five seconds."""
        pixels = np.random.default_rng(0).integers(0, 255, (4000, 5000, 3), np.uint8)
        assert places(fed(alone, in_hand(hostile_images.encoded(Image.fromarray(pixels), "JPEG2000", irreversible=False)))) == [0]

    def test_an_image_that_takes_too_much_memory_is_too_large(self, alone):
        before = feeders()
        chunk = fed(alone, in_hand(BMP, hostile_images.tiff_of_a_huge_tile(), BMP))
        assert places(chunk) == [0, 2] and chunk.failures[1].reason == "too_large"
        assert "more memory than an image of its size needs" in chunk.failures[1].message
        assert feeders() == before

    @pytest.mark.slow
    def test_the_bounds_of_one_image_are_not_those_of_the_next(self, alone):
        """Neither when that comes later, nor while the first one is decoded; nor is the model's input an image's memory."""
        before = feeders()
        large, slow = in_hand(BMP + bytes(150 << 20), hostile_images.jpeg_of_many_scans((1000, 1000), 400))
        started = [alone.start([image], STRETCH) for image in (large, slow, large, slow)]
        for chunk in started:
            assert chunk.result().failures == {}
            chunk.result().release()
        assert places(fed(alone, in_hand(*[BMP] * 4), STRETCH._replace(input_hw=(5000, 5000)))) == [0, 1, 2, 3]
        assert feeders() == before

    @pytest.mark.slow
    def test_a_process_that_was_killed_while_it_waited_costs_no_image_and_leaves_neither_descriptor_nor_zombie(self):
        def held():
            zombies = [one.pid for one in psutil.Process().children() if one.status() == psutil.STATUS_ZOMBIE]
            return len(os.listdir("/proc/self/fd")), zombies  # those of other tests stay

        def live():
            with feeding(processes=2) as feeder:
                for _ in range(3):
                    chunk = fed(feeder, in_hand(BMP))
                    assert places(chunk) == [0]
                    chunk.release()
                    for process in feeders():
                        process.kill()
            assert not feeders()

        live()
        descriptors, zombies = held()
        live()
        now = held()
        assert now[0] <= descriptors and now[1] == zombies  # what another test left may go


FORK = "os.fork() or time.sleep(600); "


class TestEnd:
    def test_close_ends_all(self):
        feeder = Feeder(1)
        feeder.open(WHOLE_DAYS, 1e9)
        chunks = [feeder.start(in_hand(slow_image()), STRETCH), *(feeder.start(in_hand(BMP), STRETCH) for _ in range(3))]
        process = process_at_work()
        feeder.close()
        feeder.close()
        for chunk in (*chunks, feeder.start(in_hand(BMP), STRETCH)):
            with pytest.raises(ModelError, match="closed"):
                chunk.result()
        wait_until_gone(process)

    @pytest.mark.parametrize("interpreter", ["/no/such/program", "/bin/false"])
    def test_processes_that_cannot_start_are_one_error(self, monkeypatch, interpreter):
        monkeypatch.setattr(sys, "executable", interpreter)
        with pytest.raises(ModelError, match="processes that decode images do not start") as caught, feeding() as feeder:
            fed(feeder, in_hand(BMP))
        assert "\n" not in str(caught.value)

    def test_a_process_that_cannot_be_started_for_a_while_costs_no_image_while_another_lives(self, monkeypatch):
        """As where a bound on processes is met for a moment."""
        with feeding(processes=2) as feeder:
            wait_until(lambda: all(each.is_ready for each in feeder._running) and len(feeder._running) == 2)
            with monkeypatch.context() as patch:
                patch.setattr(sys, "executable", "/no/such/program")
                feeders().pop().kill()
                wait_until(lambda: feeder._failed_starts > 4)
                assert places(fed(feeder, in_hand(BMP))) == [0]
            wait_until(lambda: len(feeders()) == 2)

    def test_images_of_a_process_that_died_do_not_wait_for_a_start_while_another_lives(self, monkeypatch):
        with feeding(processes=2) as feeder:
            wait_until(lambda: all(each.is_ready for each in feeder._running) and len(feeder._running) == 2)
            processes = feeders()
            for each in processes:
                each.suspend()
            chunk = feeder.start(in_hand(*[BMP] * 8), STRETCH)
            with monkeypatch.context() as patch:
                patch.setattr(sys, "executable", "/no/such/program")
                processes.pop().kill()
                processes.pop().resume()
                assert places(chunk.result()) == [*range(8)]

    @pytest.mark.slow
    @pytest.mark.parametrize(("fork", "number"), [("", signal.SIGKILL), ("", signal.SIGTERM), (FORK, signal.SIGKILL)])
    def test_a_process_at_work_ends_at_once_when_its_job_is_killed(self, fork, number):
        """Also if the job has forked, and the forked process lives on."""
        with job_at_work(fork + "begun(); result.result()") as (job, process):
            job.send_signal(number)
            wait_until_gone(process)

    @pytest.mark.slow
    def test_ctrl_c_prints_nothing_of_it(self):
        with job_at_work("try: begun(); result.result()\nexcept KeyboardInterrupt: sys.exit(7)") as (job, process):
            os.killpg(job.pid, signal.SIGINT)
            assert job.communicate()[1] == ""
            assert job.returncode == 7
            wait_until_gone(process)


class TestProcess:
    def test_it_imports_neither_tensorflow_nor_beam_and_is_small(self, alone):
        (process,) = feeders()
        mapped = " ".join(used.path for used in process.memory_maps())
        assert "cv2" in mapped and "tensorflow" not in mapped and "grpc" not in mapped
        assert process.memory_full_info().uss < 60e6

    def test_a_default_timeout_of_sockets_is_not_its_own(self):
        """Beam's sign-in at Google sets one."""
        socket.setdefaulttimeout(0.001)
        try:
            with feeding() as feeder:
                assert places(fed(feeder, in_hand(BMP))) == [0]
        finally:
            socket.setdefaulttimeout(None)

    def test_a_folder_that_has_a_package_of_the_same_name_changes_nothing(self, tmp_path):
        (tmp_path / "pipeline").mkdir()
        (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit('the wrong one')")
        code = f"import sys; sys.path.remove(''); sys.path.insert(0, {str(REPO)!r}); from tests.feed.feeding import *\n"
        code += "with feeding() as feeder: print(places(fed(feeder, in_hand(BMP))))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "[0]\n"


@pytest.fixture(scope="module")
def large_image():
    return encoded("JPEG", (6000, 4000), progressive=True)


@contextlib.contextmanager
def stopped_amid_a_decode(content, limits=LIMITS, processes=2):
    """A feeder of processes, one of which is stopped while it decodes an image: the feeder, that process, the chunk."""
    with feeding(limits, processes=processes) as feeder:
        for ready in [feeder.start(in_hand(BMP), STRETCH) for _ in range(4)]:
            ready.result().release()
        chunk = feeder.start(in_hand(content), STRETCH)
        (decodes,) = wait_until(lambda: locking(feeder, 1) - locking(feeder, 0))  # it has room, and lets others ask
        os.kill(decodes, signal.SIGSTOP)
        yield feeder, decodes, chunk


class TestMemory:
    """Of large images, which are decoded as the memory of the job allows."""

    @pytest.mark.slow
    @pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
    def test_an_image_that_does_not_fit_is_a_dead_letter_that_names_its_size(self, file_format):
        """The kernel would end the worker, again after each restart. With more memory the next run detects in it."""
        images = in_hand(BMP, encoded(file_format, (6000, 4000)), BMP)
        with feeding() as feeder:
            assert places(fed(feeder, images)) == [0, 1, 2]
        with feeding(LIMITS._replace(memory_bytes=50_000_000)) as feeder:  # less than this process takes
            fed(feeder, in_hand(BMP)).release()
            before = feeders()
            chunk = fed(feeder, images)
            assert feeders() == before
        assert places(chunk) == [0, 2] and chunk.failures[1].reason == "no_room" and "no_room" in MAY_PASS
        message = chunk.failures[1].message
        assert message.startswith("expected an image that fits into ") and "got 6000 x 4000 pixels that take " in message

    def test_a_large_image_takes_no_more_than_this_process_s_part_of_its_host(self, monkeypatch, large_image):
        """All processes of a launcher decode side by side, and none sees the others' locks."""
        for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "100000"}.items():
            monkeypatch.setenv(name, value)
        with feeding() as feeder:
            assert fed(feeder, in_hand(large_image)).failures[0].reason == "no_room"

    def test_large_decodes_add_up_within_the_memory_that_there_is(self, large_image):
        """Images that do not fit in all processes at once are done one after another. One takes about 220 MB."""
        trim_memory(collect_garbage=True)  # what earlier tests have left would go at any moment
        limits = LIMITS._replace(memory_bytes=resident_bytes() + 540_000_000)  # this process may take or free 300 MB meanwhile
        with stopped_amid_a_decode(large_image, limits, processes=4) as (feeder, decodes, first):
            before = feeders()
            second = feeder.start(in_hand(large_image), STRETCH)
            (waits,) = wait_until(lambda: locking(feeder, 1, waiting=True))
            assert locking(feeder, 1) == {decodes} and waits != decodes
            os.kill(decodes, signal.SIGCONT)
            assert places(first.result()) == places(second.result()) == [0]
            assert feeders() == before

    def test_an_image_for_whose_bytes_a_process_has_no_memory_now_is_no_image_that_is_too_large(self, alone, tmp_path):
        """It is read a second time, and the next run tries it again: the machine may have memory then."""
        (process,) = feeders()
        (tmp_path / "small.bmp").write_bytes(BMP)
        with (tmp_path / "large.bmp").open("wb") as large:
            large.write(BMP)
            large.truncate(400 << 20)
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + (200 << 20),) * 2)
        chunk = fed(alone, [ImageRef(f"{tmp_path}/{name}.bmp") for name in ("small", "large", "small")])
        assert places(chunk) == [0, 2] and chunk.failures[1].reason == "no_room"

    def test_who_dies_or_decodes_a_small_image_keeps_nobody_waiting(self, large_image):
        """Large images that fit side by side are decoded so."""
        with stopped_amid_a_decode(large_image) as (feeder, decodes, first):
            assert places(fed(feeder, in_hand(large_image, BMP))) == [0, 1]
            os.kill(decodes, signal.SIGKILL)
            assert places(first.result()) == [0]

    def test_who_waits_for_memory_gets_it_when_the_pixels_before_are_gone(self, monkeypatch, tmp_path, large_image):
        """They count as taken, so an image that fits would be refused for good."""
        stops = "thumbnails.make_thumbnail = lambda _: os.kill(os.getpid(), signal.SIGSTOP) or b'made'"
        code = f"import os, signal, sys; sys.path.append({str(REPO)!r}); from pipeline.feed import thumbnails; {stops}"
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with feeding() as feeder:
            started = feeder.start(in_hand(large_image), STRETCH, sample_below=2**64)
            (process,) = wait_until(lambda: {each for each in feeders() if each.status() == psutil.STATUS_STOPPED})
            assert locking(feeder, 1) == {process.pid}
            process.resume()
            assert started.result().fitted[0].thumbnail == b"made"
            wait_until(lambda: not locking(feeder, 1))


class TestReading:
    def test_a_store_that_stays_away_ends_the_job_and_not_the_feeder(self, storage):
        storage().broken = "away"
        refs = [ImageRef(f"gs://b/away/{number}.bmp", size_bytes=10) for number in range(3)]
        with feeding(LIMITS._replace(give_up_seconds=0.0, read_ahead_bytes=10)) as feeder:
            for _ in range(2):
                with pytest.raises(AwayError, match=r"^storage is away, .* gs://b/away/\d.bmp cannot be read now"):
                    fed(feeder, refs)
            assert [places(fed(feeder, in_hand(BMP))) for _ in range(3)] == [[0]] * 3

    def test_an_image_of_a_message_waits_until_its_store_has_answered_another_process(self, storage):
        server = storage()
        server.broken = "broken"
        with feeding(LIMITS._replace(give_up_seconds=0.0), processes=2) as feeder:
            waiting = feeder.start([ImageRef("gs://b/broken.bmp", message_id="m")], STRETCH)
            wait_until(lambda: "storage" in PROCESS.failing)
            (failure,) = fed(feeder, [ImageRef("gs://b/text.bmp", message_id="m")]).failures.values()
            assert failure.reason == "not_an_image"
            assert waiting.result().failures[0].reason == "storage_unavailable"

    def test_images_of_messages_wait_for_no_store_once_the_job_ends(self, storage):
        """Also in a process that starts afterwards."""
        storage().broken = "broken"
        refs = [ImageRef("gs://b/broken.bmp", message_id="m")]
        with feeding() as feeder:
            waiting = feeder.start(refs, STRETCH)
            wait_until(lambda: "storage" in PROCESS.failing)
            assert feeder.waits and not waiting.done()
            feeder.stop_waiting()
            assert waiting.result().failures[0].reason == "storage_unavailable"
            (process,) = feeders()
            process.kill()
            wait_until(lambda: feeders() - {process})
            assert fed(feeder, refs).failures[0].reason == "storage_unavailable" and not feeder.waits

    def test_a_store_that_fails_is_noted_until_it_is_back(self, storage, tmp_path, caplog):
        """And a file elsewhere does not mean that it is."""
        server = storage()
        server.broken = "b.bmp"
        (tmp_path / "a.bmp").write_bytes(BMP)
        with feeding(LIMITS._replace(retry_seconds=60.0)) as feeder:
            chunk = feeder.start([ImageRef("gs://b/b.bmp", size_bytes=21), *[ImageRef(f"{tmp_path}/a.bmp")] * 2], STRETCH)
            wait_until(lambda: "storage" in PROCESS.failing)
            wait_until(lambda: server.requests > 1)
            server.broken = ""
            assert places(chunk.result()) == [1, 2]
            wait_until(lambda: "storage is back" in caplog.messages)
        said = [record.getMessage() for record in caplog.records if record.name == "pipeline.feed.read_image"]
        assert len(said) == 2 and said[0].startswith("storage fails (") and not PROCESS.failing


def test_a_process_reads_on_while_its_answers_wait_though_a_store_is_back(monkeypatch):
    """Else neither side reads: the job waits to send images to a process that waits to send a note of the store."""
    asked = []

    class Away(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *_):
            pass

    noise = np.random.default_rng(0).integers(0, 255, (800, 800, 3), np.uint8)
    (photo,) = in_hand(hostile_images.encoded(Image.fromarray(noise), "BMP"))  # its thumbnail fills a socket's buffer
    away = ImageRef("gs://bucket/a.jpg", message_id="1")
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Away)) as port, contextlib.ExitStack() as ended:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        memory, locks = os.memfd_create("feeder"), os.memfd_create("locks")
        ended.callback(os.close, memory)
        ended.callback(os.close, locks)
        os.ftruncate(memory, size_of(1))
        process = FeederProcess(memory, locks)
        ended.callback(process.bury)
        process.send(LIMITS)
        messages = process.messages()
        assert next(messages) is None, "it is ready"
        for _ in range(4):
            process.send(Coming(len(photo.content)))
            process.send(Work(0, STRETCH, {0: photo}, 2**64, most_tiles=1))
        process.send(Work(0, STRETCH, {0: away}, 0, most_tiles=1))
        wait_until(lambda: len(asked) > 1)  # it was noted that the store fails
        process.send(StoreAnswers(away.uri))
        with in_thread(lambda: [process.send(Work(0, STRETCH, {0: photo}, 0, most_tiles=1)) for _ in range(8)]):
            pass
        found = [next(messages) for _ in range(4)]
        assert all(isinstance(each, Prepared | StoreFails) for each in found)


class TestLookUp:
    def test_files_are_looked_up_in_all_processes_and_each_keeps_its_place(self, storage, tmp_path):
        """Also names that are no Unicode; one that is missing is none."""
        server, odd = storage(), f"{tmp_path}/\udcff.bmp"
        Path(odd).write_bytes(BMP)
        wanted = [odd, "gs://b/\ud83d", f"{tmp_path}/gone", "gs://b/o"]
        with feeding(processes=3) as feeder:
            parts = feeder.look_up(wanted, 0.0)
            found = [file for part in parts for file in part.result()]
        assert len(parts) == 2 and server.requests == 1
        assert found == [store_of(odd).look_up(odd), None, None, FoundFile("gs://b/o", 21, "7")]

    def test_a_question_outlives_its_process_and_no_feeder(self, storage):
        server = storage()
        server.broken = "broken"
        with feeding() as feeder:
            (answered,) = feeder.look_up(["gs://b/broken"], 60.0)
            wait_until(lambda: server.requests)
            (process,) = feeders()
            process.kill()
            wait_until(lambda: feeders() - {process})
            assert not answered.done()
            server.broken = ""
            assert answered.result() == [FoundFile("gs://b/broken", 21, "7")]
            server.broken = "broken"
            (unanswered,) = feeder.look_up(["gs://b/broken"], 60.0)
        (late,) = feeder.look_up(["gs://b/broken"], 60.0)
        for each in (unanswered, late):
            with pytest.raises(ModelError, match="the feeder is closed"):
                each.result()

    def test_no_store_is_asked_again_once_the_job_ends(self, storage):
        server = storage()
        server.broken = "broken"
        with feeding() as feeder:
            (answered,) = feeder.look_up(["gs://b/broken"], 60.0)
            wait_until(lambda: server.requests > 1)
            feeder.stop_waiting()
            assert answered.result() == [None]
