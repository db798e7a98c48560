"""Whether the live page's memory stays flat in Chromium, beside a stream under load: `python -m tests.benchmarks.live_page`.

Exit code 0: it does; 1: it grew by more than a tenth between the first fifth of the time and its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.bright_model import export_bright_model
from tests.conftest import write_bright_image
from tests.emulators import free_ports, running_pubsub_emulator
from tests.monitoring.browser import memory_of, running_chromium
from tests.streaming_job import StreamingJob

_PAUSE_S = 0.1


def _least(page: object) -> dict[str, float]:
    """The least of five looks: an update in between adds the nodes that it replaces."""
    seen = [memory_of(page) for _ in range(5)]
    return {name: min(each[name] for each in seen) for name in seen[0]}


def main() -> int:
    """Runs the stream and the page; prints what the page uses."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--minutes", type=float, default=10.0)
    seconds = flags.parse_args().minutes * 60
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as made, running_pubsub_emulator() as emulator, running_chromium() as browser:
        os.environ["PUBSUB_EMULATOR_HOST"] = emulator.host
        folder = Path(made)
        model = export_bright_model(folder / "saved" / "1")
        write_bright_image(folder / "bright.png", (640, 480), (100, 120, 300, 360))
        content = (folder / "bright.png").read_bytes()
        with StreamingJob(emulator, folder, model, "--page-port", port, forked=False) as job:
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            started, number, used = time.monotonic(), 0, []
            for share in (0.2, 1.0):
                while time.monotonic() - started < share * seconds:
                    job.publish(
                        *((content, {"name": f"{number + i}.png"}) for i in range(4)), (b"no image", {"name": f"{number}.txt"})
                    )
                    number += 4
                    time.sleep(_PAUSE_S)
                used.append(_least(page))
            state = page.inner_text("#connection")
            code = job.signal(signal.SIGTERM)
    grown = [name for name in used[0] if used[1][name] > used[0][name] * 1.1]
    print(
        json.dumps(
            {"images": number, "seconds": round(seconds), "early": used[0], "late": used[1], "page": state, "exit": code},
            indent=2,
        )
    )
    print(*[f"{name} grew" for name in grown] or ["flat"], sep="\n")
    return int(bool(grown) or state != "live" or code != 0)


if __name__ == "__main__":
    sys.exit(main())
