"""Settings: each checked before anything starts, each error one line that says what to change."""

import dataclasses
import datetime
import json
import pickle
import subprocess
import sys
import zoneinfo

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.config import Config, DetectConfig, ModelConfig, ReadConfig, StreamConfig, WriteConfig, load_config, settings
from pipeline.config_schema import config_schema
from pipeline.errors import ConfigError
from tests.fixtures import REPO


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
        pytest.param("xyzzy: 1", "unknown key 'xyzzy'; python -m pipeline.run --help lists all settings", id="nothing near"),
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
        pytest.param("detect: {precision: half}", "expected 'float32' or 'bfloat16' or 'int8', got 'half'", id="unknown choice"),
        pytest.param(
            "write: {export: [xls]}",
            "write.export: expected 'csv' or 'coco' or 'yolo' or 'voc' or 'cvat' or 'label-studio' or 'tfrecord', got 'xls'",
            id="choice in a list",
        ),
        pytest.param("detect: {precision: [float32]}", "expected 'float32' or 'bfloat16' or 'int8'", id="list for choice"),
        pytest.param(
            "detect: {batch_sizes: [4, 2]}", "expected ascending sizes such as [1, 2, 4, 8], got [4, 2]", id="descending"
        ),
        pytest.param("detect: {batch_sizes: [0, 2]}", "expected a number at least 1, got 0", id="bound of elements"),
        pytest.param("model: {input_hw: [416]}", "expected 2 values, got [416]", id="one of two"),
        pytest.param("model: {input_hw: [0, 416]}", "model.input_hw: expected a number at least 1, got 0", id="no height"),
        pytest.param("model: {value_range: [0, x]}", "expected a number, got 'x'", id="wrong element"),
        pytest.param("output: 5", "output: expected text, got 5", id="number for text"),
        pytest.param(
            "detect: {max_detections: 3000000000}", "expected a number at most 2147483647, got 3000000000", id="beyond 32 bits"
        ),
        pytest.param(
            f"detect: {{max_detections: 0x{'f' * 5000}}}", "expected a number at most 2147483647, got a int too long", id="digits"
        ),
        pytest.param("detect: {decode_threads: 9999}", "expected a number between 1 and 1024, got 9999", id="too many threads"),
        pytest.param("detect: {batch_sizes: [2, 2]}", "expected ascending sizes such as [1, 2, 4, 8], got [2, 2]", id="twice"),
        pytest.param("model: {value_range: [-.inf, 1]}", "expected a number at least -2147483647, got -inf", id="range from inf"),
        pytest.param("model: {input_hw: [1, 2, 3]}", "expected 2 values, got [1, 2, 3]", id="three of two"),
        pytest.param("detect: {classes: [a, 1]}", "detect.classes: expected text, got 1", id="number among names"),
        pytest.param("detect: {classes: }", "detect.classes: expected text, got None", id="nothing for a list"),
        pytest.param(
            "write: {coco_ground_truth: a.json}",
            "write.coco_ground_truth: expected coco among the exports (--export coco) with it, got 'a.json'",
            id="ground truth for nothing",
        ),
        pytest.param("time_zone: europe/zurich", "time_zone: expected a time zone such as Europe/Zurich, got 'euro", id="zone"),
        pytest.param("time_zone: ../UTC", "time_zone: expected a time zone such as", id="zone outside the folder of zones"),
        pytest.param("time_zone: Europe", "time_zone: expected a time zone such as", id="folder of zones"),
        pytest.param("dates: tomorrow", "dates: expected days such as 2026-11-20, 2026-11-01..2026-11-20, today", id="no days"),
        pytest.param("dates: 2026-11-20 10:00:00", "dates: expected days such as 2026-11-20, 2026", id="moment for a day"),
        pytest.param("dates: 2026-02-01..2026-02-30", "last 7 days'; day is out of range for month, got", id="no such day"),
        pytest.param("dates: 2026-11-02..2026-11-01", "dates: expected 1 to 3660 days between 1970-01-01", id="days backwards"),
        pytest.param("dates: last 0 days", "dates: expected 1 to 3660 days between 1970-01-01", id="no days at all"),
        pytest.param("dates: 1900-01-01..2026-11-01", "dates: expected 1 to 3660 days between 1970-01-01", id="many days"),
        pytest.param(
            "{dates: '2026-11-20', input: ['a/{date}', b/]}",
            "dates: expected none, or {date:%Y/%m/%d} in input b/, got '2026-11-20'",
            id="input without a place for days",
        ),
        pytest.param(
            "input: raw/{date}/**",
            "dates: expected days such as 2026-11-20, 2026-11-01..2026-11-20, today, yesterday or 'last 7 days', since input "
            "raw/{date}/** has a place for them, got ''",
            id="place for days that are not given",
        ),
        pytest.param(
            "input: 'raw/{date:%Y-%M-%d}/**'",
            "input: expected no directive finer than hours in {date:…} (%m is the month, %M the minute; * matches any), got "
            "'raw/{date:%Y-%M-%d}/**'",
            id="minutes for months",
        ),
        pytest.param(
            "input: 'raw/{date:%Q}/**'", "expected {date}, or strftime's directives in it such as {date:%Y/%m/%d}", id="%Q"
        ),
        pytest.param(r'input: "raw/{date:\ud800%Y}/**"', "expected {date}, or strftime's directives in it", id="no Unicode"),
        pytest.param("detct: {xla: true}", "unknown key 'detct'; did you mean 'detect'?", id="typo of a section"),
        pytest.param('"a\\nb": 1', "unknown key 'a\\nb'", id="key of two lines"),
        pytest.param('"\\ud800": 1', "unknown key '\\ud800'", id="key that is no UTF-8"),
        pytest.param('detect: {"\\ud800": 1}', "unknown key 'detect.\\ud800'", id="key of a section that is no UTF-8"),
        pytest.param(
            'detect: {precision: "\\ud800"}', "expected 'float32' or 'bfloat16' or 'int8', got", id="choice that is no UTF-8"
        ),
        pytest.param("detect: {[a]: 1}", "is no YAML", id="key that is a list"),
        pytest.param("output: 2001-99-99", "is no YAML: month must be in 1..12", id="date that is none"),
        pytest.param("output: !!bool x", "is no YAML", id="tag that does not fit"),
        pytest.param("[" * 5000, "is no YAML", id="too deep"),
        pytest.param("input: &a [*a]", "input: expected text, got [[", id="list within itself"),
        pytest.param("beam_options: {region: {a: b}}", "beam_options.region: expected text, a number, true or", id="section"),
        pytest.param("beam_options: {region: .nan}", "beam_options.region: expected text, a number, true or", id="option nan"),
        pytest.param(f"beam_options: {{a: [0x{'f' * 5000}]}}", "beam_options.a: expected text, a number", id="option of digits"),
        pytest.param("output: !!binary aGk=", "output: expected text, got b'hi'", id="bytes for text"),
        pytest.param("beam_options: {1: b}", "beam_options: expected text, got 1", id="option that is no text"),
        pytest.param("beam_options: [a]", "expected a section with keys, got ['a']", id="list for mapping"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(write_config, text, message):
    path = write_config(text)
    with pytest.raises(ConfigError) as caught:
        load_config([path], {})
    assert message in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, place):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config([str(tmp_path / place)], {})


