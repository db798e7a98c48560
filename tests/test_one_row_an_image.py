"""A command that takes one row of an image refuses two in a line that names what made them, and the flag that takes one."""

import json

import pytest

from pipeline.commands import evaluate, pictures, view
from tests.models.test_evaluate import truth
from tests.shard_rows import OTHER, VERSION, detected, write_rows

MODEL = VERSION._replace(model="other")
COMMANDS = {
    "evaluate": (evaluate.main, ["--detections", "out", "--ground-truth", "truth.json"]),
    "evaluate beside another output": (evaluate.main, ["--detections", "out", "--reference", "one"]),
    "pictures": (pictures.main, ["out", "--annotate", "drawn"]),
    "view": (view.main, ["out", "--export", "exported"]),
}


@pytest.mark.parametrize(("main", "arguments"), COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("other", "more", "said", "flags"),
    [
        (OTHER, ["--all"], "of the versions 7 and 8 of yolo; --model-version takes one of them", ["--model-version", "7"]),
        (MODEL, [], "of the models yolo and other; --model takes one of them", ["--model", "other"]),
        (VERSION._replace(settings="00000000"), ["--all"], "each image may have one row", ["--settings", "00000000"]),
    ],
    ids=["versions", "models", "settings"],
)
def test_an_error_about_two_rows_names_both_and_the_flag(
    main, arguments, other, more, said, flags, tmp_path, monkeypatch, capsys
):
    """With that flag no image has two rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "truth.json").write_text(json.dumps(truth()))
    for version, made_at in ((VERSION, 1.0), (other, 2.0)):
        write_rows("out", [detected("a.jpg", version=version)], version=version, made_at=made_at)
    write_rows("one", [detected("a.jpg")])
    assert main([*arguments, *more]) == 2
    err = capsys.readouterr().err
    assert "rows" in err and said in sorted_versions(err) and err.startswith("error: ") and err.count("\n") == 1
    main([*arguments, *more, *flags])
    assert said not in sorted_versions(capsys.readouterr().err)


def sorted_versions(line):
    """The line with what it names in order: which shard is read first is chance."""
    return line.replace("versions 8 and 7", "versions 7 and 8").replace("models other and yolo", "models yolo and other")
