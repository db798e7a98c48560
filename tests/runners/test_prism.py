"""Prism, Beam's portable local runner: which binary is started, and what its end is."""

import os
import platform
import shutil
import signal
import threading
import zipfile
from pathlib import Path

import apache_beam as beam
import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.runners.portability.prism_runner import PrismJobServer

from pipeline.errors import AwayError
from pipeline.runners.prism import prism_binary, running_prism
from tests.conftest import REPO
from tests.launch.jobs import needs_prism


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


def children(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@needs_prism
def test_a_prism_that_was_killed_is_one_line(monkeypatch):
    """It was three tracebacks, and then the words of gRPC."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored at the end
    options, before = PipelineOptions([f"--prism_location={REPO}/.tools/prism"]), children(os.getpid())
    ended = r"^Prism has ended \(exit code 137\); run the same command again$"
    with pytest.raises(AwayError, match=ended), running_prism(options):
        endpoint = options.view_as(PortableOptions).job_endpoint
        (shell,) = {*children(os.getpid())} - {*before}
        (prism,) = (child for child in children(shell) if "prism" in os.readlink(f"/proc/{child}/exe"))
        os.kill(prism, signal.SIGKILL)
        with grpc.insecure_channel(endpoint) as channel:
            channel.unary_unary("/no.such/method")(b"", timeout=60)
