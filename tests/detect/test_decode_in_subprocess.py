"""Rarer formats are decoded in a child process: bounded, shared, started anew when it dies, and gone when its parent is."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import numpy as np
import psutil
import pytest
from PIL import Image

from pipeline.failures import MAY_PASS, ImageError
from pipeline.feed.decode import decode_image
from tests import hostile_images
from tests.fixtures import REPO

LIMIT = 1e8
PIXELS = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
WHOLE_DAYS = 1e12  # as the limit of pixels: the limit of time grows with it


def encoded(file_format, **options):
    return hostile_images.encoded(Image.fromarray(PIXELS), file_format, **options)


BMP = encoded("BMP")


def slow_image():
    """Pillow joins its comment block by block: minutes."""
    return hostile_images.gif_with_long_comment(30 << 20)


def children(pid=None):
    """The decoding children of a process."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            found += [child] * ("decoding_child" in " ".join(child.cmdline()))
    return set(found)


def wait_until_gone(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:  # an orphan may find nobody who asks for its exit code
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(0.1)


def wait_until_at_work(process):
    while sum(process.cpu_times()[:2]) < 1.0:  # its imports take less
        assert process.is_running()


def end_children():
    for child in children():
        child.kill()
        wait_until_gone(child)


@pytest.fixture
def warm():
    """A child that waits for an image; there is no other one."""
    end_children()
    decode_image(BMP, LIMIT)
    (child,) = children()
    return child


@contextlib.contextmanager
def decoding_process(code, **how):
    """A Python process that works at an image that takes for ever in its child: (process, child)."""
    begin = (
        "import sys; from tests.detect.test_decode_in_subprocess import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job begins with it ignored
        "decode_image(BMP, LIMIT); print(children().pop().pid, flush=True)\n"
    )
    command = [sys.executable, "-c", begin + code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=REPO, **pipes)
    try:
        child = psutil.Process(int(process.stdout.readline()))
        wait_until_at_work(child)
        yield process, child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class TestSharing:
    def test_one_child_stays_for_all_images_that_come_one_by_one(self, warm):
        for content in (BMP, encoded("TIFF"), encoded("GIF"), b"BM" + bytes(40), b"II*\0" + bytes(40)):
            with contextlib.suppress(ImageError):
                decode_image(content, LIMIT)
        assert children() == {warm}

    def test_it_imports_neither_tensorflow_nor_beam(self, warm):
        mapped = " ".join(used.path for used in warm.memory_maps())
        assert "cv2" in mapped and "tensorflow" not in mapped and "grpc" not in mapped

    @pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
    def test_frequent_formats_need_none(self, file_format):
        end_children()
        decode_image(encoded(file_format), LIMIT)
        assert not children()

    def test_threads_that_decode_side_by_side_have_one_each_at_most(self):
        end_children()
        with ThreadPoolExecutor(3) as pool:
            for pixels in pool.map(lambda _: decode_image(BMP, LIMIT).pixels, range(60)):
                assert np.array_equal(pixels, PIXELS)
        assert 1 <= len(children()) <= 3

    def test_a_default_timeout_of_sockets_is_not_its_own(self):
        """Beam's sign-in at Google sets one."""
        end_children()
        socket.setdefaulttimeout(0.001)
        try:
            assert np.array_equal(decode_image(BMP, LIMIT).pixels, PIXELS)
        finally:
            socket.setdefaulttimeout(None)

    def test_a_folder_that_has_a_package_of_the_same_name_changes_nothing(self, tmp_path):
        (tmp_path / "pipeline").mkdir()
        (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit('the wrong one')")
        code = f"import sys; sys.path.remove(''); sys.path.insert(0, {str(REPO)!r})\n"
        code += "from tests.detect.test_decode_in_subprocess import *\nprint(decode_image(BMP, LIMIT).image_wh)"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "(60, 40)\n"


class TestDeath:
    def test_a_decoder_that_crashes_is_one_dead_letter_that_may_pass(self, warm):
        with ThreadPoolExecutor(1) as pool:
            decoding = pool.submit(decode_image, slow_image(), WHOLE_DAYS)
            error = None
            while not error:  # the child that was warm, and the fresh one that has a second try
                for child in children():
                    child.send_signal(signal.SIGSEGV)
                with contextlib.suppress(TimeoutError):
                    error = decoding.exception(0.1)
        assert (error.stage, error.reason) == ("decode", "decoder_died")
        assert str(error) == "the process that decodes GIF ended with SIGSEGV"
        assert error.reason in MAY_PASS
        assert np.array_equal(decode_image(BMP, LIMIT).pixels, PIXELS)

    def test_a_child_that_was_killed_while_it_waited_costs_no_image(self, warm):
        warm.kill()
        wait_until_gone(warm)
        assert np.array_equal(decode_image(BMP, LIMIT).pixels, PIXELS)
        assert children() and warm not in children()

    @pytest.mark.slow
    def test_an_image_that_takes_too_long_is_too_much_work(self, warm):
        with pytest.raises(ImageError, match="expected at most 5 s of decoding, got GIF of 31580680 bytes") as caught:
            decode_image(slow_image(), LIMIT)
        assert caught.value.reason == "too_much_work"
        assert np.array_equal(decode_image(BMP, LIMIT).pixels, PIXELS)

    def test_an_image_that_takes_too_much_memory_is_too_large(self, warm):
        with pytest.raises(ImageError, match="more memory than an image of its size needs") as caught:
            decode_image(hostile_images.tiff_of_a_huge_tile(), LIMIT)
        assert caught.value.reason == "too_large"
        assert children() == {warm}

    @pytest.mark.slow
    def test_the_bounds_of_one_image_are_not_those_of_the_next(self, warm):
        assert np.array_equal(decode_image(BMP + bytes(150 << 20), LIMIT).pixels, PIXELS)
        assert children() == {warm}

    @pytest.mark.slow
    def test_no_file_descriptors_and_no_zombies_are_left(self, warm):
        def held():
            zombies = [one.pid for one in psutil.Process().children() if one.status() == psutil.STATUS_ZOMBIE]
            return len(os.listdir("/proc/self/fd")), zombies  # those of other tests stay

        before = held()
        for _ in range(5):
            decode_image(BMP, LIMIT)
            (child,) = children()
            child.kill()
            wait_until_gone(child)
            decode_image(BMP, LIMIT)
        assert held() == before


class TestParent:
    """What becomes of a child while it works at an image."""

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_it_ends_at_once_when_its_parent_is_killed(self, number):
        with decoding_process("decode_image(slow_image(), WHOLE_DAYS)") as (process, child):
            process.send_signal(number)
            wait_until_gone(child)

    @pytest.mark.slow
    def test_it_ends_when_its_parent_has_forked_and_is_killed_and_the_forked_process_lives_on(self):
        code = (
            "from threading import Thread; import time\n"
            "Thread(target=decode_image, args=(slow_image(), WHOLE_DAYS), daemon=True).start()\n"
            "wait_until_at_work(children().pop())\n"
            "os.fork() or time.sleep(600); Thread(target=time.sleep, args=(600,)).start()"
        )
        with decoding_process(code) as (process, child):
            while len(psutil.Process(process.pid).children()) < 2:
                assert process.poll() is None
            process.kill()
            wait_until_gone(child)

    @pytest.mark.slow
    def test_ctrl_c_prints_nothing_of_it(self):
        code = "try: decode_image(slow_image(), WHOLE_DAYS)\nexcept KeyboardInterrupt: sys.exit(7)"
        with decoding_process(code) as (process, child):
            os.killpg(process.pid, signal.SIGINT)
            assert process.communicate()[1] == ""
            assert process.returncode == 7
            wait_until_gone(child)

    def test_a_forked_process_has_children_of_its_own(self, warm):
        before = psutil.Process().children()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()

        def decode():
            theirs.send((np.array_equal(decode_image(BMP, LIMIT).pixels, PIXELS), {child.pid for child in children()}))

        forked = context.Process(target=decode)
        forked.start()
        same, pids = ours.recv()
        forked.join()
        assert same and pids and warm.pid not in pids
        assert np.array_equal(decode_image(BMP, LIMIT).pixels, PIXELS)
        assert children() == {warm} and psutil.Process().children() == before


class TestHeif:
    @pytest.fixture(autouse=True)
    def _opener(self):
        import pillow_heif

        pillow_heif.register_heif_opener()

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
    def test_heic_is_read(self, mode):
        smooth = Image.linear_gradient("L").resize((60, 40))
        content = hostile_images.encoded(smooth.convert(mode), "HEIF", quality=95)
        decoded = decode_image(content, LIMIT)
        assert decoded.image_wh == (60, 40)
        assert np.abs(decoded.pixels.astype(int) - np.asarray(smooth.convert("RGB"))).mean() < 3

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_its_pixels_are_turned_upright(self, orientation):
        exif = Image.Exif()
        exif[0x0112] = orientation
        smooth = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
        content = hostile_images.encoded(smooth, "HEIF", quality=95, exif=exif.tobytes())  # with `irot` and `imir`, as phones do
        as_jpeg = hostile_images.encoded(smooth, "JPEG", quality=95, exif=exif)
        pixels, wanted = (decode_image(one, LIMIT).pixels for one in (content, as_jpeg))
        assert pixels.shape == wanted.shape
        assert np.abs(pixels.astype(int) - wanted).mean() < 3

    def test_of_several_images_the_first_counts(self):
        others = [Image.new("RGB", (30, 20), colour) for colour in ("red", "lime")]
        content = hostile_images.encoded(Image.new("RGB", (60, 40), "blue"), "HEIF", save_all=True, append_images=others)
        decoded = decode_image(content, LIMIT)
        assert decoded.image_wh == (60, 40)
        assert np.abs(decoded.pixels.astype(int) - (0, 0, 255)).max() < 8

    def test_a_damaged_one_has_a_reason(self):
        content = hostile_images.encoded(Image.fromarray(PIXELS), "HEIF")
        random = np.random.default_rng(1)
        for _ in range(40):
            damaged = bytearray(content)
            for at in random.integers(0, len(content), 4):
                damaged[at] = random.integers(256)
            with contextlib.suppress(ImageError):
                decode_image(bytes(damaged[: random.integers(20, len(content))]), 1e6)
        assert decode_image(content, LIMIT).image_wh == (60, 40)

    def test_without_its_package_the_dead_letter_names_the_extra(self, tmp_path):
        (tmp_path / "pillow_heif.py").write_text("raise ImportError('not installed')")
        (tmp_path / "a.heic").write_bytes(hostile_images.encoded(Image.fromarray(PIXELS), "HEIF"))
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pipeline.feed.decode import decode_image\n"
        code += "try: decode_image(open(sys.argv[1], 'rb').read(), 1e8)\nexcept Exception as err: print(err.reason, err)"
        command = [sys.executable, "-c", code, str(tmp_path / "a.heic")]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        expected = "no_decoder HEIC and HEIF need pillow-heif: pip install 'hybrid-detection-pipeline[heif]'\n"
        assert done.stdout == expected
        assert "no_decoder" in MAY_PASS
