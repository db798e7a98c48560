"""Messages between this process and a decoding child process: a few fields as JSON, then bytes.

Shared memory in place of the socket was tried: as many CPU-seconds an image, since the kernel clears and maps each page.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
from typing import Any

import numpy as np

TIMED_OUT = {signal.SIGPROF, signal.SIGALRM}  # the kernel sends the child one of these when an image takes too long

_LENGTHS = struct.Struct("!IQ")  # of the fields, of the bytes
_MOST_FIELDS = 65_536


def send(channel: socket.socket, fields: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Sends one message; returns when the kernel has all of it.

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
      ValueError: The message is too long or malformed.
    """
    head, body = _LENGTHS.unpack(_read(channel, _LENGTHS.size).data)
    if head > _MOST_FIELDS or body > most_bytes:
        raise ValueError(f"a message of {head} and {body} bytes")
    return json.loads(_read(channel, head).tobytes()), _read(channel, body)


def _read(channel: socket.socket, size: int) -> np.ndarray:
    buffer = np.empty(size, np.uint8)  # a bytearray would first be filled with zeros
    rest = buffer.data
    while rest:
        count = channel.recv_into(rest)
        if not count:
            raise EOFError("the other end has closed")
        rest = rest[count:]
    return buffer
