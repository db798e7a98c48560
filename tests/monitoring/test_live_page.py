"""The live page in a real browser, and what it answers to others."""

import contextlib
import dataclasses
import html
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import cv2
import numpy as np
import pytest

from pipeline.config import Config
from pipeline.failures import ImageError
from pipeline.monitoring import http_server, live_page
from pipeline.monitoring.http_server import served
from pipeline.monitoring.live_page import HOST, LivePage
from pipeline.records import DetectedImage, Detections, ImageRef, Timing
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import NewestImages
from pipeline.stats.summary import JobStats
from tests.conftest import REPO, write_bright_image
from tests.emulators import free_ports
from tests.launch.jobs import WORK_IMAGES, write_work
from tests.monitoring.browser import PATIENCE_MS, memory_of, needs_chromium, running_chromium
from tests.processes import running, wait_until
from tests.streaming_job import StreamingJob

HOSTILE = '<img src=x onerror="document.title=1">"\'\u202e.jpg'
JPEG = cv2.imencode(".jpg", np.full((60, 80, 3), 200, np.uint8))[1].tobytes()
BOX = Detections(np.array([[5, 5, 40, 30]], np.float32), np.zeros(1, np.int32), np.array([0.75], np.float32), ("cat",))


class Job:
    """The statistics of a job that goes on as the test says."""

    def __init__(self):
        self.stats = JobStats(batch_sizes=(1, 2, 4))
        self.lock = threading.Lock()

    def now(self):
        with self.lock:
            return dataclasses.replace(self.stats.copy(), batch_sizes=self.stats.batch_sizes)

    def detect(self, images=1, name="a.jpg"):
        for number in range(images):
            timing = Timing(0.01, 0.02, 0.03, 0.001, latency=0.05, finished_at=1e9 + number, led_batch=2, model=0.02)
            image = DetectedImage(ImageRef(f"{number}/{name}"), 80, 60, "m", "1", BOX, timing, JPEG)
            with self.lock:
                self.stats.read += 1
                self.stats.add_detected(image, 0)
            PROCESS.newest.add(image)

    def fail(self):
        with self.lock:
            self.stats.read += 1
            self.stats.add_dead(ImageError("decode", "not_an_image", HOSTILE).dead_letter(ImageRef(HOSTILE)))


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(PROCESS, "newest", NewestImages())
    monkeypatch.setattr(live_page, "_EVERY_S", 0.1)
    return Job()


@contextlib.contextmanager
def shown(job, port=0):
    """Serves the page; yields the port."""
    page = LivePage(Config(), job.now)
    with served(HOST, port, "page_port", page.applications()) as port, contextlib.closing(page):
        yield port


@pytest.fixture(scope="module")
def browser():
    with running_chromium() as browser:
        yield browser


@contextlib.contextmanager
def opened(browser, port, **how):
    """The page, once it has had an event; fails at the end if the page complained or asked another server."""
    complaints = []
    context = browser.new_context(**how)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.extend([] if asked.url.startswith(f"http://{HOST}:{port}/") else [asked.url]))
    page.goto(f"http://{HOST}:{port}/")
    page.wait_for_selector("#connection.live")
    yield page
    context.close()
    assert [each for each in complaints if "ERR_CONNECTION_REFUSED" not in each and "ERR_INCOMPLETE" not in each] == []


