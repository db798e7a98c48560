"""Whatever stands in a manifest: images that are read, or dead letters."""

import io
import json
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.failures import Failure
from pipeline.listing.list_images import list_images
from pipeline.listing.manifests import named_images, read_manifest
from pipeline.records import DeadLetter, dead_letter_row, name_bytes, row_bytes
from pipeline.storage.fetch import fetch

uris = st.sampled_from(
    ["a.jpg", "in/b.png", "../a.jpg", "/dev/zero", ".", "..", "gone.jpg", "x" * 300, "a\0b", "\ud800", "\udcff"]
)
texts = uris | st.text(max_size=10) | st.sampled_from(["uri", "path", "image", "#", "[]", "{}", "nosuchscheme://b/x", "inline:1"])
values = st.recursive(
    texts | st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(texts, part, max_size=3),
)
rows = st.dictionaries(st.sampled_from(["uri", "path", "image", "extra", "camera"]) | texts, values, max_size=4) | values
cells = st.lists(texts.map(lambda text: '"' + text.replace('"', '""') + '"') | texts, max_size=4)
lines = (
    rows.map(json.dumps)
    | cells.map(",".join)
    | texts
    | st.binary(max_size=12).map(lambda noise: noise.decode("latin-1"))
    | st.sampled_from(["", "\ufeff", '"', "[" * 2000, '{"uri": ' * 2000, '{"uri": "a.jpg"', "1" * 5000, "NaN"])
)
ends = st.sampled_from(["\n", "\r\n", "\r", "\u2028", ""])
manifests = st.lists(st.tuples(lines, ends).map("".join), max_size=6).map("".join).map(
    lambda text: text.encode("utf-8", "surrogatepass")
) | st.binary(max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A few files that a manifest may name; the current folder while the module runs."""
    path = tmp_path_factory.mktemp("manifests")
    (path / "in").mkdir()
    (path / "a.jpg").write_bytes(b"a")
    (path / "in" / "b.png").write_bytes(b"b")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.mark.parametrize("ending", [".txt", ".csv", ".jsonl"])
@given(content=manifests)
@example(content=b'{"uri": "a.jpg"}\n\n"in/b.png"')
@example(content=b"uri\na.jpg\n")
@example(content=b"[" * 100_000)
@example(content=b'{"uri": "\\ud800"}')
@example(content=b"\x00\x00")
@example(content=b"\xef\xbb\xbf")
@example(content=b'"unclosed\n' * 9)
def test_a_manifest_is_images_and_dead_letters(folder, ending, content):
    path = folder / f"list{ending}"
    path.write_bytes(content)
    found = list(read_manifest(str(path)))
    assert found == list(list_images([str(path)]))
    for each in found:
        ref = each.ref if isinstance(each, DeadLetter) else each
        assert ref.uri
        assert pickle.loads(pickle.dumps(ref)) == ref
        assert name_bytes(ref.identity)
        assert len(ref.extra) < 3000
        if isinstance(each, DeadLetter):
            assert len(each.message.splitlines()) == 1
            assert len(each.message) < 1000
            json.loads(row_bytes(dead_letter_row(each)))
            continue
        found = fetch(ref, 1000)
        if isinstance(found, Failure):
            json.loads(row_bytes(dead_letter_row(found.dead_letter(ref))))
        else:
            assert found.content in (b"a", b"b", content)
            assert found.ref.generation


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1), max_size=9))
def test_names_come_back_from_each_kind_of_manifest(names):
    """However odd they are, where the kind can say them."""

    def read(lines, path):
        return [uri for uri, _ in named_images(io.BytesIO("\n".join(lines).encode()), path)]

    as_json = [json.dumps(row) for name in names for row in (name, {"uri": name}, {"image": {"uri": name}})]
    assert read(as_json, "list.jsonl") == [name for name in names for _ in range(3)]
    as_csv = ["uri,label"] + ['"' + name.replace('"', '""') + '",1' for name in names]
    assert read(as_csv, "list.csv") == names
    plain = [name for name in names if not name.startswith(("#", "\ufeff"))]
    assert read(plain, "list.txt") == plain
