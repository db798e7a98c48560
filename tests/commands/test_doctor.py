"""A screen about this machine and this installation, which names what is broken and what to install."""

import importlib.metadata
import sys

import pytest

from pipeline.commands import doctor

METADATA = """\
Metadata-Version: 2.1
Name: hybrid-detection-pipeline
Version: 1
Provides-Extra: here
Provides-Extra: lacking
Provides-Extra: dev
Requires-Dist: numpy
Requires-Dist: {needed}
Requires-Dist: pydantic ; extra == "here"
Requires-Dist: absent-package>=2 ; extra == "lacking"
Requires-Dist: absent-tool ; extra == "dev"
"""
NUMPY = importlib.metadata.version("numpy")


@pytest.mark.parametrize(
    ("needed", "said", "broken"),
    [
        pytest.param("pyarrow ; python_version >= '3'", f"all 2, numpy {NUMPY}", False, id="all there"),
        pytest.param("absent-package", "absent-package is not installed", True, id="absent"),
        pytest.param("numpy<1", f"numpy is {NUMPY}, expected <1", True, id="too new"),
    ],
)
def test_a_package_that_the_program_lacks_is_broken_and_one_of_an_extra_is_a_line_with_the_command(
    tmp_path, needed, said, broken
):
    (tmp_path / "METADATA").write_text(METADATA.format(needed=needed))
    how = "optional: python -m pip install 'hybrid-detection-pipeline[lacking]' (absent-package is not installed)"
    assert [*doctor.packages(importlib.metadata.PathDistribution(tmp_path))] == [
        ("packages", said, broken),
        ("  [here]", "installed", False),
        ("  [lacking]", how, False),
    ]


@pytest.mark.parametrize(
    ("folder", "code", "last"), [("/tmp", 0, "OK: all required parts found"), ("/absent", 1, "broken: temporary")]
)
def test_the_exit_code_says_whether_something_essential_is_broken(monkeypatch, capsys, folder, code, last):
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: folder)
    assert (doctor.main([]), capsys.readouterr().out.splitlines()[-1]) == (code, last)


def test_tensorrt_is_installed_where_its_libraries_are(tmp_path, monkeypatch):
    """With ONNX Runtime alone it was said to be."""
    pytest.importorskip("onnxruntime", reason="the extra onnxruntime is not installed")
    monkeypatch.setitem(sys.modules, "tensorrt", None)

    def shown():
        return next(found for part, found, _ in doctor.findings() if part == "  tensorrt")

    assert shown() == "not installed; ONNX file: GPU (float32, float16)"
    monkeypatch.delitem(sys.modules, "tensorrt")
    (tmp_path / "tensorrt.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shown() == "ONNX file: GPU (float32, float16)"


def test_where_credentials_and_emulators_are_is_said_without_the_network_and_without_a_secret(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("secret")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "secret")
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "localhost:8085")
    found = {part: found for part, found, _ in doctor.findings()}
    assert found["Google"] == "credentials in GOOGLE_APPLICATION_CREDENTIALS"
    assert found["Amazon"] == "credentials in ~/.aws/credentials"
    assert found["Azure"] == "no credentials found; on this cloud's machines none are needed, else az login"
    assert found["emulators"] == "PUBSUB_EMULATOR_HOST=localhost:8085", "clients would talk to it"


@pytest.mark.slow
def test_a_full_examination_lists_the_devices_of_tensorflow():
    (devices,) = [found for part, found, _ in doctor.findings(full=True) if part == "devices"]
    assert devices.startswith("CPU")


def test_libraries_that_cannot_be_imported_are_broken(monkeypatch):
    """The last line of what Python says is shown."""
    monkeypatch.setattr(doctor, "_IMPORTS", "import absent_library")
    (devices,) = [each for each in doctor.findings(full=True) if each[0] == "devices"]
    assert devices[2] and devices[1].endswith("ModuleNotFoundError: No module named 'absent_library'")


def test_it_says_whether_the_image_for_dataflow_fits_this_installation(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "OF_DOCKERFILE", doctor.here())
    assert doctor.main(["--for", "dataflow"]) == 0
    monkeypatch.setattr(doctor, "OF_DOCKERFILE", doctor.here()._replace(python="3.9"))
    assert doctor.main(["--for", "dataflow"]) == 1
    assert f"build the image with --build-arg PYTHON={doctor.here().python} --build-arg BEAM=" in capsys.readouterr().out
