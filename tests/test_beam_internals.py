"""Each private function of Beam does what this project needs of it; after an upgrade the test of one fails by its name."""

import inspect
import re

import pytest
from apache_beam.metrics import monitoring_infos
from apache_beam.ml.inference import base
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.runners.worker.statesampler import StateSampler
from apache_beam.utils.counters import CounterFactory

from pipeline import beam_internals
from tests.fixtures import REPO


def test_end_bundles_promptly():
    """A worker samples each 20 ms, and no other default of the sampler is replaced."""
    beam_internals.end_bundles_promptly()
    assert StateSampler("a bundle", CounterFactory()).sampling_period_ms == 20
    parameters = inspect.signature(StateSampler.__init__).parameters.values()
    assert {p.name for p in parameters if p.default is not p.empty} == {"sampling_period_ms"}


def test_add_up_metrics_at_once(monkeypatch):
    """The runner takes its function from where it is replaced, and gets a list; `test_in_memory.py` has the effect."""
    monkeypatch.setattr(fn_runner, "consolidate_monitoring_infos", fn_runner.consolidate_monitoring_infos)
    beam_internals.add_up_metrics_at_once()
    infos = [monitoring_infos.int64_user_counter("images", "read", number) for number in (2, 3)]
    beams_own = monitoring_infos.int64_counter(monitoring_infos.ELEMENT_COUNT_URN, 1, pcollection="images")
    (added,) = fn_runner.consolidate_monitoring_infos(iter([*infos, beams_own]))
    assert monitoring_infos.extract_counter_value(added) == 5
    assert "consolidate_monitoring_infos(" in inspect.getsource(fn_runner.FnApiRunner.run_stages)


def test_let_inference_measure_memory(monkeypatch, caplog):
    """As in an environment without PyTorch, whichever this one is."""
    monkeypatch.setattr(base, "resource", None)
    assert base._get_current_process_memory_in_bytes() == 0 and "Resource module is not available" in caplog.text
    caplog.clear()
    beam_internals.let_inference_measure_memory()
    assert base._get_current_process_memory_in_bytes() > 2**20 and not caplog.text


@pytest.mark.parametrize(
    "private",
    [
        r"apache_beam[\w.]* import [\w, ]*\b_[a-z]\w*",
        r"apache_beam[\w.]*\._|apache_beam[\w.]*\.internal\b(?!\.gcp\.auth)",
        r"\bstatesampler\b|\bconsolidate_monitoring_infos\b|\b_jobs_client\b|\bPrismJobServer\b",
        r"\._runner\b|\._add_argparse_args\(|\._option_string_actions\b|\._negative_number_matcher\b",
    ],
)
def test_no_other_module_of_the_pipeline_uses_private_parts_of_beam_or_argparse(private):
    """An upgrade breaks one module."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (REPO / "pipeline").rglob("*.py")}
    assert {name for name, text in texts.items() if re.search(private, text)} <= {"beam_internals.py"}
