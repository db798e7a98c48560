"""An importer of Keras files: exports the network of a `.keras` or HDF5 file as a SavedModel."""

from __future__ import annotations

import os

from models.export import check_output_dir
from models.progress import step
from models.quiet import quiet_stderr


class KerasError(Exception):
    """A Keras file cannot be imported; the message has one line."""


def import_keras(path: str, output_dir: str) -> None:
    """Writes the network of a Keras file as a SavedModel for serving.

    Keras's safe mode stays on. So a file with code in it, as Lambda layers have, is refused, and none of it runs.

    Args:
      path: The file.
      output_dir: Directory to write, `<model>/<integer version>`; must not exist.

    Raises:
      KerasError: Keras cannot load or export it.
      OSError: The file cannot be read, or the output cannot be written.
    """
    check_output_dir(output_dir)
    open(path, "rb").close()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with step("exporting the network"), quiet_stderr():
        import keras  # type: ignore[import-untyped]

        try:
            keras.saving.load_model(path, compile=False).export(output_dir, verbose=False)
        except Exception as err:  # whatever a layer raises
            said = " ".join(str(err).split()).partition(". ")[0][:300]
            raise KerasError(
                f"{path}: Keras {keras.__version__} cannot export it: {said}; where the code of its layers is, "
                "model.export('m/1') writes a SavedModel to import"
            ) from err
