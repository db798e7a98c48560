"""The bundled detector as a SavedModel: exported from its weights at first use, into the user's cache, for all processes.

The cache is `$XDG_CACHE_HOME`, else `~/.cache`, as https://specifications.freedesktop.org/basedir-spec says: where the package is
installed nobody may be allowed to write.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tempfile

from models.digits.export import WEIGHTS_PATH, export_digits
from models.quiet import quiet_stderr

_MODELS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def cached_digits() -> str:
    """The bundled detector's folder of versions, `<cache>/<project>/digits/<digest>`, with `1/` in it.

    The digest is of all that the export depends on, so that another version of the project has a folder of its own. Any number
    of processes may ask at once: each exports beside and renames, and whoever comes later takes what is there.

    Raises:
        OSError: the cache cannot be written.
    """
    base = os.path.join(_cache_folder(), "hybrid-detection-pipeline", "digits", _digest())
    version = os.path.join(base, "1")
    if not os.path.isdir(version):
        os.makedirs(base, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=base) as unfinished:
            exported = os.path.join(unfinished, "1")
            with quiet_stderr():
                export_digits(exported)
            try:
                os.rename(exported, version)
            except OSError:
                if not os.path.isdir(version):  # else another process was faster
                    raise
    return base


def _cache_folder() -> str:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")


def _digest() -> str:
    """Of the weights, and of the code that exports them."""
    found = hashlib.sha256()
    for path in [WEIGHTS_PATH, *sorted(glob.glob(os.path.join(glob.escape(_MODELS), "**", "*.py"), recursive=True))]:
        with open(path, "rb") as file:
            found.update(file.read())
    return found.hexdigest()[:16]
