"""The image of deploy/Dockerfile as far as this machine has it, and what a runner takes for Docker.

The file system of the image is laid out in a folder, with Beam's entry point, which `make test-spark` builds, where the
Dockerfile copies it. The Python of these tests, which has the project, stands for the image's. `docker` is this file: it starts
the Dockerfile's entry point with the arguments that the runner gives a container, and ends it when the runner says so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]  # without other imports: a runner asks every second whether a container runs
BOOT = REPO / ".tools" / "container"
IMAGE = "worker:cpu"


def lay_out(root: Path) -> Path:
    """Makes the image's folder, and one beside its files with `docker` in it, which it returns."""
    beam = Path(f"{root}{_instruction('COPY --from=beam').split()[-1]}")
    for folder in (beam, _workdir(root), root / "containers", root / "docker"):
        folder.mkdir(parents=True)
    (beam / "boot").symlink_to(BOOT)
    docker = root / "docker" / "docker"
    docker.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {root} "$@"\n')
    docker.chmod(0o755)
    return docker.parent


def started(root: Path) -> list[list[str]]:
    """The command of each container that was started."""
    return [json.loads(path.read_text())["command"] for path in root.glob("containers/*")]


def _instruction(name: str) -> str:
    joined = re.sub(r"\\\n\s*", "", (REPO / "deploy" / "Dockerfile").read_text())
    found: str = re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)[-1]
    return found


def _workdir(root: Path) -> Path:
    return Path(f"{root}{_instruction('WORKDIR')}")


def _run(root: Path, arguments: list[str]) -> str:
    """Starts a container; returns its id."""
    command = [*json.loads(_instruction("ENTRYPOINT")), *arguments]
    variables = dict(each.split("=", 1) for each in shlex.split(_instruction("ENV")))
    of_image = {name: f"{root}{value}" if value.startswith("/opt") else value for name, value in variables.items()}
    python = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT": "1",  # this Python is in a virtual environment, of which boot would make another
    }
    with (root / "log").open("ab") as log:
        process = subprocess.Popen(
            [f"{root}{command[0]}", *command[1:], f"--semi_persist_dir={root}/tmp"],
            cwd=_workdir(root),
            env={**os.environ, **of_image, **python},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    container = uuid.uuid4().hex * 2
    (root / "containers" / container).write_text(json.dumps({"command": command, "pid": process.pid}))
    return container


def _send(root: Path, container: str, number: int) -> bool:
    """Sends the entry point of a container a signal; returns whether it runs."""
    pid = json.loads((root / "containers" / container).read_text())["pid"]
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def main(root: Path, verb: str, *arguments: str) -> str:
    """Does what `docker VERB` does, of the verbs that Beam's runners call; returns what it prints."""
    if verb == "run":
        return _run(root, [*arguments[arguments.index(IMAGE) + 1 :]])
    if verb == "inspect":
        return str(_send(root, arguments[-1], 0)).lower()
    if verb == "kill":
        _send(root, arguments[-1], signal.SIGTERM)
    return ""


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), *sys.argv[2:]))
