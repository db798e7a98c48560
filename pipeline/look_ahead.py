"""Pools of threads that are all running before there is work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads run already: beside busy threads, starting one holds its starter up for milliseconds."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Barrier(threads)
    for task in [pool.submit(all_there.wait) for _ in range(threads)]:
        task.result()
    return pool
