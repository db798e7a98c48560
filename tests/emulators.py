"""Emulators of Pub/Sub and of three object stores, for tests, demos and benchmarks.

Each runs on a free port, in a process group of its own that is ended by its own id, also when a test fails or is killed. Demos
run where the packages of tests are not installed; `tests/emulator_fixtures.py` has the fixtures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipeline.runners.prism import WITH_PARENT, end_process
from tests.processes import served, wait_until

_STARTS = 3  # of a server whose port somebody else has taken meanwhile
_PORTS = range(15_000, max(20_000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])))
S3_KEY = "testing"
_AZURITE_KEY = "a2V5IG9mIGFuIGVtdWxhdG9yIGZvciB0ZXN0cw=="
_TOOLS = Path(__file__).resolve().parent.parent / ".tools"


class EmulatorMissing(Exception):
    """An emulator is not installed here; the message says how to get it."""


@dataclasses.dataclass(frozen=True)
class PubSubEmulator:
    """A running Pub/Sub emulator, whose `host` is `host:port` as `PUBSUB_EMULATOR_HOST` wants it."""

    host: str
    project: str = "test-project"

    def publisher(self) -> Any:
        """A publisher client that talks to this emulator, whatever the environment says."""
        import grpc
        from google.cloud import pubsub_v1
        from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

        return pubsub_v1.PublisherClient(transport=PublisherGrpcTransport(channel=grpc.insecure_channel(self.host)))

    def subscriber(self) -> Any:
        """A subscriber client that takes messages of any size."""
        import grpc
        from google.cloud import pubsub_v1
        from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

        channel = grpc.insecure_channel(self.host, options=[("grpc.max_receive_message_length", -1)])
        return pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))

    def create(self, *, ack_deadline_seconds: int = 10) -> tuple[str, str]:
        """Makes a new topic with one subscription; returns both full names."""
        name = new_name()
        topic, subscription = (f"projects/{self.project}/{kind}/{name}" for kind in ("topics", "subscriptions"))
        self.publisher().create_topic(name=topic)
        self.subscriber().create_subscription(name=subscription, topic=topic, ack_deadline_seconds=ack_deadline_seconds)
        return topic, subscription

    def take(self, subscription: str, count: int, *, timeout_s: float = 240) -> list[Any]:
        """Pulls and acknowledges until `count` messages came or the time is over; returns them in the order of arrival."""
        from google.api_core import exceptions

        client, taken, end = self.subscriber(), [], time.monotonic() + timeout_s
        while len(taken) < count and time.monotonic() < end:
            with contextlib.suppress(exceptions.DeadlineExceeded):
                received = client.pull(subscription=subscription, max_messages=100, timeout=2).received_messages
                if received:
                    client.acknowledge(subscription=subscription, ack_ids=[each.ack_id for each in received])
                taken += [each.message for each in received]
        return taken


def publish(publisher: Any, topic: str, *messages: bytes | tuple[bytes, dict[str, str]]) -> None:
    """Publishes messages, each bytes or (bytes, attributes), and waits until Pub/Sub has them."""
    pairs = [message if isinstance(message, tuple) else (message, {}) for message in messages]
    for future in [publisher.publish(topic, content, **attributes) for content, attributes in pairs]:
        future.result()


@contextlib.contextmanager
def running_pubsub_emulator() -> Iterator[PubSubEmulator]:
    """Starts Google's Pub/Sub emulator, and ends it."""
    jar = _pubsub_jar()
    if shutil.which("java") is None or jar is None:
        raise EmulatorMissing(
            "Google's Pub/Sub emulator is not installed; get it with `gcloud components install pubsub-emulator` "
            "or `apt-get install google-cloud-cli-pubsub-emulator default-jre-headless`"
        )
    quiet = ["-Xmx3g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]  # it shares its cores with what is measured
    command = ["java", *quiet, "-jar", str(jar), "--host=127.0.0.1"]
    with running_server(lambda port: [*command, f"--port={port}"]) as port:
        yield PubSubEmulator(host=f"127.0.0.1:{port}")


@contextlib.contextmanager
def running_gcs_emulator() -> Iterator[str]:
    """Starts a Cloud Storage emulator that keeps its objects in memory, and ends it; yields its URL."""
    if importlib.util.find_spec("gcp_storage_emulator") is None:
        raise EmulatorMissing("gcp-storage-emulator is not installed; get it with `pip install gcp-storage-emulator`")
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", "--in-memory", "--quiet"]
    with running_server(lambda port: [*command, f"--port={port}"]) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running_strict_gcs_emulator() -> Iterator[str]:
    """The same for the emulator that honours preconditions, as the other one does not."""
    server = shutil.which("fake-gcs-server", path=f"{_TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")
    if server is None:
        raise EmulatorMissing("no fake-gcs-server; get it with `make .tools/fake-gcs-server`, where Go is")
    command = [server, "-backend=memory", "-scheme=http", "-host=127.0.0.1", "-log-level=error"]
    with running_server(lambda port: [*command, f"-port={port}", f"-public-host=127.0.0.1:{port}"]) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running_s3_server() -> Iterator[str]:
    """The same for a server with the protocol of S3 that honours conditions."""
    server = shutil.which("versitygw", path=f"{_TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")
    if server is None or importlib.util.find_spec("boto3") is None:
        raise EmulatorMissing("no versitygw, a server with the protocol of S3; get it with `make .tools/versitygw`, where Go is")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("objects", "metadata"):
            Path(folder, name).mkdir()
        command = [server, "--quiet", "--access", S3_KEY, "--secret", S3_KEY]
        places = ["posix", "--sidecar", f"{folder}/metadata", f"{folder}/objects"]
        with running_server(lambda port: [*command, "--port", f"127.0.0.1:{port}", *places]) as port:
            yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running_azurite() -> Iterator[str]:
    """The same for an emulator of Azure Blob Storage; yields its connection string."""
    server = shutil.which("azurite-blob", path=f"{_TOOLS}/azurite/node_modules/.bin{os.pathsep}{os.environ.get('PATH', '')}")
    if server is None or importlib.util.find_spec("azure.storage.blob") is None:
        raise EmulatorMissing("no Azurite, the emulator of Azure Blob Storage; get it with `make .tools/azurite`, where npm is")
    command = ["env", f"AZURITE_ACCOUNTS=testing:{_AZURITE_KEY}", server]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort"]
    with running_server(lambda port: [*command, str(port)]) as port:
        place = f"BlobEndpoint=http://127.0.0.1:{port}/testing"
        yield f"DefaultEndpointsProtocol=http;AccountName=testing;AccountKey={_AZURITE_KEY};{place};"


@contextlib.contextmanager
def answering(answer: Callable[[str, str, bytes, Any], tuple[int, Any]]) -> Iterator[int]:
    """Serves method, path, body and headers -> status and JSON in a thread for the length of a block; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            try:
                status, said = answer(self.command, self.path, body, self.headers)
            except Exception as err:  # noqa: BLE001  without an answer a client tries again for minutes
                status, said = 501, {"error": {"code": 501, "message": f"this server does not know it: {err!r}"}}
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with served(server) as port:
        yield port


def new_name() -> str:
    """A name that no topic or bucket has."""
    return f"t-{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def running_server(command: Callable[[int], list[str]], log: Path | None = None, cwd: Path | None = None) -> Iterator[int]:
    """Runs a server, whose command gets the port where it shall listen, until the block ends; yields the port.

    A server that ends before it answers is started on another port.
    """
    for _ in range(_STARTS):
        (port,) = free_ports(1)
        server = start_server(command(port), log, cwd)
        try:
            wait_until(lambda at=port, by=server: by.poll() is not None or listens(at), lambda at=port: f"no server on port {at}")
            if server.poll() is None:
                yield port
                return
        finally:
            end_process(server)
    said = log.read_text(errors="replace")[-2000:] if log else ""
    raise RuntimeError(f"{server.args!r} ended with exit code {server.returncode} before it answered: {said}")


def start_server(command: list[str], log: Path | None = None, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own, which ends with this process, however that ends."""
    with open(log or os.devnull, "ab") as said:
        command = ["/bin/sh", "-c", WITH_PARENT, "sh", *command]
        return subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True)


def listens(port: int) -> bool:
    """Whether something on this machine listens at a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _pubsub_jar() -> Path | None:
    """The emulator's jar inside the Google Cloud CLI that is on the path, or that `CLOUDSDK_ROOT` names."""
    root = os.environ.get("CLOUDSDK_ROOT") or Path(shutil.which("gcloud") or "/nonexistent/bin/gcloud").resolve().parents[1]
    jars = sorted(Path(root).glob("platform/pubsub-emulator/lib/cloud-pubsub-emulator-*-all.jar"))
    return jars[-1] if jars else None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, each another one, below those that the kernel gives to whoever does not choose."""
    ports: set[int] = set()
    while len(ports) < count:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", random.SystemRandom().choice(_PORTS)))
            ports.add(listener.getsockname()[1])
    return list(ports)
