"""Object storage: a real S3 server on loopback, and a proxy before it that fails when it is told to."""

from __future__ import annotations

import http.client
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import boto3
import fsspec.config
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from coinrag_integrations.engine.store import remote as module
from coinrag_integrations.engine.store.remote import Remote, merge
from coinrag_integrations.engine.store.retry import Retry
from coinrag_integrations.errors import ConfigError, RemoteError

BUCKET = "s3://bucket/kv"
QUICK = Retry(first_pause_s=0.01)
DATA = np.random.default_rng(0).bytes(2_000_000)
FAR = 2 * module._GAP
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>as told</Message></Error>"


class Proxy(ThreadingHTTPServer):
    """Passes requests on to `upstream`, but does to the next ones what `faults` say.

    A number is a status to answer. "cut" closes the connection, "half" does so amid the body, "unsaid"
    too, but never said how much there was or its checksum. "short" and "longer" send another body than
    was asked for, and say so; "wrong" sends another first byte. "hang" answers nothing until it is
    stopped.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.url = upstream, f"http://127.0.0.1:{self.server_address[1]}"
        self.stopped = threading.Event()
        self.told()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def told(self, *faults: str | int, together: int = 1) -> None:
        """Forget the past, and what to do next; `together`: answer when so many are waiting."""
        self.faults, self.seen = list(faults), []
        self.together = threading.Barrier(together)

    def stop(self) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(f"{self.command} {self.headers.get('Range', '')}".strip())
        fault = self.server.faults.pop(0) if self.server.faults else None
        self.server.together.wait(timeout=20)
        if fault == "hang":
            self.server.stopped.wait()
        if fault in ("cut", "hang"):
            self.close_connection = True
            return
        if isinstance(fault, int):
            code = {400: "RequestLimitExceeded", 403: "AccessDenied", 429: "SlowDown"}
            status, headers = fault, {"Content-Type": "application/xml"}
            content = ERROR.format(code.get(fault, "InternalError")).encode()
        else:
            status, headers, content = self.ask(body, fault)
        if fault == "wrong":
            content = bytes([content[0] ^ 1]) + content[1:]
        if fault == "short":
            content = content[: len(content) // 2]
        if fault == "unsaid":
            unsaid = ("content-length", "x-amz-checksum")
            headers = {k: v for k, v in headers.items() if not k.lower().startswith(unsaid)}
        elif self.command != "HEAD":
            headers["Content-Length"] = str(len(content))
        self.send_response_only(status)
        for item in headers.items():
            self.send_header(*item)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("half", "unsaid"):
            self.close_connection = True
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def ask(self, body: bytes, fault: str | int | None) -> tuple[int, dict[str, str], bytes]:
        """What the server behind answers."""
        drop = {"connection", *(["range"] if fault == "longer" else [])}
        upstream = http.client.HTTPConnection(self.server.upstream.removeprefix("http://"))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in drop}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        keep = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "server")}
        content = answer.read()
        upstream.close()
        return answer.status, keep, content

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.delenv("AWS_PROFILE", raising=False)
        yield


@pytest.fixture(scope="module")
def s3(_environment: None) -> Iterator[str]:
    """The address of an S3 server with one bucket."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    yield url
    server.stop()


@pytest.fixture(scope="module")
def remote(s3: str) -> Iterator[Remote]:
    with Remote.open(BUCKET, retry=QUICK, endpoint_url=s3) as it:
        yield it


@pytest.fixture(scope="module")
def _proxied(s3: str) -> Iterator[tuple[Remote, Proxy]]:
    proxy = Proxy(s3)
    with Remote.open(BUCKET, retry=QUICK, endpoint_url=proxy.url) as it:
        yield it, proxy
    proxy.stop()


@pytest.fixture
def proxied(_proxied: tuple[Remote, Proxy]) -> tuple[Remote, Proxy]:
    """A remote whose requests go through a proxy that has seen none yet."""
    _proxied[1].told()
    return _proxied


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"acme/main/{uuid4().hex[:16]}/ab/{uuid4().hex}.safetensors"