def test_flags_win_over_the_file_and_the_file_over_defaults(write_config):
    path = write_config("input: a.jpg\noutput: out\ndetect: {score_threshold: 0.5, max_detections: 7}\nmodel:\n")
    config = load_config([path], {"detect.score_threshold": 0.75, "write.samples": 3})
    assert (config.detect.score_threshold, config.detect.max_detections, config.detect.iou_threshold) == (0.75, 7, 0.45)
    assert (config.input, config.write.samples, config.model) == (("a.jpg",), 3, Config().model)


def test_of_two_files_the_later_one_wins_key_by_key(write_config, tmp_path):
    first = write_config("output: out\ndetect: {score_threshold: 0.75, max_detections: 7}")
    later = tmp_path / "tuned.yaml"
    later.write_text("detect: {score_threshold: 0.5, precision: bfloat16}")
    config = load_config([first, str(later)], {"detect.precision": "float32"})
    assert (config.output, config.detect) == ("out", DetectConfig(score_threshold=0.5, max_detections=7))


def test_an_empty_section_of_a_later_file_leaves_the_earlier_ones(write_config, tmp_path):
    """As a section is whose keys are all commented out."""
    first = write_config("output: out\nmodel: {path: /m}\ndetect: {score_threshold: 0.75}")
    later = tmp_path / "tuned.yaml"
    later.write_text("model:\n#  path: /other\ndetect: {max_detections: 7}\nbeam_options:\n")
    config = load_config([first, str(later)], {})
    assert (config.model.path, config.detect) == ("/m", DetectConfig(score_threshold=0.75, max_detections=7))


