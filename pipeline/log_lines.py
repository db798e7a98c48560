"""`LogLines` stands in for standard error while a command runs: each line gets a time stamp, or becomes a JSON object.

Whatever Python prints or logs goes through it: this program's lines and progress, warnings, and the loggers of Beam, absl and
TensorFlow. What native libraries and other processes write to the descriptor itself does not; `TF_CPP_MIN_LOG_LEVEL` mutes
TensorFlow's.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from pipeline.secrets import masked_text

FIELDS = ("run", "image", "request", "reason")  # of a record's `extra`, shown as such in JSON
_NOISY = ("apache_beam.typehints", "apache_beam.coders.coder_impl", "apache_beam.transforms.util")
_SEVERITY = re.compile(r"(error|warning): ")


class LogLines(logging.Handler):
    """Standard error as lines of a log, which prints and loggers share; thread-safe.

    Args:
      stream: Where the lines go; it stays open, also while its descriptor leads elsewhere, as during TensorFlow's import.
      as_json: One object a line, in Cloud Logging's field names
        (https://cloud.google.com/logging/docs/structured-logging); else text, with time stamps unless it is a terminal.
      quiet: Whether only errors are shown.

    Attributes:
      fields: Fields of every line in JSON, such as the run.
      last_error: The last line that began with `error: `, without that.
    """

    def __init__(self, stream: Any, *, as_json: bool = False, quiet: bool = False):
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s" if as_json else "%(levelname)s %(name)s: %(message)s"))
        self.fields: dict[str, Any] = {}
        self.last_error = ""
        self._stream = stream
        self._kept = kept_open(stream)
        self._json = as_json
        self._quiet = quiet
        self._writing = threading.RLock()
        self._partial: dict[int, str] = {}  # by thread: `print` writes a line and its end apart

    def __getattr__(self, name: str) -> Any:
        """Encoding, descriptor and all else of the stream."""
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether a person sees a terminal, on which a bar may move."""
        return not self._json and bool(self._stream.isatty())

    def flush(self) -> None:
        """Does nothing: each line is flushed."""

    def write(self, text: str) -> int:
        """Writes the complete lines of a thread; keeps the rest until its end comes."""
        *lines, rest = (self._partial.pop(threading.get_ident(), "") + text).split("\n")
        for line in filter(str.strip, lines):
            found = _SEVERITY.match(line)
            if line.startswith("error: "):
                self.last_error = masked_text(line.removeprefix("error: "))
            self._put(self.formatted(line, found[1].upper() if found else "INFO"))
        if rest:
            self._partial[threading.get_ident()] = rest
        return len(text)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of `logging`, with what is known of the image in its `extra`; it may hold ends of lines."""
        fields = {name: value for name in FIELDS if (value := getattr(record, name, None))}
        self._put(self.formatted(self.format(record), record.levelname, **fields, logger=record.name))

    def formatted(self, text: str, severity: str = "INFO", **fields: Any) -> str:
        """A line as it is written, with its end; empty if it is not to be shown. Takes no lock, for signal handlers."""
        if self._quiet and severity not in ("ERROR", "CRITICAL"):
            return ""
        now, text = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None), masked_text(text)
        if self._json:
            of_all = {"time": now.isoformat(timespec="microseconds") + "Z", "severity": severity, "message": text.strip()}
            return json.dumps({**of_all, **self.fields, **fields}) + "\n"
        plain = self._stream.isatty() or text.startswith("error: ")
        return f"{text}\n" if plain else f"{now.isoformat(timespec='seconds')}Z {text}\n"

    def close(self) -> None:
        """Writes what this thread has left, and closes the second handle."""
        self.write("\n")
        with contextlib.suppress(OSError):  # lines that could not be written
            self._kept.close() if self._kept else None
        self._kept = None
        super().close()

    def _put(self, line: str) -> None:
        out = self._kept or self._stream
        with self._writing, contextlib.suppress(OSError):  # a full disk of logs, or a reader that has left, stops no job
            out.write(line)
            out.flush()


@contextlib.contextmanager
def log_lines(*, log_format: str, log_level: str) -> Iterator[LogLines]:
    """While this lasts, standard error and `logging` write lines of this format and level.

    Beam's and TensorFlow's loggers speak at the levels `debug` and `info` only; what they say of types and coders, never.
    """
    before, root, level = sys.stderr, logging.getLogger(), logging.getLevelName(log_level.upper())
    lines = LogLines(before, as_json=log_format == "json", quiet=log_level == "error")
    levels: dict[str | None, int] = {
        None: level if level <= logging.INFO else logging.CRITICAL,
        "pipeline": level,  # a user must see what the job waits for
        **dict.fromkeys(_NOISY, logging.ERROR),
    }
    levels_before = {name: logging.getLogger(name).level for name in levels}
    for name, of_job in levels.items():
        logging.getLogger(name).setLevel(of_job)
    root.addHandler(lines)
    sys.stderr = lines
    try:
        yield lines
    finally:
        sys.stderr = before
        root.removeHandler(lines)
        for name, former in levels_before.items():
            logging.getLogger(name).setLevel(former)
        lines.close()


def bind_run_id(name: str) -> None:
    """Names the run in all JSON lines from now on."""
    if isinstance(sys.stderr, LogLines):
        sys.stderr.fields["run"] = name


def write_unlocked(text: str, severity: str = "INFO") -> None:
    """Writes a line without any lock: a signal handler may interrupt a `print`, and a stuck thread may hold its lock."""
    lines = sys.stderr
    line = lines.formatted(text, severity) if isinstance(lines, LogLines) else f"{text}\n"
    with contextlib.suppress(OSError):  # the reader has left: a signal handler must act all the same
        os.write(2, line.encode())


def kept_open(stream: Any) -> Any:
    """A second handle of standard error, which works while its descriptor leads elsewhere, as during TensorFlow's import.

    None if it has no descriptor.
    """
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors="backslashreplace")
    except (AttributeError, OSError):
        return None
