"""Bounds the cost of deflate streams (RFC 1951) that decompress slowly to few bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from pipeline.feed.headers.header import too_much

_TRUSTED = 32 << 20  # bytes of empty blocks cost 80 ns each: so many take 3 s
_SLICE = 1 << 20
_READ = 4 << 20
Stream = Sequence[memoryview]


def check_deflate(streams: Sequence[Stream], raw: int) -> None:
    """Refuses very large zlib streams whose compressed bytes hold no pixels.

    An empty dynamic block of 11 bytes costs as much as thousands of pixels; compression of real bytes adds at most a thousandth.
    Streams below 32 MB are not checked: even the worst takes only seconds.

    Args:
      streams: Zlib streams, each in one or more pieces.
      raw: Their size unpacked; no decoder unpacks more.

    Raises:
      ImageError: The streams cost too much.
    """
    if sum(len(piece) for stream in streams for piece in stream) <= _TRUSTED:
        return
    taken = given = 0
    for stream in streams:
        for more_taken, more_given in _unpack(stream):
            taken, given = taken + more_taken, given + more_given
            if given > raw:
                return
            if given < taken - taken // 16 - _SLICE:
                raise too_much(f"{taken} compressed bytes hold {given} bytes of pixels")


def _unpack(stream: Stream) -> Iterator[tuple[int, int]]:
    """(bytes read, bytes unpacked), a few megabytes at a time, up to the stream's end or its first error."""
    unpacker = zlib.decompressobj()
    for piece in stream:
        for at in range(0, len(piece), _SLICE):
            rest: bytes | memoryview = piece[at : at + _SLICE]
            taken = len(rest)
            while rest:
                try:
                    given = len(unpacker.decompress(rest, _READ))
                except zlib.error:
                    return
                yield taken, given
                taken, rest = 0, unpacker.unconsumed_tail
            if unpacker.eof:
                return
