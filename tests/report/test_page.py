"""The report page: complete, adding up, and harmless whatever the data say."""

import base64
import hashlib
import html.parser
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Config, DetectConfig
from pipeline.failures import REASONS
from pipeline.records import DeadLetter, ImageRef
from pipeline.report import charts as report_charts
from pipeline.report import page as report
from pipeline.report.texts import link
from pipeline.stats.canary_stats import CanaryStats
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts, summarise
from tests.report.test_annotate import detected, grey

HOSTILE = [
    "<img src=x onerror=alert(1)>.jpg",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "</title><svg onload=alert(1)>",
    "<!-- ",
    "]]>",
    "javascript:alert(1)",
    "&lt;b&gt;&amp;&#60;script&#62; {{ 7 * 7 }} ${7} %s {0}",
    "\u202egpj.exe\u2066\u200f line\nfeed\x00\x1b[31m\x7f\x85\u2028 lone \udc80 surrogate",
    "x" * 3000,
]


class Page(html.parser.HTMLParser):
    """What a browser would make of the page: tags with their attributes, and the text of each tag."""

    VOID = frozenset({"meta", "link", "img", "input"})

    def __init__(self, document):
        super().__init__(convert_charrefs=True)
        self.shape, self.texts, self.attributes, self.open_tags = [], [], [], []
        self.folded = ""  # what a reader sees after unfolding it
        self.feed(document.replace("<wbr>", ""))  # places at which a long name may break
        self.close()

    def handle_starttag(self, tag, attrs):
        self.shape.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if data.strip("\n "):  # what only separates tags in the source
            self.texts.append((self.open_tags[-1] if self.open_tags else "", data))
            self.folded += data if "details" in self.open_tags else ""

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data!r}")

    @property
    def text(self):
        return "".join(data for tag, data in self.texts if tag != "style")

    def text_of(self, wanted):
        return [data for tag, data in self.texts if tag == wanted]


def sample(uri="/photos/dog.jpg", names=("dog",), thumbnail=None):
    """A sample, without a purpose, of an image of 80 x 60 pixels."""
    return "", detected(grey(60, 80), [[10, 10, 40, 40]] * len(names), names, thumbnail, uri)


EMPTY = summarise(JobStats(), RunFacts(0, 1, 2, "run", Config().as_dict()))


def render(changes, samples=(), dead_letters=()):
    """The page of a job without images, but for some keys of its summary."""
    examples = {
        reason: [each for each in dead_letters if each.reason == reason] for reason in {each.reason for each in dead_letters}
    }
    return report.render_report({**EMPTY, **changes}, list(samples), examples)


def a_summary(word="word", **changes):
    """A summary in which every text that may come from outside is `word`."""
    return (
        EMPTY
        | {
            "images": {"read": 1820, "detected": 1803, "dead": 11, "skipped": 6},
            "images_per_second": 48.7,
            "wall_seconds": 41.3,
            "startup_seconds": 3.84,
            "batch_sizes": {"1": 3, "8": 9, "16": 107},
            "stage_seconds": {"read": 4.1, "model": 21.7},
            "dead_by_reason": {word: 11},
            "dead_by_stage": {word: 11},
            "classes": {word: 20, f"{word} 2": 10},
            "detections": 30,
            "confidences": {
                "all": [0] * 5 + [3, 7] + [0] * 11 + [5, 15],
                "by_class": {word: [0] * 18 + [5, 15], f"{word} 2": [0] * 5 + [3, 7] + [0] * 13},
            },
            "latency_ms": {"p50": 612, "p90": 980.2, "p99": 1410, "max": 1893},
            "throughput": [[0, 11], [1, 50], [3, 49]],
            "over_time": {"event_to_publish_ms": {"interval_s": 1, "points": [[0, 40], [2, 60]]}},
            "model": {"name": word, "version": word, "path": word, word: [word]},
            "canary": CanaryStats("8", "7").as_dict() | {"version": word, "stable": word, "why_no_images": word},
            "config": {
                "input": [word],
                "detect": {"score_threshold": 0.25, word: word, "deep": {word: None}},
                word: {word: word},
            },
            **{"command": word, "started_at": word, "finished_at": word, "mode": "batch"},
        }
        | changes
    )


def letter(word="word", reason=None):
    return DeadLetter(ImageRef(word), word, word if reason is None else reason, word)


