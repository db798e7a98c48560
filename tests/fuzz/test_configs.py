"""Whatever stands in a config file, in flags, or in keyword arguments: a config, or one line that says what is wrong."""

import pickle

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.config import Config, load_config, settings
from pipeline.errors import ConfigError
from pipeline.run import _overrides, make_parser

NAMES = [setting.name for setting in settings()] + ["model", "detect", "read", "write", "stream"]
FLAGS = [flag for setting in settings() if setting.flag for flag in (setting.flag, setting.flag.replace("--", "--no-", 1))]

odd_texts = st.sampled_from(["", "1e-3", "-1,1", "nan", ".inf", "0x10", "1_0", "²", "-", "a,b", "float32", "gs://"])
texts = st.text(max_size=12) | odd_texts
numbers = st.integers() | st.integers(-9, 300) | st.just(2**31) | st.just(10**400) | st.floats()
scalars = st.none() | st.booleans() | numbers | texts | st.binary(max_size=5) | st.dates() | st.datetimes()
keys = st.sampled_from([*NAMES, *(name[1:] for name in NAMES), True, False, None]) | texts | st.integers(-1, 2)
values = st.recursive(
    scalars, lambda part: st.lists(part, max_size=4) | st.dictionaries(keys, part, max_size=4) | st.sets(texts, max_size=2)
)


@st.composite
def trees(draw):
    """Mostly known keys with whatever values, so that many places are reached, some of them whole."""
    tree = {}
    for setting in draw(st.lists(st.sampled_from(settings()), max_size=3)):
        section, _, name = setting.key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = draw(values)
    return tree | draw(st.dictionaries(keys, values, max_size=1))


def check(make):
    """What it makes is whole: it can be hashed, moved and read again. Or it is refused in one line."""
    try:
        config = make()
    except ConfigError as err:
        assert len(str(err).splitlines()) == 1
        assert len(str(err)) < 5000
        return None
    assert pickle.loads(pickle.dumps(config)) == config
    return config


def check_job(path, overrides):
    config = check(lambda: load_config([str(path)] if path else [], overrides))
    if config is not None:
        hash((config.model, config.detect, config.read, config.write, config.stream))
        again = yaml.safe_load(yaml.safe_dump(config.as_dict()))
        assert check(lambda: Config(**again)) == config


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "job.yaml"


@given(tree=trees() | values)
@example(tree={"\ud800": 1})
def test_any_tree_is_a_config_or_refused_in_one_line(path, tree):
    """Whatever YAML can hold: `load_config` returns a config, or raises one `ConfigError` without a line break."""
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    check_job(path, {})


@given(content=st.binary(max_size=40) | st.text(st.sampled_from("ab:- []{},&*!?|>#'\"\n1.~%@`<=\t"), max_size=40).map(str.encode))
@example(content=b"detect: {max_detections: 0x" + b"f" * 5000 + b"}")
@example(content=b"beam_options: {a: 0x" + b"f" * 5000 + b"}")
@example(content=b"a: 2001-99-99")
@example(content=b"!!bool x")
@example(content=b"[" * 5000)
@example(content=b"input: &a [*a]")
def test_any_file_is_a_config_or_refused_in_one_line(path, content):
    """Also where the file is no YAML, or no text."""
    path.write_bytes(content)
    check_job(path, {})


@given(argv=st.lists(st.sampled_from(FLAGS) | texts | st.floats().map("{:.3g}".format) | st.integers().map(hex), max_size=6))
def test_any_flags_are_a_config_or_refused_in_one_line(argv):
    """The same for flags of the command line."""

    def parsed():
        return load_config([], _overrides(make_parser().parse_known_args(argv)[0]))

    try:
        check(parsed)
    except SystemExit as end:
        assert end.code == 0
        assert {"-h", "--help", "--help-all"} & set(argv)
