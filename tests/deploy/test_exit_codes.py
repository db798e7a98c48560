"""The contract of exit codes: what each supervisor does after each code is what `EXIT_CODES` wants."""

import datetime
import re
import subprocess
import sys
import types
from configparser import RawConfigParser

import pytest
import yaml

from pipeline import errors
from pipeline.errors import DONE, EXIT_CODES, STOPPED, UserError
from tests.conftest import REPO

CRON = (REPO / "deploy/cron.md").read_text()
FAILURES = {code: each for code, each in EXIT_CODES.items() if code not in (DONE, STOPPED)}
UNITS = ("detect-backfill.service", "detect-stream.service")


def unit(name: str) -> RawConfigParser:
    """A unit of systemd; of a key that stands twice the last one counts, as there."""
    parsed = RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parsed.optionxform = str
    parsed.read_string((REPO / "deploy/systemd" / name).read_text())
    return parsed


def codes_in(text: str) -> set[int]:
    return {int(code) for code in text.split()}


@pytest.mark.parametrize("name", UNITS)
def test_systemd_starts_a_job_again_after_a_code_if_that_may_help(name):
    service = unit(name)["Service"]
    assert service["Restart"] == "on-failure"
    prevented = codes_in(service["RestartPreventExitStatus"])
    assert {code: code not in prevented for code in FAILURES} == {code: each.retry for code, each in FAILURES.items()}
    assert codes_in(service.get("SuccessExitStatus", "")) <= {code for code, each in EXIT_CODES.items() if not each.alarm}


@pytest.mark.parametrize("name", UNITS)
def test_systemd_raises_an_alarm_with_the_name_of_the_unit_that_has_failed(name):
    assert unit(name)["Unit"]["OnFailure"] == "detect-failed@%n.service"
    assert "%i failed" in unit("detect-failed@.service")["Service"]["ExecStart"]


def test_systemd_never_gives_up_on_a_stream_and_tries_a_backfill_anew_each_night():
    assert unit("detect-stream.service")["Unit"]["StartLimitIntervalSec"] == "0"
    backfill = unit("detect-backfill.service")["Unit"]
    assert int(backfill["StartLimitBurst"]) > 1 and int(backfill["StartLimitIntervalSec"].removesuffix("h")) < 24


def test_kubernetes_fails_a_job_at_once_after_exactly_the_codes_that_stay():
    cron_job = yaml.safe_load((REPO / "deploy/kubernetes/base/backfill.yaml").read_text())["spec"]["jobTemplate"]["spec"]
    disrupted, failed = cron_job["podFailurePolicy"]["rules"]
    assert (disrupted["action"], disrupted["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget", "status": "True"}])
    on_codes = failed["onExitCodes"]
    assert (failed["action"], on_codes["operator"]) == ("FailJob", "In")
    assert set(on_codes["values"]) == {code for code, each in EXIT_CODES.items() if each.stays}
    assert cron_job["backoffLimit"] > 0 and cron_job["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = cron_job["template"]["spec"]["containers"]
    assert on_codes["containerName"] == container["name"]


class AirflowFailException(Exception):
    """What ends a task of Airflow without a retry."""


@pytest.fixture
def airflow_task(monkeypatch):
    """The task of the DAG in the document, and how often Airflow tries it again; Airflow itself has 150 packages."""
    tasks = []

    def task(**how):
        return lambda function: lambda: tasks.append((function, how))

    monkeypatch.setitem(sys.modules, "airflow", types.ModuleType("airflow"))
    exceptions, sdk = types.ModuleType("airflow.exceptions"), types.ModuleType("airflow.sdk")
    exceptions.AirflowFailException = AirflowFailException
    sdk.dag, sdk.task = lambda **_: lambda function: function, task
    monkeypatch.setitem(sys.modules, "airflow.exceptions", exceptions)
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    (block,) = re.findall(r"```python\n(.*?)```", CRON, re.DOTALL)
    names = {}
    exec(compile(block, "cron.md", "exec"), names)
    ((function, how),) = tasks
    return names, function, how


@pytest.mark.parametrize("code", EXIT_CODES)
def test_airflow_tries_again_after_a_code_if_that_may_help(airflow_task, code):
    names, function, how = airflow_task
    assert how["retries"] > 0 and how["retry_delay"] >= datetime.timedelta(minutes=1)
    names["COMMAND"] = f"exit {code}"
    if code == DONE:
        function()
        return
    with pytest.raises(AirflowFailException if EXIT_CODES[code].stays else RuntimeError, match=f"exit code {code}"):
        function()


@pytest.mark.parametrize("code", EXIT_CODES)
def test_cron_sends_mail_after_each_code_that_alarms(code, tmp_path):
    (line,) = [line for line in CRON.splitlines() if re.match(r"[\d*]", line)]
    command = line.split(maxsplit=5)[5].replace(r"\%", "%").replace("/tmp/", f"{tmp_path}/")
    ended = re.sub(r"^cd .*?(?= > )", f"sh -c 'exit {code}'", command)
    assert ended.startswith(f"sh -c 'exit {code}' > ")
    done = subprocess.run(["/bin/sh", "-c", ended], capture_output=True, text=True, check=False)
    if EXIT_CODES[code].alarm:
        assert f"exit code {code}" in done.stdout
    if code == DONE:
        assert done.stdout == ""


def test_each_error_for_users_ends_with_a_code_of_the_table():
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, UserError)]
    assert len(classes) > 5
    assert {each.exit_code for each in classes} <= set(EXIT_CODES)
