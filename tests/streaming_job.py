"""Runs a streaming job as a user does, in a process of its own, with topics and subscriptions of its own on the emulator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.conftest import REPO
from tests.emulators import PubSubEmulator, publish
from tests.forked_jobs import ForkedJob, Moment
from tests.processes import end_group, wait_until

CONFIG = "configs/streaming_pubsub_direct.yaml"


class StreamingJob:
    """A streaming job, its input topic, and a subscription on each of its output topics.

    Args:
      emulator: Where Pub/Sub is.
      folder: For the archive and the log.
      model: SavedModel; empty: the config's.
      *flags: More flags of the job.
      config: The job's config file.
      host: What the job takes for Pub/Sub's address, where it is not the emulator's own.
      answers: Whether requests are answered as a whole.
      killed: Whether it will be killed while it has messages; Pub/Sub delivers them again soon then.
      at: What happens to it.
      forked: Whether it is a fork of a process that has the libraries; else it is a new interpreter, as a user starts it.

    Attributes:
      errors: Where standard error of a fork goes; None: to the log, too.
    """

    def __init__(
        self,
        emulator: PubSubEmulator,
        folder: Path,
        model: str,
        *flags: object,
        config: str = CONFIG,
        host: str = "",
        answers: bool = True,
        killed: bool = False,
        at: Moment | None = None,
        forked: bool = True,
    ):
        self.take = emulator.take  # takes messages that the job published
        self._host = host or emulator.host
        self.images, subscription = emulator.create()
        topics = [emulator.create() for _ in range(3)]
        self.detections, self.dead_letters, self.answers = (subscription for _, subscription in topics)
        self._topics = {subscription: topic for topic, subscription in topics}
        output, dead_letter_topic, answer_topic = (topic for topic, _ in topics)
        self.archive = folder / "archive"
        self.log = folder / "job.log"
        self.errors: Path | None = None
        self._module, self._at, self._forked = "tests.killed_stream" if killed else "pipeline.run", at, forked
        self._command = ["--config", config, "--input", subscription, "--output", output, "--archive", str(self.archive)]
        self._command += ["--dead-letter-topic", dead_letter_topic, *(["--answer-topic", answer_topic] if answers else [])]
        self._command += map(str, flags)
        self._command += ["--model", model] if model else []
        self._publisher = emulator.publisher()
        self._process: Any = None

    def start(self, killed_after: str = "", flags: tuple[str, ...] = (), until: str = "reading ") -> None:
        """Starts the process, with more flags and one of `killed_stream.MOMENTS`, and waits until it prints `until`."""
        before = self.output().count(until)
        module = "tests.killed_stream" if killed_after else self._module
        variables = {"PUBSUB_EMULATOR_HOST": self._host, "NO_GCE_CHECK": "true", "KILLED_AFTER": killed_after}
        self._process = self._started(module, [*self._command, *flags], variables)
        wait_until(lambda: self.output().count(until) > before, self.output, self._process)

    def _started(self, module: str, argv: list[str], variables: dict[str, str]) -> ForkedJob | subprocess.Popen[bytes]:
        if self._forked:
            return ForkedJob(argv, self.log, self._at, module, self.errors, variables)
        command, environment = [sys.executable, "-m", module, *argv], {**os.environ, **variables}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log, start_new_session=True)

    def publish(self, *messages: bytes | tuple[bytes, dict[str, str]]) -> None:
        """Publishes messages, each bytes or (bytes, attributes), and waits until Pub/Sub has them."""
        publish(self._publisher, self.images, *messages)

    def rest(self, subscription: str) -> list[Any]:
        """Takes all that the job has published by now: a message of this test's own comes behind it."""
        self._publisher.publish(self._topics[subscription], b"", last="").result()
        taken: list[Any] = []
        while not any("last" in message.attributes for message in taken):
            taken += self.take(subscription, 1)
        return [message for message in taken if "last" not in message.attributes]

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def signal(self, number: signal.Signals, group: bool = False) -> int:
        """Sends a signal to the job, or as a terminal does to its group, and waits for its end; returns the exit code."""
        (os.killpg if group else os.kill)(self.pid, number)
        return self.wait()

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.poll()

    def wait(self) -> int:
        """Waits for the job's end; returns the exit code."""
        return self._process.wait(timeout=240)

    def output(self) -> str:
        """What the job has printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def __enter__(self) -> StreamingJob:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            end_group(self._process)


class InlineImages:
    """One image under many names, each in a message of a job, and the first row of each by its URI, `inline:<number>`."""

    def __init__(self, job: StreamingJob, content: bytes):
        self._job = job
        self._content = content
        self.rows: dict[str, Any] = {}

    def publish(self, numbers: range) -> None:
        """Publishes the image under these numbers."""
        self._job.publish(*((self._content, {"name": str(number)}) for number in numbers))

    def answered(self, last: int) -> bool:
        """Takes what has come; whether there is a row for each image below a number."""
        for message in self._job.take(self._job.detections, 1, timeout_s=2):
            self.rows.setdefault(message.attributes["image_uri"], json.loads(message.data))
        return {f"inline:{number}" for number in range(last)} <= set(self.rows)


class CuttableProxy:
    """A TCP proxy of `host:port` whose connections can be cut, and that refuses new ones until it recovers.

    Answers come `answers_late_s` later, as from far away; requests go through at once.
    """

    def __init__(self, upstream: str, answers_late_s: float = 0.0):
        self._upstream = upstream.split(":")
        self._answers_late_s = answers_late_s
        self._open: list[asyncio.StreamWriter] = []
        self._cut = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.host = f"127.0.0.1:{asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()}"

    def cut(self) -> None:
        """Ends all connections, and refuses new ones."""
        asyncio.run_coroutine_threadsafe(self._end_connections(), self._loop).result()

    def recover(self) -> None:
        """Lets connections through again."""
        self._cut = False

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _end_connections(self) -> None:
        self._cut = True
        while self._open:
            self._open.pop().transport.abort()

    async def _connect(self, requests: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self._open.append(near)
        if self._cut:
            near.transport.abort()
            return
        answers, far = await asyncio.open_connection(*self._upstream)
        self._open.append(far)
        await asyncio.gather(self._pass_on(requests, far, 0.0), self._pass_on(answers, near, self._answers_late_s))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, late_s: float) -> None:
        with contextlib.suppress(OSError):  # cut
            while content := await source.read(1 << 16):
                self._loop.call_later(late_s, target.write, content)
        self._loop.call_later(late_s, target.close)