@pytest.fixture
def stored(remote: Remote, key: str, file: Path) -> str:
    """The key of an object that holds DATA."""
    remote.put(key, file)
    return key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A local file that holds DATA."""
    path = tmp_path / "upload"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["s3", "file", "memory"])
def any_remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "s3":
        return request.getfixturevalue("remote")
    folder = tmp_path / "remote" if request.param == "file" else uuid4().hex
    return Remote.open(f"{request.param}://{folder}", retry=QUICK)


def test_what_was_put_is_fetched_listed_and_gone_after_delete(any_remote, key, file, tmp_path):
    folder = key.rpartition("/")[0]
    assert not any_remote.exists(key)
    any_remote.put(key, file)
    any_remote.fetch(key, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == DATA
    assert any_remote.size(key) == len(DATA)
    assert any_remote.exists(key)
    assert any_remote.read_ranges(key, [range(5, 9)]) == [DATA[5:9]]
    assert list(any_remote.keys(folder)) == [key]
    assert key in list(any_remote.keys())
    assert any_remote.delete(key)
    assert not any_remote.exists(key)
    assert not any_remote.delete(key)
    assert list(any_remote.keys(folder)) == []


def test_put_replaces_and_an_empty_file_is_one(any_remote, key, file, tmp_path):
    any_remote.put(key, file)
    file.write_bytes(b"")
    any_remote.put(key, file)
    assert any_remote.size(key) == 0
    (tmp_path / "back").write_bytes(b"what lay here")
    any_remote.fetch(key, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""


def test_what_is_missing_is_a_missing_file(any_remote, key, tmp_path):
    for ask in (
        lambda: any_remote.fetch(key, tmp_path / "back"),
        lambda: any_remote.size(key),
        lambda: any_remote.read_ranges(key, [range(3)]),
    ):
        with pytest.raises(FileNotFoundError, match=rf"{key} is not there"):
            ask()
    assert not (tmp_path / "back").exists()


def test_a_folder_is_no_object(any_remote, key, file, tmp_path):
    any_remote.put(key, file)
    folder = key.rpartition("/")[0]
    assert not any_remote.exists(folder)
    assert not any_remote.delete(folder)
    assert any_remote.exists(key)
    assert list(any_remote.keys(folder[:-1])) == []  # "…/a" is not a folder though "…/ab" is


@pytest.mark.parametrize(
    "bad",
    [
        *("", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "a/./b", "a\\b", "a\0b", "a/.b"),
        *("a\n", "é", "a b", "*", "a?versionId=1", "-rf", "C:/x", "~/x"),
    ],
)
def test_keys_that_could_lead_elsewhere_are_refused(any_remote, bad, file, tmp_path):
    for use in (
        lambda: any_remote.put(bad, file),
        lambda: any_remote.fetch(bad, tmp_path / "back"),
        lambda: any_remote.read_ranges(bad, [range(1)]),
        lambda: any_remote.size(bad),
        lambda: any_remote.exists(bad),
        lambda: any_remote.delete(bad),
        lambda: any_remote.keys(bad or "."),
    ):
        with pytest.raises(ValueError, match="is not a key"):
            use()
    assert not (tmp_path / "back").exists()


RANGES = st.lists(
    st.tuples(
        st.integers(0, len(DATA)), st.sampled_from([0, 1, 100, 5000, module._GAP, 900_000])
    ).map(lambda pair: range(pair[0], min(sum(pair), len(DATA)))),
    max_size=12,
)


@given(RANGES)
@settings(max_examples=25, deadline=None)
def test_ranges_are_what_a_slice_of_the_object_is(remote, ranges):
    if not remote.exists("ranges/data"):
        remote._filesystem().pipe_file(remote._path("ranges/data"), DATA)
    assert remote.read_ranges("ranges/data", ranges) == [DATA[r.start : r.stop] for r in ranges]


@given(RANGES, st.sampled_from([100_000, 10**9]))
@settings(max_examples=200, deadline=None)
def test_merged_ranges_lie_in_few_requests_in_order(ranges, largest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LARGEST", largest)
        requests, place = merge(ranges)
    for wanted, request in zip(ranges, place, strict=True):
        assert (request is None) == (not wanted)
        if request is not None:
            assert requests[request].start <= wanted.start < wanted.stop <= requests[request].stop
    for left, right in pairwise(requests):
        assert left.start <= right.start
        assert left.stop < right.stop
        far = right.start > left.stop + module._GAP
        assert far or right.stop - left.start > largest
    longest = max(map(len, ranges), default=0)
    assert all(len(request) <= max(largest, longest) for request in requests)
    assert {r.start for r in requests} <= {r.start for r in ranges}
    assert {r.stop for r in requests} <= {r.stop for r in ranges}


@pytest.mark.parametrize("bad", [range(-2, 4), range(4, 2), range(0, 8, 2), range(5, 1, -1)])
def test_ranges_that_are_not_of_bytes_are_refused(remote, stored, bad):
    with pytest.raises(ValueError, match="is not a range of bytes"):
        remote.read_ranges(stored, [range(3), bad])


def test_ranges_close_together_are_one_request(proxied, stored):
    remote, proxy = proxied
    remote.read_ranges(stored, [range(1000, 1100), range(10), range(10, 10)])
    assert proxy.seen == ["GET bytes=0-1099"]
    proxy.told()
    remote.read_ranges(stored, [range(FAR, FAR + 3), range(10)])
    assert sorted(proxy.seen) == ["GET bytes=0-9", f"GET bytes={FAR}-{FAR + 2}"]
    proxy.told()
    assert remote.read_ranges(stored, [range(4, 4)]) == [b""]
    assert proxy.seen == []


def test_ranges_of_several_threads_are_asked_for_at_once(proxied, stored):
    remote, proxy = proxied
    ranges = [range(i * FAR, i * FAR + 100) for i in range(6)]
    proxy.told(together=4 * len(ranges))  # nobody is answered before all have asked
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: remote.read_ranges(stored, ranges), range(4))
    assert list(answers) == [[DATA[r.start : r.stop] for r in ranges]] * 4


@pytest.mark.parametrize("bytes_", [range(len(DATA) - 5, len(DATA) + 5), range(10**8, 10**8 + 1)])
def test_a_range_behind_the_end_is_an_error_at_once(proxied, stored, bytes_):
    remote, proxy = proxied
    with pytest.raises(RemoteError, match=r"shorter|5 bytes came, expected 10\."):
        remote.read_ranges(stored, [bytes_])
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("fault", [500, 503, 429, 400, "cut", "half"])
def test_what_fails_twice_is_read_the_third_time(proxied, stored, fault, tmp_path):
    remote, proxy = proxied
    proxy.told(fault, fault)
    assert remote.read_ranges(stored, [range(7, 5000)]) == [DATA[7:5000]]
    assert proxy.seen == ["GET bytes=7-4999"] * 3
    proxy.told(fault, fault)
    remote.fetch(stored, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == DATA
    assert proxy.seen == ["GET"] * 3


@pytest.mark.parametrize("fault", [503, "cut"])
def test_every_operation_is_tried_again(proxied, key, file, fault):
    remote, proxy = proxied
    proxy.told(fault, fault)
    remote.put(key, file)
    assert proxy.seen == ["PUT"] * 3
    proxy.told(fault, fault)
    assert remote.size(key) == len(DATA)
    assert proxy.seen == ["HEAD"] * 3
    proxy.told(fault, fault)
    assert list(remote.keys(key.rpartition("/")[0])) == [key]
    assert proxy.seen == ["GET"] * 3
    proxy.told(fault, fault)
    assert remote.delete(key)
    assert proxy.seen == ["HEAD"] * 3 + ["DELETE"]


def test_only_the_ranges_that_failed_are_asked_for_again(proxied, stored):
    remote, proxy = proxied
    ranges = [range(i * FAR, i * FAR + 100) for i in range(5)]
    proxy.told(503, 503)
    assert remote.read_ranges(stored, ranges) == [DATA[r.start : r.stop] for r in ranges]
    assert len(proxy.seen) == 7
    assert len(set(proxy.seen)) == 5


def test_it_gives_up_and_says_what_where_and_what_to_do(proxied, stored, tmp_path):
    remote, proxy = proxied
    proxy.told(*[503] * 99)
    with pytest.raises(RemoteError, match=r"cannot read s3://bucket/kv/acme.*as told.*6 attempts"):
        remote.fetch(stored, tmp_path / "back")
    assert len(proxy.seen) == 6
    assert not (tmp_path / "back").exists()


def test_what_is_refused_is_not_asked_for_again(proxied, stored, file):
    remote, proxy = proxied
    for use in (
        lambda: remote.read_ranges(stored, [range(3)]),
        lambda: remote.size(stored),
        lambda: remote.put(stored, file),
        lambda: remote.keys(),
    ):
        proxy.told(403)
        with pytest.raises(RemoteError, match="Check the credentials"):
            use()
        assert len(proxy.seen) == 1


@pytest.mark.parametrize("fault", ["short", "longer"])
def test_a_complete_answer_of_another_length_is_an_error(proxied, stored, fault):
    remote, proxy = proxied
    proxy.told(fault)
    with pytest.raises(RemoteError, match=r"bytes came, expected 100\. Not used"):
        remote.read_ranges(stored, [range(100)])
    assert len(proxy.seen) == 1


def test_a_download_of_another_length_is_an_error_and_removed(proxied, stored, tmp_path):
    remote, proxy = proxied
    proxy.told("unsaid")
    with pytest.raises(RemoteError, match=r"1,000,000 bytes came, expected 2,000,000\. Not used"):
        remote.fetch(stored, tmp_path / "back")
    assert proxy.seen == ["GET", "HEAD"]
    assert not (tmp_path / "back").exists()


def test_a_download_with_another_checksum_is_asked_for_again(proxied, stored, tmp_path):
    remote, proxy = proxied
    proxy.told("wrong")
    remote.fetch(stored, tmp_path / "back")
    assert proxy.seen == ["GET", "GET"]
    assert (tmp_path / "back").read_bytes() == DATA


def test_a_download_is_one_request_of_one_version(s3, stored, tmp_path):
    proxy = Proxy(s3)
    with Remote.open(BUCKET, default_block_size=100_000, endpoint_url=proxy.url) as remote:
        remote.fetch(stored, tmp_path / "back")
    assert proxy.seen == ["GET"]
    assert (tmp_path / "back").read_bytes() == DATA
    proxy.stop()


def test_an_answer_that_never_comes_is_not_waited_for(s3, stored):
    proxy = Proxy(s3)
    patient = Retry(total_s=1.5, first_pause_s=0.01)
    with Remote.open(BUCKET, retry=patient, endpoint_url=proxy.url) as remote:
        assert remote.size(stored) == len(DATA)
        proxy.told(*["hang"] * 9)
        with pytest.raises(RemoteError, match=r"FSTimeoutError.*whether the service runs"):
            remote.read_ranges(stored, [range(3)])
        proxy.told()
        assert remote.read_ranges(stored, [range(3)]) == [DATA[:3]]
    proxy.stop()


def test_a_server_that_dies_is_an_error_until_it_is_back(s3, stored):
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with Remote.open(BUCKET, retry=QUICK, endpoint_url=f"http://{host}:{port}") as remote:
        assert remote.read_ranges(stored, [range(9)]) == [DATA[:9]]
        server.stop()
        server._server.server_close()
        with pytest.raises(RemoteError, match=r"6 attempts.*Check the network"):
            remote.read_ranges(stored, [range(9)])
        with pytest.raises(RemoteError, match=r"6 attempts.*Check the network"):
            remote.exists(stored)
        back = ThreadedMotoServer(host, port, verbose=False)
        back.start()
        assert remote.read_ranges(stored, [range(9)]) == [DATA[:9]]
        back.stop()


def test_wrong_credentials_and_none_are_refused_without_showing_them(s3, stored, monkeypatch):
    def ask(path: str, body: str) -> None:
        connection = http.client.HTTPConnection(s3.removeprefix("http://"))
        connection.request("POST", path, body)
        assert connection.getresponse().status == 200
        connection.close()

    ask("/moto-api/reset-auth", "0")  # from now on every key is looked up
    try:
        remote = Remote.open(BUCKET, retry=QUICK, endpoint_url=s3, key="AKIAWRONG", secret="sesame")
        with remote, pytest.raises(RemoteError, match="Check the credentials") as caught:
            remote.read_ranges(stored, [range(3)])
        assert "sesame" not in f"{caught.value} {remote!r}"
    finally:
        ask("/moto-api/reset-auth", "Infinity")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with (
        Remote.open(BUCKET, retry=QUICK, endpoint_url=s3) as remote,
        pytest.raises(
            RemoteError, match=r"(?i)unable to locate credentials.*Check the credentials"
        ),
    ):
        remote.read_ranges(stored, [range(3)])


def test_a_missing_bucket_is_not_a_missing_object(s3, file, tmp_path):
    with Remote.open("s3://elsewhere/kv", retry=QUICK, endpoint_url=s3) as remote:
        for use in (
            lambda: remote.fetch("a/b", tmp_path / "back"),
            lambda: remote.read_ranges("a/b", [range(3)]),
            lambda: remote.exists("a/b"),
            lambda: remote.put("a/b", file),
            lambda: remote.keys(),
        ):
            with pytest.raises(RemoteError, match="Create the bucket, or correct the URL"):
                use()


def test_the_endpoint_comes_from_the_environment(s3, stored, monkeypatch):
    settings_: dict[str, dict[str, object]] = {}
    fsspec.config.set_conf_env(settings_, {"FSSPEC_S3_ENDPOINT_URL": s3})
    monkeypatch.setitem(fsspec.config.conf, "s3", settings_["s3"])
    with Remote.open(BUCKET, retry=QUICK) as remote:
        assert remote.size(stored) == len(DATA)
    monkeypatch.delitem(fsspec.config.conf, "s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)
    with Remote.open(BUCKET, retry=QUICK) as remote:
        assert remote.size(stored) == len(DATA)


def test_many_threads_read_through_one_remote(remote, stored):
    def read(i: int) -> bool:
        ranges = [range(j * FAR + i, j * FAR + i + 1000) for j in range(4)]
        return remote.read_ranges(stored, ranges) == [DATA[r.start : r.stop] for r in ranges]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(32)))


def test_a_forked_process_reads_with_connections_of_its_own(remote, stored):
    assert remote.read_ranges(stored, [range(3)]) == [DATA[:3]]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, remote.read_ranges(stored, [range(9)])[0])
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], 60)[0], "the child hangs"
        assert os.read(reader, 99) == DATA[:9]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    assert remote.read_ranges(stored, [range(5)]) == [DATA[:5]]


def test_a_closed_remote_says_so(s3, stored):
    remote = Remote.open(BUCKET, retry=QUICK, endpoint_url=s3)
    assert remote.exists(stored)
    remote.close()
    remote.close()
    with pytest.raises(RemoteError, match="s3://bucket/kv was closed: open it again"):
        remote.size(stored)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "names no bucket"),
        ("/some/folder", "expected one URL"),
        ("simplecache::s3://bucket/kv", "expected one URL"),
        ("nonsense://bucket/kv", "Protocol not known"),
    ],
)
def test_urls_that_are_none_are_refused(url, says):
    with pytest.raises(ConfigError, match=says):
        Remote.open(url)


def test_a_url_is_shown_without_what_may_be_secret():
    remote = Remote.open("memory://someone:sesame@host/kv/?token=sesame")
    assert repr(remote) == "Remote('memory://host/kv')"


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"total_s": 0.0}, {"first_pause_s": -1.0}])
def test_a_retry_that_never_tries_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be above 0"):
        Retry(**wrong)


def test_pauses_double_up_to_the_longest():
    retry = Retry(first_pause_s=1.0, longest_pause_s=3.0)
    for attempt, longest in ((1, 1.0), (2, 2.0), (3, 3.0), (9, 3.0)):
        assert longest / 2 <= retry.pause(attempt) <= longest


def test_a_local_fault_is_not_the_remotes(remote, stored, tmp_path):
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        remote.fetch(stored, full)
    with pytest.raises(NotADirectoryError, match="no such folder"):
        remote.fetch(stored, tmp_path / "nowhere" / "back")
    with pytest.raises(FileNotFoundError, match="nothing"):
        remote.put(stored, tmp_path / "nothing")
    assert remote.size(stored) == len(DATA)


def test_an_upload_to_files_that_fails_leaves_what_was_there(tmp_path, file):
    remote = Remote.open(f"file://{tmp_path}/remote")
    (tmp_path / "remote/a/b/c").mkdir(parents=True)
    with pytest.raises(RemoteError, match="cannot write"):
        remote.put("a/b", file)  # which is a folder
    remote.put("a/x", file)
    (tmp_path / "remote/a/.x.0f.tmp").write_bytes(b"an upload that was interrupted")
    assert sorted(path.name for path in (tmp_path / "remote/a").iterdir()) == [
        ".x.0f.tmp",
        "b",
        "x",
    ]
    assert list(remote.keys()) == ["a/x"]
