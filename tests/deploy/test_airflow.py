"""The Airflow DAGs: their commands and requests are ones that this project takes."""

import json
import re
import runpy
import sys
import types

import pytest

from pipeline.config import load_config
from pipeline.launch.options import beam_options
from pipeline.run import _overrides, make_parser
from tests.conftest import REPO
from tests.deploy.test_flex_template import LAUNCH, PARAMETERS, nightly

DAGS = REPO / "deploy" / "airflow_backfill.py"


class Recorded:
    """Stands for a class of Airflow: keeps what it is made with."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


made: list[Recorded] = []


@pytest.fixture
def dags(monkeypatch) -> dict[str, list[dict]]:
    """What each class is made with when Airflow reads the file."""
    made.clear()
    for line, names in re.findall(r"^from (airflow\S*) import (.*)$", DAGS.read_text(), re.MULTILINE):
        module = types.ModuleType(line)
        for name in names.split(", "):
            setattr(module, name, type(name, (Recorded,), {}))
        monkeypatch.setitem(sys.modules, line, module)
    runpy.run_path(str(DAGS))
    return {
        name: [each.kwargs for each in made if type(each).__name__ == name] for name in {type(each).__name__ for each in made}
    }


def filled(value):
    """What Airflow makes of its templates, roughly."""
    text = re.sub(r"{{ var\.value\.\w+ }}", "gs://bucket", json.dumps(value))
    return json.loads(re.sub(r"{{ macros\.ds_add\(ds, -(\d)\) }}", lambda found: f"2026-11-{21 - int(found[1])}", text))


def check_flags(flags: list[str]) -> None:
    """Raises unless `pipeline.run` takes these flags."""
    ours, of_beam = make_parser().parse_known_args(flags)
    beam_options(load_config(ours.config, _overrides(ours)), of_beam)


def test_the_command_on_a_worker_is_one_that_the_parser_takes(dags):
    """The provider writes each option as --key=value, and the runner and Airflow's version beside."""
    (task,) = dags["BeamRunPythonPipelineOperator"]
    assert (task["py_options"], task["py_file"]) == (["-m"], "pipeline.run")
    options = filled(task["pipeline_options"])
    assert "{" not in options["dates"] + options["output"]
    check_flags([f"--runner={task['runner']}", *(f"--{key}={value}" for key, value in options.items()), "--labels=a=b"])


def test_the_request_to_dataflow_is_the_schedulers_own_but_for_its_days(dags):
    (task,) = dags["DataflowStartFlexTemplateOperator"]
    request, own = filled(task["body"])["launchParameter"], nightly()["launchParameter"]
    assert request.keys() == own.keys() and request["environment"].keys() == own["environment"].keys()
    given = request["parameters"]
    assert given.keys() == own["parameters"].keys()
    assert {name: given[name] for name in given if given[name] in ("true", "false")} == {
        name: own["parameters"][name] for name in given if own["parameters"][name] in ("true", "false")
    }
    regexes = {name: PARAMETERS[name].get("regexes", ()) for name in given}
    assert [name for name in given for regex in regexes[name] if not re.search(regex, given[name])] == []
    check_flags(list(LAUNCH["to_flags"](f"--{name}={value}" for name, value in given.items())))


def test_the_days_are_the_seven_before_the_run_and_a_run_meets_no_other_of_its_dag(dags):
    (on_worker,), (on_dataflow,) = dags["BeamRunPythonPipelineOperator"], dags["DataflowStartFlexTemplateOperator"]
    options, request = filled(on_worker["pipeline_options"]), filled(on_dataflow["body"])["launchParameter"]["parameters"]
    assert [options["dates"], request["dates"]] == ["2026-11-14..2026-11-20"] * 2
    assert nightly()["launchParameter"]["parameters"]["dates"] == "last 7 days"
    for dag in dags["DAG"]:
        assert dag["max_active_runs"] == 1
        assert dag["catchup"] is False
    assert {timetable.args for timetable in made if type(timetable).__name__ == "CronTriggerTimetable"} == {("0 3 * * *",)}