def counts(page):
    """What the page says of the images: read, detected, dead letters, skipped, in hand."""
    return [int(each.replace(",", "")) for each in page.locator(".sum b").all_inner_texts()]


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_follows_the_readers_scheme(job, browser, scheme, width):
    job.detect(20, name="long" * 40 + ".jpg")
    job.fail()
    with shown(job) as port, opened(browser, port, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(252, 251, 248)", "dark": "rgb(22, 22, 20)"}[scheme]
        page.locator("figure img").first.scroll_into_view_if_needed()
        assert page.evaluate("[...document.images].filter(image => image.complete && !image.naturalWidth).length") == 0


@needs_chromium
def test_figures_failures_and_pictures_come_while_it_is_open(job, browser):
    with shown(job) as port, opened(browser, port) as page:
        assert counts(page) == [0, 0, 0, 0, 0]
        job.detect(3, name="scene.jpg")
        job.fail()
        with job.lock:
            job.stats.read += 7
        wait_until(lambda: page.evaluate("document.querySelector('.sum .left b')?.textContent === '7'"))
        assert counts(page) == [11, 3, 1, 0, 7]
        assert "add up" not in page.inner_text("main")
        assert page.locator(".gallery figcaption .name").all_inner_texts() == ["scene.jpg"] * 3
        wait_until(
            lambda: page.evaluate("document.images.length === 3 && [...document.images].every(image => image.naturalWidth)")
        )
        facts = dict(zip(page.locator(".facts dt").all_inner_texts(), page.locator(".facts dd").all_inner_texts(), strict=True))
        assert facts["Batches filled"] == "50 %"
        assert facts["In hand to result, median"].endswith(" ms")


@needs_chromium
def test_names_and_messages_are_text(job, browser):
    job.detect(1, name=HOSTILE)
    job.fail()
    with shown(job) as port, opened(browser, port) as page:
        title = page.title()
        job.detect(1, name=HOSTILE)
        wait_until(lambda: page.evaluate("document.images.length === 2"))
        assert page.title() == title == "Live: m 1"
        assert HOSTILE.replace("\u202e", "\\u202e") in page.locator(".letters td").first.inner_text()


@needs_chromium
def test_a_keyboard_reaches_everything_and_updates_leave_it_where_it_is(job, browser):
    job.detect(2)
    job.fail()
    with shown(job) as port, opened(browser, port) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        opened_at_first = page.evaluate("document.activeElement.parentElement.open")
        page.keyboard.press("Enter")
        for _ in range(2):
            job.fail()
            wait_until(lambda: page.evaluate(f"document.querySelector('.reasons .figure').textContent === '{job.stats.failed}'"))
            assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
            assert page.evaluate("document.activeElement.parentElement.open") is not opened_at_first
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.locator(":popover-open .found").is_visible()
        job.detect(5)
        wait_until(lambda: page.evaluate("document.querySelector('.sum .detected b').textContent === '7'"))
        assert page.locator(":popover-open .found").is_visible(), "an update does not close what somebody looks at"
        page.keyboard.press("Escape")
        wait_until(lambda: page.evaluate("document.images.length === 7"))


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_an_enlarged_picture_leads_to_the_next_and_the_previous_one(job, browser, width):
    job.detect(3)
    with shown(job) as port, opened(browser, port, viewport={"width": width, "height": 800}) as page:

        def enlarged():
            return page.evaluate("[...document.querySelectorAll(':popover-open')].map(view => view.id)")

        page.locator("figure .picture").first.click()
        assert enlarged() == ["sample-1"]
        page.get_by_role("button", name="Next").click()
        assert enlarged() == ["sample-2"], "in place of the first, not on top of it"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert enlarged() == ["sample-3"]
        assert page.get_by_role("button", name="Next").count() == 0, "it is the last"
        job.detect(2)
        wait_until(lambda: page.evaluate("document.querySelector('.sum .detected b').textContent === '5'"))
        assert enlarged() == ["sample-3"], "an update does not close what somebody looks at"
        page.get_by_role("button", name="Previous").click()
        assert enlarged() == ["sample-2"]
        page.keyboard.press("Escape")
        assert enlarged() == []


@pytest.mark.slow
@needs_chromium
def test_it_says_that_the_job_is_away_and_goes_on_with_the_next_one(job, browser):
    (port,) = free_ports(1)
    job.detect(3)
    with contextlib.ExitStack() as server:
        server.enter_context(shown(job, port))
        with opened(browser, port) as page:
            wait_until(lambda: page.evaluate("document.querySelector('.sum .detected b').textContent === '3'"))
            server.close()
            page.wait_for_selector("#connection.lost")
            assert "no news since" in page.inner_text("#connection")
            assert counts(page)[1] == 3, "the last figures stay"
            job.stats = JobStats()
            job.detect(1)
            server.enter_context(shown(job, port))
            page.wait_for_selector("#connection.live")
            wait_until(lambda: page.evaluate("document.querySelector('.sum .detected b').textContent === '1'"))


@pytest.mark.matrix
@needs_chromium
def test_its_memory_stays_flat_over_hundreds_of_updates(job, browser, monkeypatch):
    monkeypatch.setattr(live_page, "_EVERY_S", 0.02)
    with shown(job) as port, opened(browser, port) as page:

        def after(images):
            while job.stats.detected < images:
                job.detect(1)
                job.fail()
                wait_until(lambda: counts(page)[1] == job.stats.detected)
            seen = [memory_of(page) for _ in range(5)]  # an update in between adds the nodes that it replaces
            return {name: min(each[name] for each in seen) for name in seen[0]}

        early, late = after(60), after(300)
    assert late["nodes"] <= early["nodes"] + 4000, (early, late)
    assert late["listeners"] <= early["listeners"] + 5, (early, late)
    assert late["heap_bytes"] <= early["heap_bytes"] * 1.2 + 5e5, (early, late)


def asked(port, path="/", method="GET", host=None, site="none"):
    connection = http.client.HTTPConnection(HOST, port)
    connection.request(method, path, headers={"Sec-Fetch-Site": site, **({"Host": host} if host else {})})
    return connection.getresponse()


def test_without_a_script_the_page_has_the_figures(job):
    job.detect(2)
    with shown(job) as port:
        answer = asked(port)
        text = html.unescape(answer.read().decode())
    assert answer.status == 200 and "<b>2</b>" in text
    assert "script-src 'sha256-" in text and "default-src 'none'" in text
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/events", "/picture?1"])
def test_a_page_of_another_name_gets_nothing(job, path):
    """A name that an attacker's DNS points at this machine."""
    with shown(job) as port:
        answer = asked(port, path, host=f"attacker.example:{port}")
        assert (answer.status, answer.read()) == (421, b"expected the host 127.0.0.1 or localhost\n")
        assert asked(port, host=f"localhost:{port}").status == 200


def test_a_browser_that_leaves_out_port_80_is_answered(job):
    with shown(job) as port:
        assert asked(port, host=HOST).status == 200


def test_a_page_of_another_server_takes_no_connection(job):
    with shown(job) as port:
        assert asked(port, "/events", site="cross-site").status == 403
        assert asked(port, "/events", site="same-origin").read(6) == b"data: "


def test_loads_of_the_page_do_not_move_the_window_of_its_figures(job, monkeypatch):
    """Ten loads in a row, of a script or a reader who reloads, show what one shows."""
    monkeypatch.setattr(live_page, "_EVERY_S", 1000.0)
    job.detect(20)
    with shown(job) as port:
        rates = {re.findall("per second</dt><dd>(.*?)</dd>", asked(port).read().decode())[0] for _ in range(10)}
    assert len(rates) == 1 and rates != {"0.0"}


def test_it_changes_nothing_and_serves_nothing_else(job):
    job.detect(1)
    with shown(job) as port:
        assert asked(port, method="POST").status == 405
        assert asked(port, "/../../etc/passwd").status == 404
        assert asked(port, "/picture?../secret").status == 404


def test_readers_that_do_not_read_stop_neither_the_others_nor_the_job(job):
    job.detect(20, name="x" * 5000)
    with shown(job) as port, contextlib.ExitStack() as sockets:
        for _ in range(live_page._READERS):
            silent = sockets.enter_context(socket.create_connection((HOST, port)))
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sendall(f"GET /events HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
            silent.recv(1)
        answer = asked(port, "/events")
        assert (answer.status, answer.read()) == (200, b""), "no room for one more, whose browser asks again"
        assert asked(port).status == 200
        sockets.close()
        wait_until(lambda: asked(port, "/events").read(6) == b"data: ")


def test_a_reader_that_takes_nothing_for_long_makes_room_without_a_trace(job, monkeypatch, capfd):
    job.detect(20, name="x" * 5000)
    monkeypatch.setattr(http_server._Handler, "timeout", 0.1)
    monkeypatch.setattr(live_page, "_READERS", 1)
    monkeypatch.setattr(live_page, "_EVERY_S", 0.01)
    with shown(job) as port, socket.create_connection((HOST, port)) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sendall(f"GET /events HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
        wait_until(lambda: asked(port, "/events").read(6) == b"")
        wait_until(lambda: asked(port, "/events").read(6) == b"data: ")
    assert "Traceback" not in capfd.readouterr().err


def test_pictures_are_made_only_while_somebody_looks(monkeypatch):
    newest = NewestImages()
    assert not newest.wants()
    newest.look()
    assert newest.wants() and not newest.wants(), "one in two seconds"


def said_by(port):
    """What the page says of the images."""
    return [int(each.replace(",", "")) for each in re.findall(r"<b>([\d,]+)</b><span", asked(port).read().decode())]


def test_a_stream_shows_what_its_summary_says_in_the_end(pubsub_emulator, bright_model, tmp_path):
    (port,) = free_ports(1)
    stream = StreamingJob(pubsub_emulator, tmp_path, bright_model, "--page-port", port)
    write_bright_image(tmp_path / "bright.png", (64, 48), (10, 12, 30, 36))
    bright = (tmp_path / "bright.png").read_bytes()
    with stream:
        stream.publish(*((bright, {"name": f"{number}.png"}) for number in range(6)), (b"no image", {"name": "broken.png"}))
        wait_until(lambda: said_by(port) == [7, 6, 1, 0, 0], stream.output)
        text = asked(port).read().decode()
        assert {"Backlog age", "Event to publish, median"} <= set(re.findall("<dt>(.*?)</dt>", text))
        with contextlib.closing(asked(port, "/events")) as events:  # it stays open, and does not keep the job from ending
            pictures = set(re.findall(r"picture\?\d+", json.loads(events.readline().removeprefix(b"data: "))))
            assert asked(port, f"/{pictures.pop()}").read().startswith(b"\xff\xd8")
            assert stream.signal(signal.SIGTERM) == 0, stream.output()
    images = json.loads((stream.archive / "summary.json").read_text())["images"]
    assert list(images.values()) == [7, 6, 1, 0]


@pytest.mark.slow
def test_a_batch_job_shows_how_far_it_is(bright_model, tmp_path):
    write_work(tmp_path / "in")
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model, "--page-port", 0]
    command = [sys.executable, "-m", "pipeline.run", *map(str, arguments)]
    with running(command, cwd=REPO, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as started:
        said = next(line for line in started.stderr if b"live page on " in line)
        events = asked(int(said.rpartition(b":")[2].strip(b"/\n")), "/events")
        shown = [json.loads(line.removeprefix(b"data: ")) for line in events if line.startswith(b"data: ")]
        assert started.wait() == 0, started.stderr.read()
    assert any(f"<b>{detected:,}</b>" in shown[-1] for detected in range(1, WORK_IMAGES + 1)), shown[-1][:2000]
