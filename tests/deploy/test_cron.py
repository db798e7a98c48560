"""`deploy/cron.md` and `deploy/systemd/`: the crontab's line is taken out of the document and run, systemd accepts the units."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import run
from pipeline.config import Config, load_config
from tests.conftest import REPO, write_bright_image

TEXT = (REPO / "deploy" / "cron.md").read_text()
UNITS = {path.name: path.read_text() for path in sorted((REPO / "deploy/systemd").iterdir())}
DATED = "2026/11/20"


def crontab_command() -> str:
    """The command as cron gives it to the shell: after the fifth field, without the backslashes before its percent signs."""
    (block,) = re.findall(r"```crontab\n(.*?)```", TEXT, re.DOTALL)
    (line,) = [line for line in block.splitlines() if re.match(r"[\d*]", line)]
    assert not re.search(r"(?<!\\)%", line), "cron ends the command there"
    return line.split(maxsplit=5)[5].replace(r"\%", "%")


def systemd_command(unit: str = "detect-backfill.service") -> list[str]:
    """The command as systemd starts it."""
    (line,) = re.findall(r"^ExecStart=(.*)$", UNITS[unit], re.MULTILINE)
    assert not re.search(r"(?<!%)%(?!%)", line.replace("%%", "")), "systemd puts something of its own there"
    return shlex.split(line.replace("%%", "%"))


def flags_of(command: list[str]) -> list[str]:
    return command[command.index("pipeline.run") + 1 :]


def config_of(flags: list[str]) -> Config:
    """The config of a command line, which has no flag of Beam."""
    parsed, of_beam = run.make_parser().parse_known_args(flags)
    assert of_beam == []
    return load_config([str(REPO / path) for path in parsed.config], run._overrides(parsed))


def test_both_schedules_run_the_same_command():
    cron = shlex.split(crontab_command().partition(" > ")[0])
    assert flags_of(cron) == flags_of(systemd_command())


def test_its_flags_are_settings_and_its_days_are_days():
    config = config_of(flags_of(systemd_command()))
    assert len(config.patterns()["/srv/raw/{date:%Y/%m/%d}/**"]) == 7
    assert config.when_busy == "skip" and config.allow_empty and not config.again


def test_the_unit_of_a_stream_has_a_command_of_this_program_and_time_to_end():
    config = config_of(flags_of(systemd_command("detect-stream.service")))
    assert (config.mode, config.monitoring.metrics_port) == ("streaming", 9090)
    unit = UNITS["detect-stream.service"]
    assert "TimeoutStopSec=5min" in unit and "RestartPreventExitStatus=2" in unit


def test_the_stacks_of_a_stuck_stream_outlast_its_unit():
    """systemd deletes a private /tmp with the unit; the watchdog writes into the folder of temporary files."""
    unit = UNITS["detect-stream.service"]
    (writable,) = re.findall("^ReadWritePaths=(.*)$", unit, re.MULTILINE)
    assert "PrivateTmp=" not in unit and "/tmp" in writable.split()


@pytest.fixture
def places(tmp_path, bright_model) -> dict[str, str]:
    """What the document's paths stand for in a test."""
    write_bright_image(tmp_path / "raw" / DATED / "a.png", (64, 48), (10, 10, 30, 30))
    (tmp_path / "bin").mkdir()
    return {
        "cd /opt/detect": f"cd {REPO}",
        "/opt/detect/.venv/bin/python": sys.executable,
        " .venv/bin/python": f" {sys.executable}",
        "/srv/models/yolov4": bright_model,
        "/srv/": f"{tmp_path}/",
        "/tmp/": f"{tmp_path}/",
        "'last 7 days'": "2026-11-18..2026-11-22",
    }


def put(text: str, places: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text)


def shell(command: str) -> tuple[int, str]:
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_crontab_line_runs_is_silent_and_does_no_image_twice(places, tmp_path):
    for _ in ("a night", "the next one"):
        assert shell(put(crontab_command(), places)) == (0, "")
    rows = [json.loads(line) for path in Path(tmp_path, "detections", "detections").glob("*.jsonl") for line in path.open()]
    assert [row["image"]["uri"] for row in rows] == [f"{tmp_path}/raw/{DATED}/a.png"]


def test_the_crontab_line_says_what_failed(places):
    said = shell(put(crontab_command(), {**places, "/srv/models/yolov4": "/no/such/model"}))[1]
    assert said.startswith("backfill: exit code 2\nerror: model /no/such/model: ")


def test_systemd_takes_the_units(places, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    for name, text in UNITS.items():
        own = re.sub(r"^(User|Wants|After)=.*\n", "", put(text, places), flags=re.MULTILINE)
        (tmp_path / name).write_text(own.replace("/usr/bin/logger", "/bin/true").replace("/opt/detect", str(REPO)))
    assert sorted(UNITS) == [
        *("detect-backfill-failed.service", "detect-backfill.service", "detect-backfill.timer", "detect-stream.service")
    ]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    assert [line for line in done.stderr.splitlines() if "detect-" in line] == []
    assert done.returncode == 0, done.stderr
