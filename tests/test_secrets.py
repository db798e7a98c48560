"""Secrets among Beam's options are in nothing that is written or shown."""

import json
import pickle
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline import run
from pipeline.config import load_config
from pipeline.failures import Failure
from pipeline.records import ImageRef, dead_letter_row
from pipeline.secrets import masked_text
from pipeline.stream.messages import Message, parse_message
from pipeline.stream.outgoing import dead_letter_message
from pipeline.stream.shared import RunSettings
from tests.conftest import write_bright_image
from tests.forked_jobs import KILLED, Moment, run_forked
from tests.listing.test_web import Server, server  # noqa: F401  a fixture
from tests.monitoring.test_notify import Webhook

CONFIG = """
beam_options:
  azure_connection_string: DefaultEndpointsProtocol=https;AccountKey=hunter2-config==
  environment_config: '{"env": {"AWS_SECRET_ACCESS_KEY": "hunter2-pair"}}'
  s3_region_name: eu-central-1
  environment_options: [password=hunter2-list]
stream:
  allow_uri_prefix: ["https://me:hunter2@host/x/"]
"""
FLAGS = ("--s3_session_token=hunter2-flag", "--s3_secret_access_key", "hunter2-apart")


def written_in(folder: Path) -> dict[str, str]:
    """The files by name, as text; pages without the places where a long word may break."""
    found = {path.name: path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()}
    return {name: text.replace("<wbr>", "") for name, text in found.items()}


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        pytest.param("{password: {a: hunter2-config}}", [], id="wrong value"),
        pytest.param("{}", ["password=hunter2-config"], id="stray argument"),
        pytest.param("{}", ["--allow_unsafe_triggers=secret_key=hunter2-config"], id="value for a switch"),
        pytest.param("{no_such_token: hunter2-config}", [], id="unknown option"),
    ],
)
def test_no_error_has_a_secret(config, flags, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(f"beam_options: {config}")
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    command = ["--config", tmp_path / "job.yaml", "--input", tmp_path / "in", "--output", tmp_path / "out", *flags]
    assert run.main([*map(str, command)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "hunter2" not in said


# an address of each way to sign, whose secrets stand where the test puts them
SIGNED = (
    "sv=2024-11-04&se=2026-12-01T00%3A00%3A00Z&sr=b&sp=r&sig={}",
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={0}%2F20261124&X-Amz-Expires=60&X-Amz-Signature={0}&X-Amz-Security-Token={0}",
    "X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Credential={0}&X-Goog-Signature={0}",
    "AWSAccessKeyId=AKIA&Expires=1795219200&Signature={}",
    "v=7&token={}&expires=1795219200",
    "access_token={}",
)


@pytest.mark.parametrize("query", SIGNED, ids=lambda query: query.partition("=")[0])
def test_each_new_signature_names_the_same_image(query):
    first, second = (ImageRef(f"https://host/a.jpg?{query.format(secret)}", generation="1") for secret in ("one", "two"))
    assert first.identity == second.identity == f"https://host/a.jpg{'?v=7' if 'v=7' in query else ''}#1"
    assert (first.location, second.location) == tuple(f"https://host/a.jpg?{query.format(secret)}" for secret in ("one", "two"))


@pytest.mark.parametrize("name", ["token", "image_token", "v=7&file-token"])
def test_a_token_that_may_tell_images_apart_is_a_hash_in_their_names(name):
    first, second = (ImageRef(f"https://host/img?{name}={secret}") for secret in ("hunter1", "hunter2"))
    assert first.uri != second.uri and first.location.endswith("hunter1")
    assert re.fullmatch(rf"https://host/img\?{name}=\*\*\*[0-9a-f]{{12}}", first.uri)
    assert ImageRef(first.uri).uri == first.uri == replace(first, signed_uri="").uri


@pytest.mark.parametrize(
    ("uri", "public"),
    [
        ("ftp://user:hunter2@host/a.jpg", "ftp://host/a.jpg"),
        ("HTTPS://me:hunter2@host/a.jpg?se=1&SIG=hunter2", "HTTPS://host/a.jpg"),
        ("abfs://images@acct.dfs.core.windows.net/a.jpg?sv=1&sig=hunter2", "abfs://images@acct.dfs.core.windows.net/a.jpg"),
        ("s3://b/a.jpg?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2", "s3://b/a.jpg"),
        ("inline:https://host/a.jpg?sig=hunter2", "inline:https://host/a.jpg"),
    ],
)
def test_an_address_of_any_scheme_and_case_shows_no_secret(uri, public):
    assert (ImageRef(uri).uri, ImageRef(uri).location, masked_text(f"no answer from {uri}")) == (
        public,
        uri,
        f"no answer from {public}",
    )
    assert "hunter2" not in json.dumps(dead_letter_row(Failure("read", "unreadable", uri).dead_letter(ImageRef(uri))))


@pytest.mark.parametrize(
    "uri",
    [
        "https://host/a?",
        "https://host/?id=1&sr=2&se=3",
        "https://host/a.jpg?key=photos/1.jpg&size=[1]",
        "gs://b/token=5/a.jpg",
        "gs://b/a?token=5.jpg",
        "abfs://container@account.dfs.core.windows.net/a.jpg",
        "a\udc80?token=b.jpg",
    ],
)
def test_what_is_no_secret_names_its_image(uri):
    assert (ImageRef(uri).uri, ImageRef(uri).location) == (uri, uri)


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach https://me:hunter2@host/x: refused",
        "grpc://me:hunter2@host:8001/yolo does not answer",
        "HTTPConnectionPool(host='h', port=80): Max retries exceeded with url: /x.jpg?sig=hunter2 (Caused by …)",
        "url: /x.jpg?a=b&X-Amz-Signature=hunter2&X-Goog-Signature=hunter2",
        "{'Authorization': 'Bearer hunter2'}",
        "Authorization: Basic hunter2",
        "x-api-key: hunter2",
        "API_PASS=hunter2 detect",
        "password: hunter2",
        "api_key: hunter2",
        "AccountKey = hunter2",
        "Cookie: id=hunter2; other=hunter2",
        '{"env": "{\\"TOKEN\\": \\"hunter2 x\\", \\"A\\": 1}"}',
        "https://h/a?hdnts=exp=1~acl=/*~hmac=hunter2",
        "/a?hdnts=exp=1~hmac=hunter2 is away",
        '{"url": "https://h/a?se=2026\\u0026sig=hunter2"}',
        "<a href='https://h/a?se=2026&amp;sig=hunter2'>",
    ],
)
def test_a_text_shows_no_secret(text):
    assert "hunter2" not in masked_text(text)


@pytest.mark.parametrize("text", ["expected 'key: value' lines", "2 tokens: a, b", "unknown key 'a'; did you mean 'b'?"])
def test_a_text_without_a_secret_stays(text):
    assert masked_text(text) == text


@pytest.mark.parametrize("where", ["a flag", "a file"])
def test_a_webhook_that_is_none_is_not_printed(where, tmp_path, capsys):
    """Its path is all that it takes to post there."""
    (tmp_path / "job.yaml").write_text("monitoring: {notify: hooks.example/hunter2}")
    flags = ["--notify", "hooks.example/hunter2"] if where == "a flag" else ["--config", str(tmp_path / "job.yaml")]
    assert run.main(["--input", "a.jpg", "--output", "out", "--model", "digits", *flags]) == 2
    said = capsys.readouterr().err
    assert "expected a URL with http:// or https://, got ***" in said and "hunter2" not in said


def test_what_steps_take_to_their_workers_has_no_secret_of_the_launcher():
    secret = {"monitoring.notify": "https://hooks.example/hunter2", "beam_options": {"s3_session_token": "hunter2"}}
    config = load_config([], {**secret, "stream.archive": "gs://b/rows"})
    assert b"hunter2" not in pickle.dumps(RunSettings("job", config))
    assert "hunter2" not in repr(config.monitoring)
    assert RunSettings("job", config).config.stream == config.stream


def test_a_long_text_is_masked_at_once():
    """No pattern looks at a text again from each of its characters, which would take minutes."""
    for text in ("a" * 300_000, "key" * 1000, "https://" * 2000, "x-" * 20_000, ":" * 100_000):
        assert masked_text(text) == text


def test_nothing_that_leaves_a_job_has_a_secret(server, tmp_path, bright_model):  # noqa: F811
    """Signed addresses that are read, refused, and away for a while, in a manifest and as an input, beside secret settings.

    Neither what a job that was killed leaves, nor the next one, nor a dry run; other options are there to read.
    """
    write_bright_image(tmp_path / "a.png", (64, 48), (10, 10, 30, 30))
    content = (tmp_path / "a.png").read_bytes()
    Server.images.update({f"/in/{n}.png?{query.format('hunter2')}": content for n, query in enumerate(SIGNED)})
    Server.images["/in/named.png?token=hunter2"] = content
    places = [f"in/{n}.png?{query.format('hunter2')}" for n, query in enumerate(SIGNED)]
    places += ["status?sig=hunter2/403", "gone.png?sig=hunter2", "busy/b.png?sig=hunter2"]
    uris = [f"{server}/{place}" for place in places] + [server.replace("//", "//me:hunter2@") + "/gone3.png?b=c"]
    lines = ['{"uri": "https://h/a?sig=hunter2', f'{{"uri": "{server}/gone2?sig=hunter2", "page": "https://h/?token=hunter2"}}']
    (tmp_path / "list.jsonl").write_text("\n".join([*map(json.dumps, uris), *lines]))
    (tmp_path / "job.yaml").write_text(CONFIG)
    common = ["--config", tmp_path / "job.yaml", *FLAGS, "--model", bright_model, "--max-dead-share", "1", "--log-format", "json"]
    named, log = f"{server}/in/named.png?token=hunter2", tmp_path / "log"
    killed = [*common, "--input", named, "--output", tmp_path / "killed"]
    assert run_forked(killed, log, Moment("pipeline.outcome.conclude:summarise")) == KILLED
    left = written_in(tmp_path / "killed")
    assert left and {name for name, text in left.items() if "hunter2" in text} == set()
    command = [*common, "--input", tmp_path / "list.jsonl", named, "--output", tmp_path / "out", "--verbose"]
    with Webhook(200) as webhook:
        assert run_forked([*command, "--notify", webhook.url], log) == 0
    assert len(webhook.got) == 1
    written = written_in(tmp_path / "out") | {"log": log.read_text(), "notified": json.dumps(webhook.got)}
    assert {name for name, text in written.items() if "hunter2" in text} == set()
    assert "--s3_session_token=***" in written["report.html"] and "eu-central-1" in written["report.html"]
    summary = json.loads(written["summary.json"])
    assert summary["config"]["beam_options"]["azure_connection_string"] == "***"
    assert (summary["images"]["detected"], summary["images"]["dead"]) == (len(SIGNED) + 1, 6)
    assert run_forked([*command, "--dry-run", "--again"], log) == 0
    assert "hunter" not in log.read_text()


@pytest.mark.parametrize("prefix", ["https://", "gs://"], ids=["allowed", "refused"])
def test_nothing_that_a_stream_publishes_has_a_secret(prefix):
    """Rows, attributes and dead letters, and the message within a dead letter."""
    uri = "https://host/a.jpg?v=7&sig=hunter2"
    asked = json.dumps({"uri": uri, "page": "https://host/?token=hunter2"}).encode()
    request = parse_message(Message(asked, {}, "id", 100.0), (prefix,))
    if request.images:
        (ref,) = request.images
        assert (ref.uri, ref.location) == ("https://host/a.jpg?v=7", uri)
        letter = Failure("read", "unreadable", f"no answer from {uri}").dead_letter(ref)
    else:
        (letter,) = request.dead_letters
        assert b"https://host/a.jpg?v=7" in letter.payload and b"hunter2" not in letter.payload
    published = dead_letter_message(letter, 100.0)
    assert b"hunter2" not in published.data and "hunter2" not in str(published.attributes)
    assert published.attributes["image_uri"] == "https://host/a.jpg?v=7"
