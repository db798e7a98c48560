"""The wheel and the sdist, as a user or a worker installs them: complete, and usable from any folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.stager import Stager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from models.base.project import PROJECT
from tests.conftest import REPO, write_bright_image
from tests.dist import base_images, build_image, build_wheel
from tests.mutants import copy_project, files_of_project

IN_THE_WHEEL = {"pipeline": "pipeline", "models": "models", "configs": "pipeline/configs"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the working tree: building writes beside setup.py."""
    copy = tmp_path_factory.mktemp("checkout")
    copy_project(copy)
    return copy


def elsewhere() -> dict[str, str]:
    """The environment of a process that nothing leads to this repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A fresh environment with the wheel in it; the packages that it needs are those of these tests."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    install = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    subprocess.run([*install, "install", "--no-deps", wheel], check=True, env=elsewhere())
    (site / "of_these_tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # comes after what is installed here
    return folder


def run_installed(installed: Path, cwd: Path, command: str, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the fresh environment."""
    command_line = [str(installed / "bin" / command), *map(str, args)]
    return subprocess.run(
        command_line, cwd=cwd, capture_output=True, text=True, timeout=580, check=False, env={**elsewhere(), **env}
    )


def test_the_wheel_holds_every_file_of_the_packages_and_the_configs(wheel):
    """Also one that is added later: weights, samples, templates."""
    named = {f"{IN_THE_WHEEL[name.split('/')[0]]}/{name.split('/', 1)[1]}" for name in files_of_project(*IN_THE_WHEEL)}
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    assert held == named


def test_the_sdist_that_beam_stages_gives_the_same_wheel(checkout, wheel, tmp_path):
    """What `--setup_file` sends to workers without a container of ours."""
    options = PipelineOptions([f"--setup_file={checkout / 'setup.py'}", "--no_save_main_session"])
    staged = Stager.extract_staging_tuple_iter(Stager.create_job_resources(options, str(tmp_path)))
    (sdist,) = [path for path, name, _ in staged if name == "workflow.tar.gz"]
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build_wheel(source, tmp_path / "wheel")) as from_sdist, zipfile.ZipFile(wheel) as from_checkout:
        assert sorted(from_sdist.namelist()) == sorted(from_checkout.namelist())
    assert (source / "requirements.lock").is_file()


