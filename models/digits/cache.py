"""A cache of the bundled detector: the first use exports its SavedModel from the weights, for all processes of a user.

The cache is below `$XDG_CACHE_HOME`, else `~/.cache` (https://specifications.freedesktop.org/basedir-spec), since an installed
package may be read-only.
"""

from __future__ import annotations

import glob
import hashlib
import os
import subprocess
import sys
import tempfile

from models.digits.export import WEIGHTS_PATH

_MODELS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def cached_digits() -> str:
    """The bundled detector's folder of versions, `<cache>/<project>/digits/<digest>`, which contains `1/`.

    The digest covers the weights and the code of the export, so each version of the project has its own folder. Several processes
    may call this at once: each exports to a scratch folder and renames it, and the first rename wins.

    Raises:
        OSError: the cache cannot be written.
    """
    base = os.path.join(cache_folder(), "digits", _digest())
    version = os.path.join(base, "1")
    if not os.path.isdir(version):
        os.makedirs(base, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=base) as unfinished:
            exported = os.path.join(unfinished, "1")
            _export(exported)
            try:
                os.rename(exported, version)
            except OSError:
                if not os.path.isdir(version):  # otherwise another process was faster
                    raise
    return base


def _export(output: str) -> None:
    """Exports in another process: TensorFlow would start in this one before it has the settings of a job."""
    code = f"import sys; sys.path = {sys.path!r}; from models.digits.export import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  this program itself, without a shell
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"the export ended with {done.returncode}"])[-1])


def cache_folder() -> str:
    """This project's folder in the user's cache."""
    return os.path.join(_cache_folder(), "hybrid-detection-pipeline")


def _cache_folder() -> str:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")


def _digest() -> str:
    found = hashlib.sha256()
    for path in [WEIGHTS_PATH, *sorted(glob.glob(os.path.join(glob.escape(_MODELS), "**", "*.py"), recursive=True))]:
        with open(path, "rb") as file:
            found.update(file.read())
    return found.hexdigest()[:16]
