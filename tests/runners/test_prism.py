"""Prism, Beam's portable local runner: which binary is started."""

import os
import platform
import shutil
import zipfile

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.prism_runner import PrismJobServer

from pipeline.runners.prism import prism_binary


def test_prism_is_that_of_beams_release(tmp_path, monkeypatch):
    """Neither the oldest one in Beam's cache nor what lies in the current folder."""
    for name in (f"v{beam.__version__}", "v2.70.0", "v99.0.0"):
        url = PrismJobServer(PipelineOptions([])).construct_download_url(name, platform.system(), platform.machine())
        archive = tmp_path / "cache" / os.path.basename(url)
        binary = archive.with_suffix("")
        binary.parent.mkdir(exist_ok=True)
        binary.write_text("#!/bin/sh\n")
        binary.chmod(0o755)
        with zipfile.ZipFile(archive, "w") as file:
            file.write(binary, binary.name)
    (tmp_path / ".tools").mkdir()
    shutil.copy(binary, tmp_path / ".tools" / "prism")
    monkeypatch.chdir(tmp_path)
    for variable in ("PATH", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(PrismJobServer, "BIN_CACHE", str(tmp_path / "cache"))
    folder, name = os.path.split(prism_binary(PipelineOptions([])))
    assert folder == str(tmp_path / "cache") and name.startswith(f"apache_beam-v{beam.__version__}-prism-")
