"""`make dist`: wheel and sdist in dist/, the wheel tried in an empty environment, and the image where its bases can be had.

Exit code 0: all that can be built here is built, and the wheel works; 1: it does not, or the image cannot be built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from string import Template

from tests.fixtures import REPO
from tests.mutants import copy_project

DIST = REPO / "dist"
DOCKERFILE = REPO / "deploy" / "Dockerfile"
IMAGE = "detect-objects"
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def main() -> int:
    """Builds and tries; returns the exit code."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")  # building writes beside setup.py
        copy_project(checkout)
        wheel, sdist = build_wheel(checkout, DIST), build_sdist(checkout, DIST)
        print(f"built: {wheel.relative_to(REPO)}, {sdist.relative_to(REPO)}", flush=True)
        is_good = tried(wheel, Path(folder))
        return 0 if is_good and build_image(checkout) else 1


def build_wheel(source: Path, folder: Path, **env: str) -> Path:
    """Builds the wheel of a checkout, or of an unpacked sdist, with these variables in the environment."""
    wheel = [sys.executable, *_PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(wheel, check=True, env={**os.environ, **env})
    (built,) = folder.glob("*.whl")
    return built


def build_sdist(source: Path, folder: Path) -> Path:
    """Builds the sdist of a checkout."""
    sdist = [sys.executable, "-c", _SDIST, folder]
    subprocess.run(sdist, cwd=source, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (built,) = folder.glob("*.tar.gz")
    return built


def tried(wheel: Path, folder: Path) -> bool:
    """Installs a wheel in an empty environment, and runs the doctor and a small job there; whether both succeed."""
    environment, photos = folder / "environment", folder / "photos"
    venv.create(environment, with_pip=True)
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([environment / "bin" / "python", *_PIP, "install", wheel], cwd=folder, check=True, env=outside)
    megabytes = sum(file.stat().st_size for file in environment.rglob("*") if file.is_file() and not file.is_symlink()) / 1e6
    print(f"installed in an empty environment: {megabytes:,.0f} MB", flush=True)
    shutil.copytree(REPO / "models" / "digits" / "samples", photos)
    job = ["--input", "photos/", "--output", "out/", "--model", "digits"]
    codes = [
        subprocess.run([environment / "bin" / "detect-objects", *command], cwd=folder, check=False, env=outside).returncode
        for command in (["doctor"], job)
    ]
    return codes == [0, 0]


def build_image(checkout: Path) -> bool:
    """Builds the image of deploy/Dockerfile, or says in a line why it is left out; whether nothing fails."""
    if lacks := lacks_for_image():
        print(f"left out: the image of deploy/Dockerfile: {lacks}")
        return True
    build = [_builder(), "build", "--file", checkout / "deploy" / "Dockerfile", "--tag", IMAGE, checkout]
    is_built = subprocess.run(build, check=False).returncode == 0
    print(f"built: the image {IMAGE}" if is_built else "the image cannot be built", flush=True)
    return is_built


def lacks_for_image() -> str:
    """What building the image lacks here, in a line; empty where its bases can be had."""
    if not (builder := _builder()):
        return "neither docker nor podman is installed"
    for base in base_images():
        pulled = subprocess.run([builder, "pull", "--quiet", base], capture_output=True, text=True, check=False)
        if pulled.returncode:
            return f"its base {base} cannot be had: {(pulled.stderr.strip().splitlines() or ['?'])[-1]}"
    return ""


def base_images() -> list[str]:
    """The images that the Dockerfile begins from, with the defaults of its arguments."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    return [Template(base).substitute(defaults) for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE)]


def _builder() -> str:
    return shutil.which("docker") or shutil.which("podman") or ""


if __name__ == "__main__":
    sys.exit(main())
