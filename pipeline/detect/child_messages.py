"""Messages between this process and the decoding child process: a few fields as JSON, and bytes behind them."""

from __future__ import annotations

import json
import signal
import socket
import struct
from typing import Any

import numpy as np

TIMED_OUT = {signal.SIGPROF, signal.SIGALRM}  # one of these ends the child process when an image takes too long

_LENGTHS = struct.Struct("!IQ")  # of the fields, of the bytes
_MOST_FIELDS = 65_536


def send(channel: socket.socket, fields: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Sends one message; returns when the system has taken all of it.

    Raises:
      OSError: The other end has closed.
    """
    head = json.dumps(fields).encode()
    channel.sendall(_LENGTHS.pack(len(head), len(body)) + head)
    channel.sendall(body)


def receive(channel: socket.socket, most_bytes: float = float("inf")) -> tuple[dict[str, Any], np.ndarray]:
    """Waits for one message: its fields, its bytes as `(n,) uint8`.

    Raises:
      EOFError, OSError: The other end has closed.
      ValueError: It is longer than it may be, or no message.
    """
    head, body = _LENGTHS.unpack(_read(channel, _LENGTHS.size).data)
    if head > _MOST_FIELDS or body > most_bytes:
        raise ValueError(f"a message of {head} and {body} bytes")
    return json.loads(_read(channel, head).tobytes()), _read(channel, body)


def _read(channel: socket.socket, size: int) -> np.ndarray:
    buffer = np.empty(size, np.uint8)  # which is not filled twice, as a bytearray would be
    rest = buffer.data
    while rest:
        count = channel.recv_into(rest)
        if not count:
            raise EOFError("the other end has closed")
        rest = rest[count:]
    return buffer
