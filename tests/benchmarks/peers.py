"""The environments of other frameworks: one virtual environment for each below `.bench/envs`, with pinned versions."""

from __future__ import annotations

import subprocess
import sys

from tests.benchmarks.contenders import PEER_REQUIREMENTS, PEERS_ALSO_NEED
from tests.benchmarks.images import BENCH


def make_environments() -> None:
    """Makes what is missing or has other versions."""
    for name, requirements in PEER_REQUIREMENTS.items():
        folder, wanted = BENCH / "envs" / name, "\n".join([*requirements, *PEERS_ALSO_NEED])
        ready = folder / "ready.txt"
        if ready.exists() and ready.read_text() == wanted:
            continue
        print(f"making {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted.split("\n")], check=True)
        ready.write_text(wanted)


if __name__ == "__main__":
    make_environments()
