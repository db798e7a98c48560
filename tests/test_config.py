"""Settings: each checked before anything starts, each error one line that says what to change."""

import dataclasses
import typing

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.config import Config, load_config, settings
from pipeline.errors import ConfigError


@pytest.fixture
def write_config(tmp_path):
    def write(text):
        path = tmp_path / "job.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "expected 'key: value' lines, got NoneType", id="empty file"),
        pytest.param("- a\n", "expected 'key: value' lines, got list", id="list"),
        pytest.param("a: [1\n", "is no YAML", id="no yaml"),
        pytest.param(b"\xff\xfe\x00", "is no YAML", id="no text"),
        pytest.param("inputs: x", "unknown key 'inputs'; did you mean 'input'?", id="unknown key"),
        pytest.param(
            "detect: {score_treshold: 0.5}", "'detect.score_treshold'; did you mean 'detect.score_threshold'?", id="typo"
        ),
        pytest.param("score_threshold: 0.5", "did you mean 'detect.score_threshold'?", id="key of a section at the top"),
        pytest.param("xyzzy: 1", "known keys: beam_options, detect.batch_sizes", id="nothing near"),
        pytest.param("1: 2", "unknown key '1'", id="key that is no text"),
        pytest.param("detect: 5", "detect: expected a section with keys, got 5", id="value for a section"),
        pytest.param("detect: 0", "detect: expected a section with keys, got 0", id="falsy value for a section"),
        pytest.param(
            "detect: {score_threshold: high}", "detect.score_threshold: expected a number, got 'high'", id="text for number"
        ),
        pytest.param("detect: {score_threshold: true}", "expected a number, got True", id="bool for number"),
        pytest.param("detect: {score_threshold: 1.5}", "expected a number between 0.0 and 1.0, got 1.5", id="too high"),
        pytest.param("detect: {score_threshold: .nan}", "expected a number between 0.0 and 1.0, got nan", id="nan"),
        pytest.param("detect: {batch_timeout_ms: .inf}", "got inf", id="infinite"),
        pytest.param(f"detect: {{batch_timeout_ms: {10**400}}}", "got 1000", id="beyond all floats"),
        pytest.param("detect: {max_detections: 1.5}", "expected a whole number, got 1.5", id="fraction"),
        pytest.param("detect: {max_detections: 0}", "expected a number at least 1, got 0", id="too low"),
        pytest.param("detect: {xla: 1}", "expected true or false, got 1", id="number for bool"),
        pytest.param("detect: {precision: half}", "expected 'float32' or 'bfloat16', got 'half'", id="unknown choice"),
        pytest.param("detect: {precision: [float32]}", "expected 'float32' or 'bfloat16'", id="list for choice"),
        pytest.param(
            "detect: {batch_sizes: [4, 2]}", "expected ascending sizes such as [1, 2, 4, 8], got [4, 2]", id="descending"
        ),
        pytest.param("detect: {batch_sizes: [0, 2]}", "expected a number at least 1, got 0", id="bound of elements"),
        pytest.param("model: {input_hw: [416]}", "expected 2 values, got [416]", id="one of two"),
        pytest.param("model: {input_hw: [0, 416]}", "model.input_hw: expected a number at least 1, got 0", id="no height"),
        pytest.param("model: {value_range: [0, x]}", "expected a number, got 'x'", id="wrong element"),
        pytest.param("output: 5", "output: expected text, got 5", id="number for text"),
        pytest.param("beam_options: [a]", "expected a section with keys, got ['a']", id="list for mapping"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(write_config, text, message):
    path = write_config(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert message in str(caught.value)
    assert path in str(caught.value) or "batch_sizes" in text
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, place):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / place), {})


def test_flags_win_over_the_file_and_the_file_over_defaults(write_config):
    path = write_config("input: a.jpg\noutput: out\ndetect: {score_threshold: 0.5, max_detections: 7}\nmodel:\n")
    config = load_config(path, {"detect.score_threshold": 0.75, "write.shards": 3})
    assert (config.detect.score_threshold, config.detect.max_detections, config.detect.iou_threshold) == (0.75, 7, 0.45)
    assert (config.input, config.write.shards, config.model) == (("a.jpg",), 3, Config().model)


def test_a_wrong_flag_is_named_as_a_flag():
    with pytest.raises(ConfigError, match=r"^--score-threshold: expected a number between 0\.0 and 1\.0, got 2$"):
        load_config(None, {"detect.score_threshold": 2})


def test_a_config_is_hashable_but_for_beam_options_and_cannot_change():
    config = load_config(None, {})
    assert hash(config.model) == hash(Config().model)
    assert hash(config.detect) == hash(Config().detect)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.detect.xla = True


def test_every_setting_has_help_a_default_of_its_own_type_and_a_name_of_its_own():
    found = settings()
    names = [key.rpartition(".")[2] for key, _, _ in found]
    assert len(set(names)) == len(names)
    for key, field, _ in found:
        assert field.metadata["help"], key
        assert "\n" not in field.metadata["help"]


def values_of(hint, field):
    """Values that a setting of this type may have in YAML."""
    options, origin = typing.get_args(hint), typing.get_origin(hint)
    if type(None) in options:
        return st.none() | values_of(next(option for option in options if option is not type(None)), field)
    low, high = field.metadata.get("low", -1000), field.metadata.get("high", 1000)
    if origin is typing.Literal:
        return st.sampled_from(options)
    if origin is tuple and Ellipsis in options:
        return st.lists(values_of(options[0], field), max_size=3, unique=True).map(sorted)
    if origin is tuple:
        return st.tuples(*(values_of(option, field) for option in options)).map(list)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=9)
    if hint is int:
        return st.integers(int(-(-low // 1)), int(high))
    if hint is float:
        return st.floats(low, high)
    return st.dictionaries(st.sampled_from(["region", "project"]), st.integers() | st.booleans(), max_size=2)


@st.composite
def trees(draw):
    """Some settings with allowed values, nested as in a file."""
    tree = {}
    for key, field, hint in draw(st.lists(st.sampled_from(settings()), unique_by=lambda setting: setting[0], max_size=12)):
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = draw(values_of(hint, field))
    return tree


@hypothesis_settings(max_examples=150, deadline=None)
@given(trees())
def test_a_config_written_out_and_read_again_is_the_same(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(yaml.safe_dump({"max_dead_share": 0.5} | tree, allow_unicode=True), encoding="utf-8")
    config = load_config(str(path), {})
    for section, values in tree.items():
        written = config.as_dict()[section]
        assert written == values or (isinstance(values, dict) and {key: written[key] for key in values} == values)
    path.write_text(yaml.safe_dump(config.as_dict(), allow_unicode=True), encoding="utf-8")
    assert load_config(str(path), {}) == config