def rendered(word):
    return report.render_report(
        a_summary(word), [sample(f"/photos/{word}", (word, word)), sample(word, (), b"")], {word: [letter(word)]}
    )


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_text_is_readable_and_no_tag_attribute_or_address_comes_from_it(word):
    """A page full of hostile text has the very tags and attribute names of the same page with a plain word; it loads nothing."""
    page = Page(rendered(word))
    assert (page.shape, page.open_tags) == (Page(rendered("word")).shape, [])
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in word)
    assert page.text.count(shown) >= 15
    assert all(c.isprintable() for c in page.text.replace("\n", ""))
    assert not {tag for tag, _ in page.shape} & {"script", "iframe", "object", "embed", "base", "form", "area", "audio", "video"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and name != "style"
        if (tag, name) == ("a", "href"):  # what a reader may follow; the page does not load it
            assert re.fullmatch(r"#(sample|differ)-\d+(-below)?|(file:///|https://)[!-~]*", value), value[:50]
        elif name in {"src", "href", "action", "data", "srcset", "ping", "formaction", "xlink:href"}:
            assert re.fullmatch(r"data:(image/jpeg;base64,[A-Za-z0-9+/=]+|,)", value), (tag, name, value[:50])
    (css,) = page.text_of("style")
    assert "url(" not in css and "@import" not in css


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("/photos/a b.jpg", "file:///photos/a%20b.jpg"),
        ("//server/share/a.jpg", "file:///server/share/a.jpg"),
        ("gs://bucket/a/street#1?.jpg", "https://storage.cloud.google.com/bucket/a/street%231%3F.jpg"),
        ("https://host/a.jpg?size=2&x=%20", "https://host/a.jpg?size=2&x=%20"),
        ('https://host/"onclick=alert(1)', "https://host/%22onclick=alert(1)"),
        ("/photos/lone \udc80", "file:///photos/lone%20%80"),
        *((f"{scheme}alert(1)", "") for scheme in ("javascript:", " javascript:", "data:text/html,", "JaVaScRiPt:", "vbscript:")),
        *((uri, "") for uri in ("file:///etc/passwd", "http://host/a.jpg", "\nhttps://host/a", "s3://b/a.jpg", "a.jpg", "")),
    ],
)
def test_only_uris_of_known_schemes_are_links(uri, address):
    assert link(uri) == address
    page = Page(render({}, [sample(uri)]))
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href") and not value.startswith("#")]
    assert links == ([address] if address else [])
    assert [value for tag, name, value in page.attributes if (tag, name) == ("a", "rel")] == ["noopener noreferrer"] * len(links)


def test_the_content_security_policy_allows_this_style_and_no_script():
    page = Page(rendered("word"))
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "default-src" in value]
    (css,) = page.text_of("style")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def test_the_counts_are_shown_as_a_sum_and_a_stream_counts_messages():
    batch, stream = (Page(report.render_report(a_summary(mode=mode), [], {})).text for mode in ("batch", "streaming"))
    assert "1,820images read=1,803detected+11dead letters+6skipped" in batch and "Images per second48.7" in batch
    assert "1,820messages read=" in stream and "Messages per second48.7" in stream
    assert "do not add up" not in batch
    assert "These counts do not add up" in render({"images": {"read": 10, "detected": 7, "dead": 1, "skipped": 1}})
    assert "0images read=0detected+0dead letters+0skipped" in Page(render({})).text


@pytest.mark.parametrize(("classes", "rest"), [(1, None), (30, None), (31, "1 more class1"), (500, "470 more classes110,685")])
def test_thirty_classes_are_shown_and_the_rest_is_summed(classes, rest):
    """With n classes of n, n-1, … detections (500 classes: 470 + … + 1 = 110,685 in the rest)."""
    counts = {f"class {i:03d}": classes - i for i in range(classes)}
    page = Page(render({"classes": counts}, [], []))
    assert len([name for name in page.text_of("th") if re.fullmatch(r"class \d{3}", name)]) == min(classes, 30)
    assert (rest in page.text) if rest else ("more class" not in page.text)


def test_confidences_are_shown_in_tenths_down_to_the_threshold():
    page = Page(rendered("cat"))
    rows = re.findall(r"(0\.\d to [01]\.\d)(\d+?)(?=0\.|M|B|T|L)", page.text)
    assert rows == [
        ("0.9 to 1.0", "20"),
        *((f"0.{n} to 0.{n + 1}", "0") for n in range(8, 3, -1)),
        *(("0.3 to 0.4", "7"), ("0.2 to 0.3", "3")),
    ]
    assert "Below 0.25, the threshold, none is kept." in page.text
    assert [note for note in page.text_of("td") if note.startswith("median")] == ["median about 0.97", "median about 0.33"]


def test_each_sample_has_its_picture_its_name_and_its_detections():
    samples = [sample("gs://b/a/street one.jpg", ("car", "dog", "car")), sample("b.jpg", ()), sample(thumbnail=b"")]
    page = Page(render({}, [*samples, sample(names=("ant",) * 100)]))
    sources, texts = ([value for tag, name, value in page.attributes if (tag, name) == ("img", of)] for of in ("src", "alt"))
    jpegs = [base64.b64decode(source.removeprefix("data:image/jpeg;base64,")) for source in sources]
    assert [jpeg[:2] for jpeg in jpegs] == [b"\xff\xd8"] * 3 and "no picture kept" in page.text
    assert texts[:2] == ["street one.jpg: 2 car, 1 dog", "b.jpg: no objects"]
    for shown in ("street one.jpg80 × 60, 3 detections", "b.jpg80 × 60, 0 detections", "gs://b/a/street one.jpg"):  # noqa: RUF001
        assert shown in page.text
    assert page.text_of("td").count(" ant") == 30 and "70 more." in page.text