def test_an_image_that_cannot_be_built_here_is_one_line(checkout, tmp_path, monkeypatch, capsys):
    """Without a program that builds one, and without its bases."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_image(checkout)
    (tmp_path / "docker").write_text('#!/bin/sh\necho one >&2\necho "no network: $3" >&2\nexit 1\n')
    (tmp_path / "docker").chmod(0o755)
    assert build_image(checkout)
    left_out = "left out: the image of deploy/Dockerfile: "
    assert capsys.readouterr().out.splitlines() == [
        f"{left_out}neither docker nor podman is installed",
        f"{left_out}its base {base_images()[0]} cannot be had: no network: {base_images()[0]}",
    ]
    assert [re.fullmatch(r"[a-z/._0-9]+:[\w.-]+", base) is None for base in base_images()] == [False, False]


def test_an_installation_without_tensorflow_needs_none_and_offers_it_as_an_extra(checkout, wheel, tmp_path):
    """It lacks nothing else."""

    def needed(built: Path) -> set[str]:
        with zipfile.ZipFile(built) as file:
            (metadata,) = [name for name in file.namelist() if name.endswith("/METADATA")]
            return {*(Parser().parsestr(file.read(metadata).decode()).get_all("Requires-Dist") or ())}

    without, of_all = needed(build_wheel(checkout, tmp_path, WITHOUT_TENSORFLOW="1")), needed(wheel)
    assert {Requirement(each).name for each in of_all - without} == {"tensorflow", "tfx-bsl"}
    assert {f'{each}; extra == "tensorflow"' for each in of_all - without} <= without


@pytest.mark.parametrize("config", ["configs/batch_gcs_direct.yaml", "batch_gcs_direct"])
def test_an_installed_copy_finds_configs_and_bundled_model(installed, tmp_path, config):
    """From another folder; nothing is written where the package is."""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 12, 30, 36))
    before = files_in(installed)
    args = ["--config", config, "--input", "in", "--output", "out", "--model", "digits", "--dry-run"]
    done = run_installed(installed, tmp_path, "detect-objects", *args, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "digits 1, 320x320 letterbox, 10 classes" in done.stdout and "input    1 image\n" in done.stdout
    assert files_in(installed) == before


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_file_of_the_same_name_here_comes_before_the_projects_own(installed, tmp_path):
    (tmp_path / "batch_gcs_direct.yaml").write_text("detect: {score_treshold: 1}\n")
    done = run_installed(installed, tmp_path, "detect-objects", "--config", "batch_gcs_direct.yaml", "--output", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown key 'detect.score_treshold'" in done.stderr


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder with a package that has a name of this program's, as a clone of YOLOv5 has."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('this is another program')\n")
    return tmp_path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="worker processes look in the current folder first before Python 3.11")
def test_the_console_command_works_among_packages_of_the_same_names(installed, clone):
    """Its worker processes do, too."""
    for name in ("a", "b"):
        write_bright_image(clone / "in" / f"{name}.png", (64, 48), (10, 12, 30, 36))
    workers = ["--direct_running_mode", "multi_processing", "--direct_num_workers", 2]
    args = ["--input", "in", "--output", "out", "--model", "digits", *workers]
    done = run_installed(installed, clone, "detect-objects", *args, XDG_CACHE_HOME=str(clone / "cache"))
    assert done.returncode == 0, done.stderr
    assert "2 images read: 2 detected" in done.stdout


def test_the_module_says_in_a_line_what_is_in_its_way_among_packages_of_the_same_names(installed, clone):
    done = run_installed(installed, clone, "python", "-m", "pipeline", "compact", "--help")
    why = f"error: Python takes {clone}/models for this program's package 'models'; use detect-objects instead"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(why) and done.stderr.count("\n") == 1


def test_demos_run_in_the_environment_that_is_active_if_the_program_is_installed_there(installed, tmp_path):
    """Else they make one, which takes minutes and gigabytes."""

    def planned(environment: Path) -> str:
        make = ["make", "--dry-run", "--always-make", "demo-streaming", f"VIRTUAL_ENV={environment}", "VENV=absent"]
        return subprocess.run(make, cwd=REPO, capture_output=True, text=True, check=True).stdout

    assert planned(installed) == f"{installed}/bin/python -m tests.demo_streaming\n"
    assert "-m venv absent" in (without := planned(tmp_path)) and without.endswith("absent/bin/python -m tests.demo_streaming\n")


def test_the_streaming_demo_needs_no_package_of_the_tests():
    of_tests = {
        canonicalize_name(each.name) for each in map(Requirement, requires(PROJECT) or ()) if each.marker and of_dev(each)
    }
    named = packages_distributions().items()
    blocked = [name for name, found in named if {canonicalize_name(each) for each in found} <= of_tests]
    assert "pytest" in blocked and "numpy" not in blocked
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import tests.demo_streaming"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def of_dev(needed: Requirement) -> bool:
    """Whether only the extra `dev` brings a package."""
    assert needed.marker
    return needed.marker.evaluate({"extra": "dev"}) and not needed.marker.evaluate({"extra": ""})


def test_make_clean_deletes_nothing_that_a_user_may_have_made():
    """README's first commands write to out/."""
    done = subprocess.run(["make", "--dry-run", "clean"], cwd=REPO, capture_output=True, text=True, check=True)
    (command,) = [line.split() for line in done.stdout.splitlines() if line.startswith("rm ")]
    assert set(command[2:]) == {".venv", ".tools", ".site", ".bench", "dist", "out/demo", "out/demo_streaming", "out/demo_flink"}
