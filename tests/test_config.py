"""Settings: each checked before anything starts, each error one line that says what to change."""

import dataclasses
import datetime
import re
import time
import zoneinfo

import pytest

from models.metadata import DetectorMetadata, metadata_to_json
from pipeline.config import Config, DetectConfig, ModelConfig, check_applies, load_config, settings
from pipeline.errors import ConfigError
from pipeline.results.completion import RowVersion


@pytest.fixture
def write_config(tmp_path):
    def write(text):
        (tmp_path / "job.yaml").write_text(text)
        return str(tmp_path / "job.yaml")

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "expected 'key: value' lines, got NoneType", id="empty file"),
        pytest.param("output: !!bool x", "is no YAML", id="tag that does not fit"),
        pytest.param(
            "detect: {score_treshold: 0.5}", "'detect.score_treshold'; did you mean 'detect.score_threshold'?", id="typo"
        ),
        pytest.param("detct: {device: cpu}", "unknown key 'detct'; did you mean 'detect'?", id="typo of a section"),
        pytest.param("score_threshold: 0.5", "did you mean 'detect.score_threshold'?", id="key of a section at the top"),
        pytest.param("detect: {conf: 0.4}", "'detect.conf'; did you mean 'detect.score_threshold'?", id="another tool's"),
        pytest.param(
            "write: {view: false}", "unknown key 'write.view'; files of rows are Parquet alone; detect-objects rows", id="0.1.0"
        ),
        pytest.param(
            "detect:\n  precision: bfloat16\nwrite: {samples: 1}\n'detect': {device: cpu}",
            "'detect' stands in lines 1 and 4; leave one of them",
            id="section twice",
        ),
        pytest.param("detect: {device: cpu,\n  device: gpu}", "'device' stands in lines 1 and 2", id="key twice"),
        pytest.param("xyzzy: 1", "unknown key 'xyzzy'; python -m pipeline.run --help-all lists all settings", id="nothing near"),
        pytest.param("1: 2", "expected keys that are strings, got 1", id="key that is no text"),
        pytest.param("detect: 5", "detect: expected a section with keys, got 5", id="value for a section"),
        pytest.param("detect: {score_threshold: 1.5}", "expected at most 1, got 1.5", id="too high"),
        pytest.param("detect: {max_megapixels: 22907}", "max_megapixels: expected at most 20000, got 22907", id="a slot"),
        pytest.param(
            "detect: {precision: half}", "expected 'float32', 'bfloat16', 'float16' or 'int8', got 'half'", id="unknown choice"
        ),
        pytest.param("detect: {device: gpu:x}", "expected auto, cpu, gpu or gpu:<number>, got 'gpu:x'", id="device"),
        pytest.param("write: {export: [xls]}", "write.export: expected 'csv', 'coco', 'yolo'", id="choice in a list"),
        pytest.param(
            "detect: {batch_sizes: [4, 2]}", "expected ascending sizes such as [1, 2, 4, 8], got [4, 2]", id="descending"
        ),
        pytest.param("model: {input_hw: [416]}", "model.input_hw: expected 2 values, got [416]", id="one of two"),
        pytest.param("output: 5", "output: expected string, got 5", id="number for text"),
        pytest.param("detect: {classes: }", "detect.classes: expected string, got None", id="nothing for a list"),
        pytest.param("dates: tomorrow", "dates: expected days such as 2026-11-20, 2026-11-01..2026-11-20, today", id="no days"),
        pytest.param("dates: 2026-11-20 10:00:00", "dates: expected days such as 2026-11-20, 2026", id="moment for a day"),
        pytest.param(
            "{dates: '2026-11-20', input: ['a/{date}', b/]}",
            "dates: expected none, or {date:%Y/%m/%d} in input b/, got '2026-11-20'",
            id="input without a place for days",
        ),
        pytest.param("input: raw/{date}/**", "since input raw/{date}/** has a place for them, got ''", id="place without days"),
        pytest.param("input: 'raw/{date:%Y-%M-%d}/**'", "input: expected no directive finer than days in {date:…}", id="minutes"),
        pytest.param("beam_options: {region: {a: b}}", "beam_options.region: expected text, a number, true or", id="section"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(write_config, text, message):
    path = write_config(text)
    with pytest.raises(ConfigError, match=f"^[^\n]*{re.escape(path)}[^\n]*{re.escape(message)}[^\n]*$"):
        load_config([path], {})


@pytest.mark.parametrize("key", [each.key for each in settings() if each.schema.get("type") in ("integer", "number")])
def test_yes_is_no_number(write_config, key):
    section, _, name = key.rpartition(".")
    path = write_config(f"{section}: {{{name}: yes}}" if section else f"{name}: yes")
    with pytest.raises(ConfigError, match=f"{key}: expected number, got True"):
        load_config([path], {})


def test_a_key_that_is_merged_in_may_stand_again(write_config):
    text = "detect: &shared {score_threshold: 0.5, tiles: 640}\nbeam_options: {<<: *shared, tiles: 320}"
    assert load_config([write_config(text)], {}).beam_options == {"score_threshold": 0.5, "tiles": 320}


def test_flags_win_over_the_file_and_the_file_over_defaults(write_config):
    path = write_config("input: a.jpg\noutput: out\ndetect: {score_threshold: 0.5, max_detections: 7}\nmodel:\n")
    config = load_config([path], {"detect.score_threshold": 0.75, "write.samples": 3})
    assert (config.detect.score_threshold, config.detect.max_detections, config.detect.iou_threshold) == (0.75, 7, 0.45)
    assert (config.input, config.write.samples, config.model) == (("a.jpg",), 3, Config().model)


def test_of_two_files_the_later_one_wins_key_by_key(write_config, tmp_path):
    """A section whose keys are all commented out leaves the earlier ones."""
    first = write_config("output: out\nmodel: {path: /m}\ndetect: {score_threshold: 0.75, max_detections: 7}")
    later = tmp_path / "tuned.yaml"
    later.write_text("model:\n#  path: /other\ndetect: {score_threshold: 0.5, precision: bfloat16}\nbeam_options:\n")
    config = load_config([first, str(later)], {"detect.precision": "float32"})
    assert (config.output, config.model.path) == ("out", "/m")
    assert config.detect == DetectConfig(score_threshold=0.5, max_detections=7)


def test_a_wrong_value_of_the_file_counts_only_where_no_flag_replaces_it(write_config):
    path = write_config("detect: {score_threshold: high, iou_threshold: high}")
    with pytest.raises(ConfigError, match=r"detect\.iou_threshold: expected number, got 'high'"):
        load_config([path], {"detect.score_threshold": 0.5})
    path = write_config("detect: {score_threshold: high}")
    assert load_config([path], {"detect.score_threshold": 0.5}).detect == DetectConfig(score_threshold=0.5)


def test_days_are_settled_when_they_are_said_in_the_time_zone_of_the_environment(write_config, monkeypatch):
    """So that all of the job means the same, also after midnight."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        config = load_config([write_config("input: raw/{date}/**")], {"dates": "yesterday"})
    finally:
        monkeypatch.undo()
        time.tzset()
    in_tokyo = datetime.datetime.now(zoneinfo.ZoneInfo("Asia/Tokyo")).date()
    assert config.dates in {str(in_tokyo - datetime.timedelta(days=days)) for days in (1, 2)}  # midnight may just have passed
    assert dataclasses.replace(config, output="out").dates == config.dates


def test_a_day_of_yaml_is_a_day(write_config):
    config = load_config([write_config("input: ['raw/{date:%Y/%m/%d}/**', 'list-{date}.txt']\ndates: 2026-11-20")], {})
    assert config.patterns() == {"raw/{date:%Y/%m/%d}/**": ("raw/2026/11/20/**",), "list-{date}.txt": ("list-2026-11-20.txt",)}


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


def test_a_transform_checks_its_settings_like_a_file():
    from pipeline import DetectObjects

    transform = DetectObjects(ModelConfig("m", class_names=["a"]), classes=["a"], batch_sizes=[1, 2])
    (spec,) = transform._handler._load.args
    assert spec.detect == DetectConfig(classes=("a",), batch_sizes=(1, 2))
    assert isinstance(hash(spec), int)
    with pytest.raises(ConfigError, match="score_threshold"):
        DetectObjects("m", score_threshold=40)


def test_a_file_describes_a_model_and_given_keys_win(tmp_path):
    """As JSON, such as a model's own detector.json, or as YAML; a job has its keys, not its path, which workers may not have."""
    metadata = DetectorMetadata("m", (4, 5), "stretch", ("a",), box_format="yxyx")
    (tmp_path / "detector.json").write_text(metadata_to_json(metadata))
    given = {"model.description": str(tmp_path / "detector.json"), "model.class_names": ["b"]}
    model = load_config([], given).model
    assert (model.name, model.input_hw, model.box_format, model.class_names) == ("m", (4, 5), "yxyx", ("b",))
    assert model == ModelConfig(description=str(tmp_path / "detector.json"), class_names=["b"])
    assert model.description is None
    for text, said in (
        ("box_fromat: yxyx", "unknown key 'model.box_fromat'; did you mean 'model.box_format'?"),
        ("[a]", "expected 'key: value' lines"),
    ):
        (tmp_path / "detector.json").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_config([], given)


def test_every_setting_has_help_a_default_of_its_own_type_and_a_name_of_its_own():
    found = settings()
    names = [key.rpartition(".")[2] for key, _, _ in found]
    assert len(set(names)) == len(names)
    described = {f"model.{field.name}" for field in dataclasses.fields(DetectorMetadata)}
    assert {setting.key for setting in found if not setting.help} <= described
    assert not any("\n" in setting.help for setting in found)


def another(setting):
    """A value that a setting takes and that is not its default."""
    if "enum" in setting.schema:
        return next(value for value in setting.schema["enum"] if value != setting.default)
    number = 0.75 if setting.schema.get("maximum") == 1 else 90.0
    of_kind = {"boolean": not setting.default, "number": number, "array": ["csv"], "string": "2026-11-20"}
    return of_kind[setting.schema["type"]]


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.key)
def test_a_setting_of_any_section_decides_on_rows_or_dead_letters_as_it_declares(setting):
    """`identity="rows"` used to do nothing outside of the section detect, and nobody was told."""
    before, after = load_config([], {}).as_dict(), load_config([], {}).as_dict()
    section, _, name = setting.key.rpartition(".")
    (after[section] if section else after)[name] = ["another"]
    changed = [one != other for one, other in zip(RowVersion.of(before)[2:], RowVersion.of(after)[2:], strict=True)]
    assert changed == {"rows": [True, True], "limits": [False, True], "none": [False, False]}[setting.identity]


@pytest.mark.parametrize("setting", [each for each in settings() if each.applies], ids=lambda setting: setting.key)
def test_a_setting_that_the_job_would_not_use_is_refused(setting):
    """An archive that a batch job does not write, say; one that has its default asks for nothing."""
    modes = {"batch", "streaming"}
    (other,) = modes - {setting.applies}
    places = {"input": ["raw/{date}/**"]} if setting.key == "dates" else {}
    for mode in modes:
        check_applies(load_config([], {"mode": mode}))
    check_applies(load_config([], {**places, "mode": setting.applies, setting.key: another(setting)}))
    with pytest.raises(ConfigError, match=f"^{setting.key}: expected --mode {setting.applies}, since a .* does not use it"):
        check_applies(load_config([], {**places, "mode": other, setting.key: another(setting)}))
