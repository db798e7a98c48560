"""`python -m tests.benchmarks.start --shards 10000`: how long a job with nothing new takes to learn it from shards on storage.

The shards, of one row each, lie on the storage emulator, and each request waits 50 ms, as one to a bucket does. It prints the
seconds until the keys of all rows are known, which is what a job does before its first image. It also runs in an older
checkout: copy it there, and call it from that folder.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

import requests

from pipeline.listing.done_rows import DoneRows
from pipeline.results.completion import RowVersion
from pipeline.results.rows import detections_table
from pipeline.results.shards import parquet_bytes
from pipeline.storage.cloud import storage_client
from pipeline.storage.files import write_file
from tests.emulators import running_strict_gcs_emulator
from tests.shard_rows import VERSION, detected

_REQUEST_SECONDS = 0.05


def main() -> None:
    """Fills a bucket, and times the look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    shards = parser.parse_args().shards
    with running_strict_gcs_emulator() as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        storage_client().create_bucket("bench")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(_write, range(shards)))
        send = requests.Session.request

        def slow(*args, **how):
            time.sleep(_REQUEST_SECONDS)
            return send(*args, **how)

        requests.Session.request = slow
        began = time.monotonic()
        done = DoneRows("gs://bench/out", RowVersion(*VERSION)).among([detected(f"{n}.jpg").ref for n in range(shards)])
        print(f"{shards} shards: {time.monotonic() - began:.1f} s, {int((done > 0).sum())} done")


def _write(number: int) -> None:
    table = detections_table([detected(f"{number}.jpg")], VERSION, "run", 1.0)
    write_file(f"gs://bench/out/detections/20261121T020000Z-0a1b-{number:032x}.parquet", parquet_bytes(table))


if __name__ == "__main__":
    main()
