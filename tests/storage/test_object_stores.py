"""What results rely on in each object storage: creation once, conditions on writes and deletions, ages, lost answers."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import urllib3
from urllib3.connectionpool import HTTPConnectionPool

from pipeline.commands import evaluate
from pipeline.errors import OutputError
from pipeline.results.current import current_rows, read_rows
from pipeline.results.layout import check_output
from pipeline.results.reader import list_shards
from pipeline.results.rows import detections_table
from pipeline.results.run_folder import Run
from pipeline.results.shards import add_rows
from pipeline.storage import s3
from pipeline.storage.files import add_file, delete_files, delete_generations, exists, move_files, read_file, write_file
from pipeline.storage.listing import files_of
from pipeline.storage.store import ChangedError, StoreError, retried
from pipeline.storage.stores import look_up, store_of
from tests.processes import served
from tests.shard_rows import VERSION, detected, write_rows


def write(path, content, over=None):
    """One attempt to write an object: its generation; None where it has another one than `over`."""
    try:
        return retried(store_of(path).write)(path, content, over)
    except (ChangedError, FileNotFoundError):
        return None


def test_an_object_is_written_only_over_the_generation_that_is_named(bucket):
    path = f"{bucket}/out/a.txt"
    assert write(path, b"0", "1234567890123456") is None and not exists(path), "there is none"
    first = write(path, b"1", "")
    found = look_up(path)
    assert first and (found.size_bytes, found.generation) == (1, first)
    assert write(path, b"2", "") is None and read_file(path) == b"1"
    second = write(path, b"2", first)
    assert second not in (None, first) and look_up(path).generation == second
    assert write(path, b"3", first) is None and read_file(path) == b"2"
    assert write(path, b"3") not in (None, second) and read_file(path) == b"3"


def test_of_many_that_write_an_object_at_once_one_does(bucket):
    path, generation = f"{bucket}/out/a.txt", ""
    with ThreadPoolExecutor(8) as pool:
        for number in range(3):
            contents = [b"%d by %d" % (number, writer) for writer in range(8)]
            written = list(pool.map(lambda content, over=generation: write(path, content, over), contents))
            (winner,) = (place for place, made in enumerate(written) if made)
            assert read_file(path) == contents[winner]
            generation = written[winner]


def test_a_file_that_is_added_keeps_its_content(bucket):
    """The same content is its own: the answer to an earlier try was lost."""
    path = f"{bucket}/out/ä b+%20.txt"
    assert [add_file(path, content) for content in (b"1", b"1", b"2")] == [True, True, False]
    assert read_file(path) == b"1"


def test_an_object_is_deleted_in_the_generation_that_is_named(bucket):
    path, other = f"{bucket}/out/a.txt", f"{bucket}/out/b.txt"
    first = write(path, b"1")
    write(path, b"2")
    write(other, b"2")
    if not bucket.startswith("gs://"):  # whose emulator does not look at it; test_compact looks at the request
        delete_generations({path: first, f"{bucket}/out/gone.txt": first})
    assert read_file(path) == b"2"
    delete_generations({path: look_up(path).generation})
    delete_files([other, f"{bucket}/out/gone.txt"])
    assert not exists(path) and [*files_of(f"{bucket}/out")] == []


def test_the_age_of_an_object_is_by_the_clock_of_its_store(bucket, monkeypatch):
    path = f"{bucket}/out/a.txt"
    generation = write(path, b"1")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    age_s, named = store_of(path).age(path)
    assert named == generation and -1.0 <= age_s < 3600.0
    with pytest.raises(FileNotFoundError):
        store_of(path).age(f"{path}.gone")


def test_a_large_file_is_moved_there_whole_and_a_browser_shows_a_page(bucket, tmp_path):
    content = bytes(range(256)) * 80_000  # 20 MB, in parts
    for name in ("page.html", "data.bin"):
        (tmp_path / name).write_bytes(content)
    move_files({f"{tmp_path}/{name}": f"{bucket}/out/{name}" for name in ("page.html", "data.bin")})
    assert [*tmp_path.iterdir()] == [] and read_file(f"{bucket}/out/page.html") == read_file(f"{bucket}/out/data.bin") == content
    assert type_of(f"{bucket}/out/page.html") == "text/html"


def type_of(path):
    """The content type of an object."""
    if path.startswith("gs://"):
        from pipeline.storage.cloud import blob_of

        blob = blob_of(path)
        blob.reload()
        return blob.content_type
    if path.startswith("s3://"):
        with s3._client() as client:
            return client.head_object(**s3._bucket_and_key(path))["ContentType"]
    from pipeline.storage import azure

    with azure._blob(path) as blob:
        return blob.get_blob_properties().content_settings.content_type


@pytest.mark.parametrize("lost", [1, 3])
def test_an_object_whose_answers_were_lost_is_there_once_and_its_writer_knows_it(bucket, monkeypatch, lost):
    """The store has written it, and refuses the next try."""
    path, send, left = f"{bucket}/out/lost.txt", HTTPConnectionPool.urlopen, lost

    def losing(self, method, url, *args, **kwargs):
        nonlocal left
        answer = send(self, method, url, *args, **kwargs)
        if method in ("PUT", "POST") and left:
            left -= 1
            answer.close()
            raise urllib3.exceptions.ProtocolError("the connection was cut")
        return answer

    assert write(f"{bucket}/out/other.txt", b"1", "")
    monkeypatch.setattr(HTTPConnectionPool, "urlopen", losing)
    assert add_file(path, b"1") and not left
    assert not add_file(path, b"2") and read_file(path) == b"1"


def test_a_bucket_that_is_not_there_and_one_that_lists_nothing_are_told_apart(bucket):
    absent = f"{bucket.partition('://')[0]}://no-such-bucket-here"
    assert [*files_of(f"{bucket}/nothing")] == [] and look_up(f"{absent}/a") is None
    with pytest.raises((FileNotFoundError, StoreError)):
        list(files_of(f"{absent}/out"))
    with pytest.raises(OutputError, match=f"output {absent}/out: expected a folder that can be written, but: ") as caught:
        check_output(f"{absent}/out")
    assert "\n" not in str(caught.value)


def test_a_check_of_an_output_leaves_nothing(bucket):
    write_file(f"{bucket}/out/summary.json", b"{}")
    check_output(f"{bucket}/out")
    assert [file.path for file in files_of(f"{bucket}/out", "**")] == [f"{bucket}/out/summary.json"]


def test_the_current_rows_of_a_folder_are_evaluated_in_place(bucket, tmp_path, capsys):
    """It needs no copy of the folder."""
    for confidence in (0.25, 0.75):
        write_rows(f"{bucket}/out", [detected("a.jpg", confidence=confidence)], made_at=confidence)
    assert [row.scores.tolist() for row in read_rows(f"{bucket}/out/detections/")] == [[0.75]]
    (tmp_path / "rows.jsonl").write_text(json.dumps(next(current_rows(f"{bucket}/out"))) + "\n")
    assert evaluate.main(["--detections", f"{bucket}/out", "--reference", str(tmp_path / "rows.jsonl")]) == 0
    assert "agreement                    1.00000\n" in capsys.readouterr().out
    assert evaluate.main(["--detections", f"{bucket}/none", "--reference", f"{bucket}/out"]) == 2
    assert capsys.readouterr().err.startswith(f"error: output {bucket}/none: expected the results folder of an earlier run")


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_a_condition_is_refused_in_one_line(s3_bucket, monkeypatch, header):
    """As some that speak the protocol of S3 do; here the header is lost on the way."""
    output = f"s3://{s3_bucket.name}/out"

    def losing(params, **_):
        params["headers"].pop(header, None)

    with s3._client() as client:
        client.meta.events.register("before-call.s3.PutObject", losing)
    with pytest.raises(OutputError, match=f"^output {output}: its store ignores `{header}`") as caught:
        check_output(output)
    assert "\n" not in str(caught.value) and [*files_of(output, "**")] == []


CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>Another request is in progress.</Message></Error>"


class Between(BaseHTTPRequestHandler):
    """Passes requests on to a server of S3; of conditional writes it refuses the first with 409, or drops its answer."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        condition = self.command == "PUT" and self.headers["If-None-Match"]
        is_first = condition and not self.server.statuses
        if is_first and self.server.first == "refused":
            status, headers, answer = 409, [("Content-Type", "application/xml")], CONFLICT
        else:
            with contextlib.closing(http.client.HTTPConnection(*self.server.upstream)) as connection:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() != "expect":
                        connection.putheader(name, value)
                connection.endheaders(content)
                got = connection.getresponse()
                status, headers, answer = got.status, got.getheaders(), got.read()
        if condition:
            self.server.statuses.append(status)
        if is_first and self.server.first == "lost":
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def between(s3_bucket, monkeypatch):
    """A server between the writer and the one of S3, which says what it answered to conditional writes."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Between)
    server.daemon_threads = True
    server.upstream = tuple(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":"))
    server.statuses, server.first = [], ""
    with served(server) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        s3._client_of.cache_clear()
        yield server


@pytest.mark.parametrize(("first", "statuses"), [("refused", [409, 200]), ("lost", [200, 412])])
def test_a_conflict_is_tried_again_and_a_lost_answer_is_its_own_shard(s3_bucket, between, first, statuses):
    """Two writers of one name at once get 409; who was answered by nobody meets its own object, and gets 412."""
    run = Run(f"s3://{s3_bucket.name}/out", "0a1b", 1.0)
    table = detections_table([detected("a.jpg")], VERSION, "0a1b", 1.0)
    between.first = first
    path = add_rows(run, "detections", table)
    assert between.statuses == statuses
    assert [shard.path for shard in list_shards(run.output)] == [path]
    assert [row["image"]["uri"] for row in current_rows(run.output)] == ["a.jpg"]
    others = detections_table([detected("a.jpg", confidence=0.75)], VERSION, "0a1b", 2.0)
    assert add_rows(run, "detections", others) == path, "equal keys, as of a repeat"
    assert between.statuses == [*statuses, 412]
    assert [row["detections"][0]["confidence"] for row in current_rows(run.output)] == [0.5]


@pytest.mark.parametrize("output", ["https://example.com/out", "ftp://example.com/out"])
def test_what_is_no_object_storage_is_no_output(output):
    with pytest.raises(OutputError, match=f"^output {output}: .*expected a f"):
        check_output(output)
    assert not Path("https:").exists()
