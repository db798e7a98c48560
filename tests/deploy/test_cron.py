"""`deploy/cron.md` and `deploy/systemd/`: the crontab's line is taken out of the document and run, systemd accepts the units."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from pipeline import run
from pipeline.config import Config, load_config
from tests.conftest import REPO
from tests.launch.jobs import rows_of, write_images

TEXT = (REPO / "deploy" / "cron.md").read_text()
UNITS = {path.name: path.read_text() for path in sorted((REPO / "deploy/systemd").iterdir())}
STREAM = UNITS["detect-stream.service"]
DATED, LATER = "2026/11/20", "2026/11/23"


def crontab_command() -> str:
    """The command as cron gives it to the shell: after the fifth field, without the backslashes before its percent signs."""
    (block,) = re.findall(r"```crontab\n(.*?)```", TEXT, re.DOTALL)
    (line,) = [line for line in block.splitlines() if re.match(r"[\d*]", line)]
    assert not re.search(r"(?<!\\)%", line), "cron ends the command there"
    return line.split(maxsplit=5)[5].replace(r"\%", "%")


def flags_of(command: str) -> list[str]:
    """The flags of a command as a shell or systemd starts it."""
    parts = shlex.split(command)
    return parts[parts.index("pipeline.run") + 1 :]


def flags_of_unit(unit: str) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert "%" not in line.replace("%%", ""), "systemd puts something of its own there"
    return flags_of(line.replace("%%", "%"))


def config_of(flags: list[str]) -> Config:
    """The config of a command line, which has no flag of Beam."""
    parsed, of_beam = run.make_parser().parse_known_args(flags)
    assert of_beam == []
    return load_config([str(REPO / path) for path in parsed.config], run._overrides(parsed))


def test_both_schedules_run_the_same_command_over_the_last_week():
    flags = flags_of_unit(UNITS["detect-backfill.service"])
    assert flags_of(crontab_command().partition(" > ")[0]) == flags
    config = config_of(flags)
    assert len(config.patterns()["/srv/raw/{date:%Y/%m/%d}/**"]) == 7
    assert config.when_busy == "skip" and config.allow_empty and not config.again


def test_the_unit_of_a_stream_has_a_command_of_this_program_and_time_to_end():
    """systemd deletes a private /tmp with the unit, and the watchdog writes the stacks of a stuck stream there."""
    config = config_of(flags_of_unit(STREAM))
    assert (config.mode, config.monitoring.metrics_port) == ("streaming", 9090)
    assert "TimeoutStopSec=5min" in STREAM
    (writable,) = re.findall("^ReadWritePaths=(.*)$", STREAM, re.MULTILINE)
    assert "PrivateTmp=" not in STREAM and "/tmp" in writable.split()


@pytest.fixture
def put(tmp_path, bright_model):
    """Puts what the document's paths stand for in a test into a text."""
    for day in (DATED, LATER):
        write_images(tmp_path / "raw" / day, "a.png")
    places = {
        "cd /opt/detect": f"cd {REPO}",
        "/opt/detect/.venv/bin/python": sys.executable,
        " .venv/bin/python": f" {sys.executable}",
        "/srv/models/yolov4": bright_model,
        "/srv/": f"{tmp_path}/",
        "/tmp/": f"{tmp_path}/",
        "'last 7 days'": "2026-11-18..2026-11-22",
    }
    return lambda text: re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text)


def shell(command: str) -> tuple[int, str]:
    done = subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def test_the_crontab_line_runs_is_silent_and_does_each_image_of_its_days_once_and_says_what_failed(put, tmp_path):
    for _ in ("a night", "the next one"):
        assert shell(put(crontab_command())) == (0, "")
    assert [row["image"]["uri"] for row in rows_of(tmp_path / "detections")] == [f"{tmp_path}/raw/{DATED}/a.png"]
    _, printed = shell(put(crontab_command().replace("/srv/models/yolov4", "/no/such/model")))
    assert printed.startswith("backfill: exit code 2\nerror: model /no/such/model: ")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(put, tmp_path):
    for name, text in UNITS.items():
        own = re.sub(r"^(User|Wants|After)=.*\n", "", put(text), flags=re.MULTILINE)
        (tmp_path / name).write_text(own.replace("/usr/bin/logger", "/bin/true").replace("/opt/detect", str(REPO)))
    assert len(UNITS) == 4
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)]
    environment = {"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert [line for line in done.stderr.splitlines() if "detect-" in line] == []
    assert done.returncode == 0, done.stderr
