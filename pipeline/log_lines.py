"""What a command shows: its outcome on standard output, and its log, by `logging`, on standard error.

A line of the log is for a person, or one JSON object. What a person should read, such as progress and what went wrong, goes to
the logger `console`; other records are logged under the names of their modules. What native libraries, other processes and a
bare `print` write does not pass through `logging`; `TF_CPP_MIN_LOG_LEVEL` mutes TensorFlow's.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.secrets import masked_text

console = logging.getLogger("detect-objects")
FIELDS = ("image", "request", "reason")  # of a record's `extra`, shown as such in JSON
_JOINERS = "\u200c\u200d"  # zero-width, but part of correctly written Persian, Hindi and emoji
_WARNINGS, _THREADS = "py.warnings", "threading"  # loggers of what libraries warn of, and of threads that ended by an error
_NOISY = ("apache_beam.typehints", "apache_beam.coders.coder_impl", "apache_beam.transforms.util")


def open_closed_streams() -> None:
    """Opens standard streams that the caller has closed (`2>&-`), to nowhere: files that are opened later get other numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the process ends


def say(lines: Iterable[str]) -> None:
    """Prints the outcome of a command on standard output, without secrets, in lines in which no name can steer the terminal."""
    for line in lines:
        try:
            print(printable(masked_text(line)), flush=True)
        except (
            OSError
        ) as err:  # whoever read has enough, as `head`, or the disk of the log is full: the work is done all the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(err, BrokenPipeError):
                console.warning("standard output cannot be written (%s); its lines from here on are lost", err.strerror)


def plural(number: int, noun: str, nouns: str = "") -> str:
    """A number with its noun.

    >>> plural(1, "photo"), plural(0, "photo"), plural(2, "class", "classes")
    ('1 photo', '0 photos', '2 classes')
    """
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def printable(line: str) -> str:
    r"""A line in which names cannot steer a terminal or turn a page around: what is not printable is escaped.

    >>> printable("\u202egpj.exe")
    '\\u202egpj.exe'
    """
    if line.isprintable():  # as nearly all are, such as the pictures of a page
        return line
    return "".join(c if c.isprintable() or c in _JOINERS else c.encode("unicode_escape").decode("ascii") for c in line)


def _for_person(text: str, level: int) -> str:
    """One line, without secrets, which begins with its level from `warning` on."""
    prefix = f"{logging.getLevelName(level).lower()}: " if level > logging.INFO else ""
    return prefix + printable(masked_text(text))


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has no arguments for it
    """Writes each record as a line, with secrets masked.

    Args:
      stream: Where the lines go.
      as_json: An object in Cloud Logging's field names (https://cloud.google.com/logging/docs/structured-logging); else text,
        in which a line for a person begins with its level from `warning` on.
      stamped: Whether text begins with the time; the line of an error never does.

    Attributes:
      run: The run, which every object names; empty before it is known.
      last_error: The text of the last error for a person.
    """

    def __init__(self, stream: Any, *, as_json: bool = False, stamped: bool = False):
        super().__init__(stream)
        self.run = self.last_error = ""
        self._as_json, self._stamped = as_json, stamped

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line of a record."""
        if record.name == console.name and record.levelno >= logging.ERROR:
            self.last_error = printable(masked_text(record.getMessage()))
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, without its end; takes no lock, so that a signal handler may call it."""
        text = super().format(record)  # the message, and behind it a traceback
        level, for_person = record.levelname, record.name == console.name
        now = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).replace(tzinfo=None)
        if self._as_json:
            fields = {"run": self.run} | {name: getattr(record, name, "") for name in FIELDS}
            fields |= {"logger": "" if for_person else record.name}
            line = {"time": now.isoformat(timespec="microseconds") + "Z", "severity": level, "message": masked_text(text.strip())}
            return json.dumps(line | {name: value for name, value in fields.items() if value}, default=str)
        if for_person:
            text = _for_person(text, record.levelno)
        else:
            text = "\n".join(map(printable, masked_text(f"{level} {record.name}: {text}").split("\n")))
        is_plain = not self._stamped or (for_person and record.levelno >= logging.ERROR)
        return text if is_plain else f"{now.isoformat(timespec='seconds')}Z {text}"

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name of `logging`
        """Ignores that the line cannot be written: a full disk of logs, or a reader that has left, stops no job."""
        if not isinstance(sys.exc_info()[1], (OSError, ValueError)):
            super().handleError(record)