def test_dead_letters_stand_before_the_pictures_under_their_reason_the_most_frequent_first():
    letters = [
        letter("a.jpg", "truncated"),
        DeadLetter(ImageRef(""), "message", "bad_json", "not JSON", thumbnail=b"hi"),
        *[letter(f"c{i}.jpg", "truncated") for i in range(30)],
    ]
    page = Page(document := render({"dead_by_reason": {"truncated": 31, "vanished": 2, "bad_json": 1}}, [], letters))
    assert page.text_of("h2")[:2] == ["Dead letters", "Samples"]
    assert re.findall(r"(truncated|bad_json|vanished)", page.text) == ["truncated", "vanished", "bad_json"]
    assert "20 of 31 shown." in page.text and page.text_of("td").count("c19.jpg") == 0
    assert REASONS["message"]["bad_json"].replace("`", "") in page.text
    assert '<img src="data:image/jpeg;base64,aGk=" alt="">—</td><td>message</td><td>not JSON</td>' in document


def test_stages_stand_in_the_order_of_the_data_with_their_times_for_a_detected_image():
    images = {"read": 900, "detected": 100, "dead": 0, "skipped": 800}
    page = Page(render({"images": images, "stage_seconds": {"model": 3.0, "read": 1.0}}))
    assert re.findall(r"(read|model)(\d\.0 s)(\d0 ms) each", page.text) == [
        ("read", "1.0 s", "10 ms"),
        ("model", "3.0 s", "30 ms"),
    ]


def test_settings_that_nobody_changed_are_folded_and_others_stand_under_their_section():
    config = Config(output="out/", detect=DetectConfig(score_threshold=0.4, batch_sizes=(1, 8), classes=())).as_dict()
    page = Page(render({"config": {**config, "own": {"deep": {"max": 16}}}}))
    shown, folded = page.text.replace(page.folded, ""), page.folded
    assert page.text_of("h3") == ["detect", "own"]
    assert [text in shown for text in ("outputout/", "score_threshold0.4", "batch_sizes1, 8", "deep.max16")] == [True] * 4
    assert [text in folded for text in ("iou_threshold0.45", "scaled_decodetrue", "runnerDirectRunner")] == [True] * 3
    assert [text in folded for text in ("out/", "score_threshold", "batch_sizes")] == [False] * 3 and "scaled_decode" not in shown


def test_the_page_has_language_title_and_one_main_heading():
    page = Page(rendered("word"))
    assert ("html", "lang", "en") in page.attributes
    assert page.text_of("title")[0] == "Detection report: 1,820 images"
    assert page.text_of("h1") == ["Detection report"]
    assert len(page.text_of("h2")) == len(set(page.text_of("h2"))) == 13
    assert all(value for tag, name, value in page.attributes if (tag, name) in {("img", "alt"), ("svg", "aria-label")})


def steps(line):
    """The height of each step of a line, in percent."""
    return [100 - float(point.split(",")[1]) for point in line["lines"][0][1].split()[::2]]


@pytest.mark.parametrize(
    ("points", "interval_s", "expected"),
    [
        pytest.param([[0, 5], [1, 50]], 1, None, id="two seconds"),
        pytest.param([[0, 5], [1, 6], [4, 2]], 1, [5.0, 6.0, 0.0, 0.0, 2.0], id="a gap"),
        pytest.param([[0, 4096], [8192, 8192]], 4096, [1.0, 0.0, 2.0], id="long intervals"),
    ],
)
def test_the_steps_of_a_line_cover_the_whole_time_at_the_right_rate(points, interval_s, expected):
    """A run of seconds has no line."""
    line = report_charts.line_over_time(points, interval_s, "images/s")
    assert (line and steps(line)) == (expected and pytest.approx([100 * each / max(expected) for each in expected], abs=0.01))


@given(st.lists(st.integers(0, 500), min_size=3, max_size=300), st.sampled_from([1, 2, 4096]))
def test_the_line_of_the_mean_lies_among_the_steps(images, interval_s):
    """Also where a run was so short that its images per second, start and end included, are more than any of its seconds had."""
    points = [[second * interval_s, number] for second, number in enumerate(images)]
    line = report_charts.line_over_time(points, interval_s, "images/s")
    assert min(steps(line)) - 0.01 <= line["mean"][0] <= max(steps(line)) + 0.01
