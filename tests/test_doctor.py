"""A screen about this machine and this installation, which names what is broken and what to install."""

from importlib.metadata import PathDistribution

import pytest

from pipeline import doctor

METADATA = """\
Metadata-Version: 2.1
Name: hybrid-detection-pipeline
Version: 1
Provides-Extra: here
Provides-Extra: lacking
Provides-Extra: dev
Requires-Dist: numpy
{needed}
Requires-Dist: pydantic ; extra == "here"
Requires-Dist: absent-package>=2 ; extra == "lacking"
Requires-Dist: absent-tool ; extra == "dev"
"""


@pytest.fixture
def installed(tmp_path):
    """What is found for a program whose metadata has another line."""

    def findings(needed: str) -> dict[str, tuple[str, bool]]:
        (tmp_path / "METADATA").write_text(METADATA.format(needed=needed))
        return {part: (found, broken) for part, found, broken in doctor.packages(PathDistribution(tmp_path))}

    return findings


def test_what_an_extra_lacks_is_a_line_with_the_command_that_installs_it(installed):
    """It breaks nothing."""
    found = installed("Requires-Dist: pyarrow ; python_version >= '3'")
    assert found["packages"] == (f"all 2, numpy {doctor.importlib.metadata.version('numpy')}", False)
    how = "python -m pip install 'hybrid-detection-pipeline[lacking]'"
    assert found["  [lacking]"] == (f"optional: {how} (absent-package is not installed)", False)
    assert found["  [here]"] == ("installed", False)
    assert "  [dev]" not in found


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        pytest.param("Requires-Dist: absent-package", "absent-package is not installed", id="absent"),
        pytest.param("Requires-Dist: pyarrow<1", ", expected <1", id="too new"),
    ],
)
def test_a_package_that_the_program_needs_and_has_not_is_broken(installed, needed, said):
    found, broken = installed(needed)["packages"]
    assert said in found and broken


@pytest.mark.parametrize(
    ("folder", "code", "last"), [("/tmp", 0, "OK: all required parts found"), ("/absent", 1, "broken: temporary")]
)
def test_the_exit_code_says_whether_something_essential_is_broken(monkeypatch, capsys, folder, code, last):
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: folder)
    assert (doctor.main([]), capsys.readouterr().out.splitlines()[-1]) == (code, last)


def test_where_credentials_are_is_said_without_the_network_and_without_a_secret(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def found():
        return next(found for part, found, _ in doctor.findings() if part == "Amazon")

    assert found() == "no credentials found; on this cloud's machines none are needed, else aws configure"
    (path := tmp_path / ".aws" / "credentials").parent.mkdir(parents=True)
    path.write_text("secret")
    assert found() == "credentials in ~/.aws/credentials"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "secret")
    assert found() == "credentials in AWS_ACCESS_KEY_ID"


def test_emulators_that_clients_would_talk_to_are_named(monkeypatch):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "localhost:8085")
    assert ("emulators", "PUBSUB_EMULATOR_HOST=localhost:8085", False) in [*doctor.findings()]


@pytest.mark.slow
def test_a_full_examination_lists_the_devices_of_tensorflow():
    (devices,) = [found for part, found, _ in doctor.findings(full=True) if part == "devices"]
    assert devices.startswith("CPU")


def test_libraries_that_cannot_be_imported_are_broken(monkeypatch):
    """The last line of what Python says is shown."""
    monkeypatch.setattr(doctor, "_IMPORTS", "import absent_library")
    (devices,) = [each for each in doctor.findings(full=True) if each[0] == "devices"]
    assert devices[2] and devices[1].endswith("ModuleNotFoundError: No module named 'absent_library'")