def test_a_wrong_flag_is_named_as_a_flag():
    with pytest.raises(ConfigError, match=r"^--score-threshold: expected a number between 0\.0 and 1\.0, got 2$"):
        load_config([], {"detect.score_threshold": 2})


def test_a_wrong_value_of_the_file_counts_only_where_no_flag_replaces_it(write_config):
    path = write_config("detect: {score_threshold: high, iou_threshold: high}")
    with pytest.raises(ConfigError, match=r"detect\.iou_threshold: expected a number, got 'high'"):
        load_config([path], {"detect.score_threshold": 0.5})
    path = write_config("detect: {score_threshold: high}")
    assert load_config([path], {"detect.score_threshold": 0.5}).detect == DetectConfig(score_threshold=0.5)


def test_days_are_settled_when_they_are_said(write_config):
    """So that all of the job means the same, also after midnight."""
    config = load_config([write_config("input: raw/{date}/**")], {"dates": "yesterday", "time_zone": "Asia/Tokyo"})
    in_tokyo = datetime.datetime.now(zoneinfo.ZoneInfo("Asia/Tokyo")).date()
    before = [in_tokyo - datetime.timedelta(days=1), in_tokyo - datetime.timedelta(days=2)]  # midnight may just have passed
    assert config.dates in map(str, before)
    assert dataclasses.replace(config, output="out").dates == config.dates


def test_a_day_of_yaml_is_a_day(write_config):
    config = load_config([write_config("input: ['raw/{date:%Y/%m/%d}/**', 'list-{date}.txt']\ndates: 2026-11-20")], {})
    assert config.patterns() == {
        "raw/{date:%Y/%m/%d}/**": ("raw/2026/11/20/**",),
        "list-{date}.txt": ("list-2026-11-20.txt",),
    }


def test_without_days_an_input_stands_for_itself():
    assert Config(input=("a", "b{c}")).patterns() == {"a": ("a",), "b{c}": ("b{c}",)}


def test_a_day_that_never_was_is_one_clear_error():
    """Samoa went from 29 to 31 December 2011."""
    config = Config(input=("{date}",), dates="2011-12-30", time_zone="Pacific/Apia")
    with pytest.raises(ConfigError, match=r"^dates: expected days that there were in Pacific/Apia, got 2011-12-30$"):
        config.patterns()


def test_ground_truth_finds_its_use_in_file_or_flag(write_config):
    path = write_config("write: {coco_ground_truth: a.json}")
    assert load_config([path], {"write.export": ["coco"]}).write == WriteConfig(export=("coco",), coco_ground_truth="a.json")