class _OutsideOfCommands(logging.Handler):
    """Writes lines for a person where nobody takes them: the process runs no command, and its user has set up no log.

    A worker process of Beam is such a place, since launchers on this machine drop what Beam's handler sends them.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if all(type(handler).__module__.startswith("apache_beam.") for handler in logging.getLogger().handlers):
            print(_for_person(record.getMessage(), record.levelno), file=sys.stderr, flush=True)


console.setLevel(logging.INFO)
console.addHandler(_OutsideOfCommands())


@contextlib.contextmanager
def log_lines(*, log_format: str = "text", log_level: str = "warning", stamped: bool = False) -> Iterator[LineHandler]:
    """While this lasts, records from a level on are lines of a format on standard error; an outer block of this kind has its way.

    Lines for a person below `warning` are shown unless the level is `error`. Beam's and TensorFlow's loggers speak at the levels
    `debug` and `info` only; what they say of types and coders, never.
    """
    if outer := _current():
        yield outer
        return
    kept, root, level = kept_open(sys.stderr), logging.getLogger(), logging.getLevelName(log_level.upper())
    handler = LineHandler(kept or sys.stderr, as_json=log_format == "json", stamped=stamped and not sys.stderr.isatty())
    levels: dict[str | None, int] = {
        None: level if level <= logging.INFO else logging.CRITICAL,
        **dict.fromkeys(("pipeline", _WARNINGS, _THREADS), level),  # a user must see what the job waits for
        console.name: logging.ERROR if level == logging.ERROR else logging.INFO,
        **dict.fromkeys(_NOISY, logging.ERROR),
    }
    levels_before = {name: logging.getLogger(name).level for name in levels}
    for name, of_command in levels.items():
        logging.getLogger(name).setLevel(of_command)
    root.addHandler(handler)
    console.addHandler(handler)
    console.propagate = False  # handlers of the user's would write these lines once more
    logging.captureWarnings(True)
    hook, threading.excepthook = threading.excepthook, _log_exception
    try:
        yield handler
    finally:
        threading.excepthook = hook
        logging.captureWarnings(False)
        console.propagate = True
        console.removeHandler(handler)
        root.removeHandler(handler)
        for name, former in levels_before.items():
            logging.getLogger(name).setLevel(former)
        with contextlib.suppress(OSError):  # lines that could not be written
            kept.close() if kept else None


def _log_exception(raised: threading.ExceptHookArgs) -> None:
    """Logs what ended a thread."""
    if raised.exc_type is not SystemExit and raised.exc_value:
        logging.getLogger(_THREADS).error("exception in %s", raised.thread and raised.thread.name, exc_info=raised.exc_value)


def _current() -> LineHandler | None:
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)), None)


def bind_run_id(name: str) -> None:
    """Names the run in all objects from now on."""
    if log := _current():
        log.run = name


def write_unlocked(text: str, level: int = logging.INFO) -> None:
    """Writes a line without any lock: a signal handler may interrupt a write, and a stuck thread may hold the log's lock."""
    record = logging.LogRecord(console.name, level, "", 0, text, (), None)
    log = _current()
    if level >= console.level:
        with contextlib.suppress(OSError):  # the reader has left: a signal handler must act all the same
            os.write(2, f"{log.format(record) if log else _for_person(text, level)}\n".encode())


def kept_open(stream: Any) -> Any:
    """A second handle of standard error, which works while its descriptor leads elsewhere, as during TensorFlow's import.

    None if it has no descriptor.
    """
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors="backslashreplace")
    except (AttributeError, OSError):
        return None
