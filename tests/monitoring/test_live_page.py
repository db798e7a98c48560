"""The live page: the report so far, for a browser of this machine only."""

import http.client
import json
import re
import signal
import socket

import cv2
import numpy as np
import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.monitoring import http_server, live_page
from pipeline.monitoring.http_server import served
from pipeline.monitoring.live_page import HOST, LivePage
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, Timing
from pipeline.stats.job_stats import JobStats
from pipeline.stats.samples import REPORT_SAMPLES
from tests.emulators import free_ports
from tests.processes import wait_until
from tests.streaming_job import StreamingJob

JPEG = cv2.imencode(".jpg", np.full((60, 80, 3), 200, np.uint8))[1].tobytes()
BOX = Detections(np.array([[5, 5, 40, 30]], np.float32), np.zeros(1, np.int32), np.array([0.75], np.float32), ("cat",))


@pytest.fixture
def stats(monkeypatch):
    """Those of a job that goes on as the test says."""
    monkeypatch.setattr(live_page, "_EVERY_S", 0)
    return JobStats(batch_sizes=(1, 2, 4))


def detect(stats, images):
    timing = Timing(latency=0.05, finished_at=1e9, led_batch=2, model=0.02)
    for number in range(images):
        stats.add_detected([DetectedImage(ImageRef(f"{number}.jpg"), 80, 60, "m", "1", BOX, timing, JPEG)], REPORT_SAMPLES)
    stats.read += images


def shown(stats):
    """Serves the page; yields the port."""
    return served(HOST, 0, "page_port", {"/": LivePage(Config(), stats.copy).answer})


def asked(port, path="/", *, host=None, method="GET"):
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    connection.request(method, path, headers={"Host": host or f"{HOST}:{port}"})
    return connection.getresponse()


def counts(port):
    """What the page says of the images: read, detected, dead letters, skipped, in flight."""
    return [int(each.replace(",", "")) for each in re.findall(r"<b>([\d,]+)</b><span", asked(port).read().decode())]


def test_figures_failures_and_pictures_come_with_each_load_and_it_reloads_itself(stats):
    with shown(stats) as port:
        assert counts(port) == [0, 0, 0, 0, 0]
        detect(stats, 3)
        stats.add_dead(DeadLetter(ImageRef("b.jpg"), "decode", "not_an_image", "text"))
        stats.read += 6
        text = asked(port).read().decode()
        assert counts(port) == [9, 3, 1, 0, 5]
    assert '<meta http-equiv="refresh"' in text and "<script" not in text
    assert text.count('src="data:image/jpeg;base64,') == 3
    assert {"Images per second", "Batches filled", "Latency, median"} <= set(re.findall("<dt>(.*?)</dt>", text))


def test_a_page_of_another_name_gets_nothing(stats):
    """A name that an attacker's DNS points at this machine."""
    with shown(stats) as port:
        hosts = f"attacker.example:{port}", f"localhost:{port}", HOST  # browsers leave out port 80
        assert [asked(port, host=host).status for host in hosts] == [421, 200, 200]


def test_loads_of_the_page_do_not_move_the_window_of_its_figures(stats, monkeypatch):
    """Ten loads in a row, of a script or a reader who reloads, show what one shows."""
    monkeypatch.setattr(live_page, "_EVERY_S", 1000)
    detect(stats, 20)
    with shown(stats) as port:
        rates = {re.findall("per second</dt><dd>(.*?)</dd>", asked(port).read().decode())[0] for _ in range(10)}
    assert len(rates) == 1 and rates != {"0.0"}


def test_it_changes_nothing_and_serves_nothing_else(stats):
    detect(stats, 1)
    with shown(stats) as port:
        answer = asked(port)
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and b"default-src " in answer.read()
        assert asked(port, method="POST").status == 501
        head = asked(port, method="HEAD")
        assert (head.status, head.read()) == (200, b"") and int(head.headers["Content-Length"]) > 1000
        assert asked(port, "/../../etc/passwd").status == 404


@pytest.mark.slow
def test_readers_that_do_not_read_are_few_and_make_room_without_a_trace(stats, monkeypatch, capfd):
    monkeypatch.setattr(http_server._Handler, "timeout", 0.2)
    detect(stats, 1)
    with shown(stats) as port:
        silent = [socket.create_connection((HOST, port)) for _ in range(3 * http_server._MOST_CONNECTIONS)]
        wait_until(lambda: asked_or_none(port) == 200)
        for each in silent:
            each.close()
    assert "Traceback" not in capfd.readouterr().err


def asked_or_none(port):
    try:
        return asked(port).status
    except OSError:
        return None


def test_a_stream_shows_what_its_summary_says_in_the_end(pubsub_emulator, bright_model, bright_png, tmp_path):
    (port,) = free_ports(1)
    stream = StreamingJob(pubsub_emulator, tmp_path, bright_model, "--page-port", port)
    with stream:
        stream.publish(*((bright_png, {"name": f"{number}.png"}) for number in range(6)), (b"no image", {"name": "broken.png"}))
        wait_until(lambda: counts(port) == [7, 6, 1, 0, 0], stream.output)
        assert 'src="data:image/jpeg;base64,' in asked(port).read().decode()
        assert stream.signal(signal.SIGTERM) == 0, stream.output()
    images = json.loads((stream.archive / "summary.json").read_text())["images"]
    assert list(images.values()) == [7, 6, 1, 0]


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"page_port: expected a free port of 127.0.0.1, got {port}: Address already in use"
        with pytest.raises(ConfigError, match=expected), served(HOST, port, "page_port", {}):
            pass