@pytest.mark.parametrize(
    ("text", "section", "expected"),
    [
        pytest.param("detect: {classes: dog}", "detect", {"classes": ["dog"]}, id="one for a list"),
        pytest.param("detect: {score_threshold: 1e-3}", "detect", {"score_threshold": 0.001}, id="exponent without a point"),
        pytest.param("detect: {max_megapixels: 1}", "detect", {"max_megapixels": 1.0}, id="whole number for a number"),
        pytest.param("detect:", "detect", {}, id="section of nothing"),
        pytest.param("beam_options:", "beam_options", {}, id="options of nothing"),
        pytest.param("model: {name: 1e3}", "model", {"name": "1e3"}, id="text stays text"),
        pytest.param("beam_options: {experiments: [a, 1]}", "beam_options", {"experiments": ["a", 1]}, id="option with a list"),
    ],
)
def test_a_file_may_be_written_as_people_do(write_config, text, section, expected):
    given = Config().as_dict()[section] | expected
    assert load_config([write_config(text)], {}).as_dict() == Config().as_dict() | {section: given}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        pytest.param(
            lambda: DetectConfig(score_threshold=40),
            "DetectConfig: score_threshold: expected a number between 0.0 and 1.0, got 40",
        ),
        pytest.param(
            lambda: DetectConfig(score_treshold=0.4),
            "DetectConfig: unknown key 'score_treshold'; did you mean 'score_threshold'?",
        ),
        pytest.param(lambda: DetectConfig(classes=[5]), "DetectConfig: classes: expected text, got 5"),
        pytest.param(lambda: DetectConfig(xla=1), "DetectConfig: xla: expected true or false, got 1"),
        pytest.param(
            lambda: dataclasses.replace(DetectConfig(), batch_sizes=(2, 1)),
            "DetectConfig: batch_sizes: expected ascending sizes such as [1, 2, 4, 8], got (2, 1)",
        ),
        pytest.param(
            lambda: Config(detect={"iou_threshold": "x"}), "Config: detect.iou_threshold: expected a number, got 'x'", id="nested"
        ),
        pytest.param(lambda: Config(model=DetectConfig()), "Config: model: expected a section with keys, got DetectConfig("),
        pytest.param(
            lambda: WriteConfig(coco_ground_truth="a"),
            "WriteConfig: coco_ground_truth: expected coco among the exports (--export coco) with it, got 'a'",
        ),
    ],
)
def test_a_config_made_in_code_is_checked_like_a_file(made, message):
    with pytest.raises(ConfigError) as caught:
        made()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_lists_given_in_code_become_tuples():
    assert DetectConfig(classes=["dog"], batch_sizes=[1, 2]) == DetectConfig(classes=("dog",), batch_sizes=(1, 2))
    assert ModelConfig(class_names=["a", "b"], input_hw=[4, 5]) == ModelConfig(class_names=("a", "b"), input_hw=(4, 5))


def test_a_transform_checks_its_settings_like_a_file():
    from pipeline import DetectObjects

    transform = DetectObjects(ModelConfig("m", class_names=["a"]), classes=["a"], batch_sizes=[1, 2])
    assert transform._detect == DetectConfig(classes=("a",), batch_sizes=(1, 2))
    assert isinstance(hash((transform._model, transform._detect)), int)
    with pytest.raises(ConfigError, match=r"^DetectConfig: score_threshold: expected a number between 0\.0 and 1\.0, got 40$"):
        DetectObjects("m", score_threshold=40)


@pytest.mark.parametrize("made", [ModelConfig, DetectConfig, ReadConfig, WriteConfig, StreamConfig, Config])
def test_a_config_survives_a_pickle(made):
    assert pickle.loads(pickle.dumps(made())) == made()


def test_a_config_is_hashable_but_for_beam_options_and_cannot_change():
    config = load_config([], {})
    assert hash(config.model) == hash(Config().model)
    assert hash(config.detect) == hash(Config().detect)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.detect.xla = True


