"""The emulators that other tests stand on answer like the services, on a port that nobody else has."""

import socket
import sys

from tests import emulators
from tests.emulators import free_ports, listens, running_server


def test_what_is_published_can_be_taken(pubsub_emulator):
    topic, subscription = pubsub_emulator.create()
    publisher = pubsub_emulator.publisher()
    for future in [publisher.publish(topic, b"image", number=str(n)) for n in range(150)]:
        future.result()
    taken = pubsub_emulator.take(subscription, 150)
    assert sorted(int(m.attributes["number"]) for m in taken) == list(range(150))


def test_beam_reads_what_the_storage_client_wrote(gcs_bucket):
    from apache_beam.io.filesystems import FileSystems

    gcs_bucket.blob("a/b.txt").upload_from_string(b"content")
    with FileSystems.open(f"gs://{gcs_bucket.name}/a/b.txt") as file:
        assert file.read() == b"content"


def test_a_server_whose_port_was_taken_meanwhile_starts_on_another_one(monkeypatch):
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(emulators, "free_ports", lambda _count: [next(ports)])
        command = [
            sys.executable,
            "-c",
            "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)",
        ]
        monkeypatch.setattr(emulators, "listens", lambda port: port == free and listens(port))
        with running_server(lambda port: [*command, str(port)]) as port:
            assert port == free