def test_every_setting_has_help_a_default_of_its_own_type_and_a_name_of_its_own():
    found = settings()
    names = [key.rpartition(".")[2] for key, _, _ in found]
    assert len(set(names)) == len(names)
    for setting in found:
        assert setting.help, setting.key
        assert "\n" not in setting.help


def values_of(schema):
    """Values that a setting of this JSON Schema may have in YAML."""
    if "anyOf" in schema:
        return st.none() | values_of({key: part for key, part in schema.items() if key != "anyOf"})
    if "enum" in schema or "examples" in schema:
        return st.sampled_from(schema.get("enum") or schema["examples"])
    low, high = max(schema.get("minimum", -1000), -1000), min(schema.get("maximum", 1000), 1000)
    match schema["type"]:
        case "array" if "items" in schema:
            return st.lists(values_of(schema["items"]), max_size=3, unique=True).map(sorted)
        case "array":
            return st.tuples(*map(values_of, schema["prefixItems"])).map(list)
        case "boolean":
            return st.booleans()
        case "string":
            return st.text(
                st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=schema.get("minLength", 0), max_size=9
            )
        case "integer":
            return st.integers(low, high)
        case "number":
            return st.floats(low, high)
    numbers = st.integers(1 - 2**63, 2**63 - 1)  # others are refused
    return st.dictionaries(st.sampled_from(["region", "project"]), numbers | st.booleans(), max_size=2)


@st.composite
def trees(draw):
    """Some settings with allowed values, nested as in a file."""
    tree = {}
    for setting in draw(st.lists(st.sampled_from(settings()), unique_by=lambda setting: setting.key, max_size=12)):
        section, _, name = setting.key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = draw(values_of(setting.schema))
    write = tree.get("write", {})
    if write.get("coco_ground_truth") is not None:
        write["export"] = ["coco"]
    if tree.get("dates"):
        tree["input"] = ["photos/{date}/**"]
    return tree


@hypothesis_settings(max_examples=150, deadline=None)
@given(trees())
def test_a_config_written_out_and_read_again_is_the_same(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(yaml.safe_dump({"max_dead_share": 0.5} | tree, allow_unicode=True), encoding="utf-8")
    config = load_config([str(path)], {})
    for section, values in tree.items():
        written = config.as_dict()[section]
        assert written == values or (isinstance(values, dict) and {key: written[key] for key in values} == values)
    path.write_text(yaml.safe_dump(config.as_dict(), allow_unicode=True), encoding="utf-8")
    assert load_config([str(path)], {}) == config


SCHEMA = jsonschema.Draft202012Validator(config_schema())


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_configs_fit_the_schema_of_editors(path):
    SCHEMA.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        pytest.param({"inputs": ["a"]}, [], id="unknown key"),
        pytest.param({"detect": {"score_threshold": 1.5}}, ["detect", "score_threshold"], id="out of bounds"),
        pytest.param({"detect": {"precision": "int4"}}, ["detect", "precision"], id="choice"),
        pytest.param({"model": {"input_hw": [416]}}, ["model", "input_hw"], id="one of two"),
        pytest.param({"beam_options": {"a": {"b": 1}}}, ["beam_options", "a"], id="section for an option"),
    ],
)
def test_the_schema_of_editors_points_at_mistakes(tree, where):
    (error,) = SCHEMA.iter_errors(tree)
    assert list(error.absolute_path) == where


@hypothesis_settings(max_examples=100, deadline=None)
@given(trees())
def test_what_is_a_config_fits_the_schema_of_editors(tree):
    SCHEMA.validate(tree)


def test_the_schema_is_written_with_the_help_of_each_setting():
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.config_schema"], cwd=REPO, capture_output=True, text=True, timeout=580, check=True
    )
    assert json.loads(done.stdout) == config_schema()
    assert all(json.dumps(setting.help)[1:-1] in done.stdout for setting in settings())
