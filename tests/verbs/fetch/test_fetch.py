"""grappe fetch against a server on the loopback, with a certificate of its own: whole, cut, resumed, wrong."""

import hashlib
import http.server
import io
import os
import re
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from grappe import finder
from grappe.cli.commands import app
from grappe.data import Corpus
from grappe.errors import DataError, GrappeError, UsageError
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.mnist import Mnist
from grappe.training.run import Run
from grappe.verbs.fetch import fetch
from tests import idx_files
from tests.data.corpus.shards import corpus_folder
from tests.tasks.error_corpus import TASK

CONTENT = os.urandom(700_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; what it is told to do wrong stands in its attributes."""

    files: dict[str, bytes]
    requests: list[tuple[str, str]]
    cut_at: int | None = None
    no_ranges = False
    leads_to = ""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append((self.path, wanted))
        if self.server.leads_to:
            self.send_response(302)
            self.send_header("Location", self.server.leads_to)
            self.end_headers()
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and not self.server.no_ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start : self.server.cut_at])

    def log_message(self, *args: object) -> None:
        pass


def serving(server: Server) -> Iterator[Server]:
    server.files, server.requests = {"/data/some.bin": CONTENT}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certificate")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*words.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=place, check=True, capture_output=True
    )
    return place


@pytest.fixture
def server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An https server, whose certificate is trusted."""
    made = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    made.socket = context.wrap_socket(made.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    yield from serving(made)


def address(server: Server, path: str = "/data/some.bin", scheme: str = "https") -> str:
    return f"{scheme}://127.0.0.1:{server.server_address[1]}{path}"


def task(place: Path, url: str, content: bytes = CONTENT, more: str = "") -> str:
    """A task file that names one download."""
    checksum = hashlib.sha256(content).hexdigest()
    file = place / "mine.py"
    file.write_text(
        "import grappe\n\nclass Mine(grappe.Task):\n"
        "    downloads = (grappe.Download(\n"
        f"        url={url!r}, size={len(content)}, sha256={checksum!r}, {more}\n    ),)\n"
    )
    return str(file)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, capsys) -> None:
    words = ["fetch", task(tmp_path, address(server), more="folder='set'"), "--data", str(tmp_path / "data")]
    assert app(words, exit_on_error=False, print_error=False) == 0
    assert (tmp_path / "data" / "set" / "some.bin").read_bytes() == CONTENT
    assert "0.7 MB" in capsys.readouterr().out
    assert app(words, exit_on_error=False, print_error=False) == 0
    assert "was there" in capsys.readouterr().out
    assert server.requests == [("/data/some.bin", "")]
    assert [one.name for one in (tmp_path / "data" / "set").iterdir()] == ["some.bin"]


@pytest.mark.parametrize("no_ranges", [False, True])
def test_an_interrupted_download_goes_on_or_begins_again(server: Server, tmp_path: Path, no_ranges: bool) -> None:
    mine, data = task(tmp_path, address(server)), tmp_path / "data"
    server.cut_at, server.no_ranges = 300_000, no_ranges
    with pytest.raises(DataError, match=r"300,000 of 700,000 bytes are there: the same command continues"):
        fetch(mine, data)
    server.cut_at = None
    fetch(mine, data)
    assert (data / "some.bin").read_bytes() == CONTENT
    assert server.requests[-1] == ("/data/some.bin", "bytes=300000-")


ROWS = "grappe.data.Corpus(folder / 'rows', lambda row: (torch.full((3,), row['id'] / 100.0), row['id'] % 2))"
SHARDED = TASK.replace("Points(split)", ROWS).replace("    batch_size", "    downloads = (DOWNLOADS)\n    batch_size")


@pytest.mark.parametrize("ending", [".parquet", ".jsonl.zst"])
def test_the_shards_of_a_corpus_are_all_there_before_it_is_read(server: Server, tmp_path, capfd, ending: str) -> None:
    """A fetch that ended early left some of them: a training on these alone would be another one, in silence."""
    shards = {file.name: file.read_bytes() for file in sorted(corpus_folder(tmp_path / "made", ending).iterdir())}
    server.files = {f"/{name}": content for name, content in shards.items()}
    downloads = [
        f"grappe.Download(url={address(server, f'/{name}')!r}, size={len(content)}, "
        f"sha256={hashlib.sha256(content).hexdigest()!r}, folder='rows'),"
        for name, content in shards.items()
    ]
    mine, data = tmp_path / "rows.py", tmp_path / "data"
    mine.write_text(SHARDED.replace("DOWNLOADS", " ".join(downloads)))
    *_, last = shards
    content = server.files.pop(f"/{last}")
    with pytest.raises(DataError, match=f"{last} cannot be downloaded: the server answered 404"):
        fetch(str(mine), data)
    for paths in (data / "rows", data / "rows" / f"*{ending}", [data / "rows" / name for name in shards]):
        with pytest.raises(DataError, match="grappe fetch has not finished this file"):
            Corpus(paths)
    assert len(Corpus([data / "rows" / name for name in shards if name != last])) < 95, "these were asked for by name"
    server.files[f"/{last}"] = content
    words = [str(mine), "--data", str(data)]
    assert app(["fetch", *words], exit_on_error=False, print_error=False) == 0
    assert capfd.readouterr().out.count("was there") == 2
    assert app(["data", "check", str(data / "rows")], exit_on_error=False, print_error=False) in (0, None)
    assert "95" in capfd.readouterr().out
    app(["train", *words, "--run", str(tmp_path / "run"), "--plan", "replicate=2"], exit_on_error=False)
    assert Run(tmp_path / "run").latest().step == 12, "steps of 8 of 95 rows"


def test_another_file_is_refused_and_removed(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    mine = task(tmp_path, address(server), CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    with pytest.raises(DataError, match=r"gave another file .* sha256 is .*It was removed"):
        fetch(mine, data)
    assert list(data.iterdir()) == []
    with pytest.raises(DataError, match=r"gives more than the 100 bytes"):
        fetch(task(tmp_path, address(server), CONTENT[:100]), data)
    with pytest.raises(DataError, match="the connection ended before the file did"):
        fetch(task(tmp_path, address(server), CONTENT + b"more"), data)


def test_damage_in_what_came_before_is_noticed(server: Server, tmp_path: Path, data: Path) -> None:
    mine = task(tmp_path, address(server))
    (data / ".some.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="Try once more"):
        fetch(mine, data)
    fetch(mine, data)
    assert (data / "some.bin").read_bytes() == CONTENT


def test_what_is_there_already_is_left_alone(server: Server, tmp_path: Path, data: Path) -> None:
    (data / "some.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="move it away"):
        fetch(task(tmp_path, address(server)), data)
    assert (data / "some.bin").read_bytes() == b"mine" and server.requests == []


def test_two_at_once(server: Server, tmp_path: Path, data: Path) -> None:
    import fcntl

    with (data / ".some.bin.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another grappe fetch is downloading it"):
            fetch(task(tmp_path, address(server)), data)


def test_a_link_in_the_partial_files_place_is_not_followed(server: Server, tmp_path: Path, data: Path) -> None:
    (data / ".some.bin.part").symlink_to(tmp_path / "other")
    with pytest.raises(GrappeError, match="is a link"):
        fetch(task(tmp_path, address(server)), data)
    assert not (tmp_path / "other").exists()


def test_no_other_scheme_host_or_certificate(server: Server, tmp_path: Path, certificate: Path, monkeypatch) -> None:
    data = tmp_path / "data"
    for url in (address(server, scheme="http"), "file:///etc/hostname", "https:///some.bin", "ftp://a/b"):
        with pytest.raises(UsageError, match="https alone"):
            fetch(task(tmp_path, url), data)
    for target in ("https://127.0.0.1:9/data/some.bin", "http://127.0.0.1/x", "file:///etc/hostname"):
        server.leads_to = target
        with pytest.raises(GrappeError, match=r"leads on to|cannot be downloaded"):
            fetch(task(tmp_path, address(server)), data)
    server.leads_to = ""
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(DataError, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        fetch(task(tmp_path, address(server)), data)
    assert not any(one.stat().st_size for one in data.iterdir())


def test_redirections_on_the_same_host_are_followed(server: Server, tmp_path: Path) -> None:
    class Moved(Handler):
        def do_GET(self) -> None:
            if self.path == "/old/some.bin":
                self.send_response(301)
                self.send_header("Location", "/data/some.bin")
                self.end_headers()
            else:
                super().do_GET()

    server.RequestHandlerClass = Moved
    fetch(task(tmp_path, address(server, "/old/some.bin")), tmp_path / "data")
    assert (tmp_path / "data" / "some.bin").read_bytes() == CONTENT


def test_http_where_it_is_asked_for(tmp_path: Path) -> None:
    for plain in serving(Server(("127.0.0.1", 0), Handler)):
        mine = task(tmp_path, address(plain, scheme="http"))
        fetch(mine, tmp_path / "data", schemes=("http",))
        with pytest.raises(DataError, match=r"the server answered 404 Not Found"):
            fetch(task(tmp_path, address(plain, "/none", "http")), tmp_path / "data", schemes=("http",))


def archive(*files: tuple[str, bytes], link: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return stream.getvalue()


def test_named_members_of_an_archive_are_taken_out_and_no_others(server: Server, tmp_path: Path) -> None:
    packed = archive(("set/a.bin", b"aaa"), ("../evil", b"x"), ("set/b.bin", b"bb"), ("set/c", b"c"), link="set/d")
    server.files["/set.tar.gz"] = packed
    data = tmp_path / "data"
    mine = task(tmp_path, address(server, "/set.tar.gz"), packed, "members={'set/a.bin': 3, 'set/b.bin': 2}")
    fetch(mine, data)
    assert sorted(str(one.relative_to(data)) for one in data.rglob("*")) == ["set", "set/a.bin", "set/b.bin"]
    assert not (tmp_path / "evil").exists()
    assert fetch(mine, data)[0].was_there and len(server.requests) == 1
    (data / "set" / "b.bin").write_bytes(b"b")
    fetch(mine, data)
    assert (data / "set" / "b.bin").read_bytes() == b"bb"
    for members, said in (("{'set/d': 0}", "has no set/d"), ("{'set/a.bin': 4}", "has no set/a.bin of 4 bytes")):
        with pytest.raises(DataError, match=said):
            fetch(task(tmp_path, address(server, "/set.tar.gz"), packed, f"members={members}"), data)
    server.files["/set.tar.gz"] = b"nothing"
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(task(tmp_path, address(server, "/set.tar.gz"), b"nothing", "members={'x': 1}"), data)


@pytest.mark.parametrize("more", ["folder='..'", "folder='/tmp'", "members={'../x': 1}"])
def test_names_that_lead_out_are_refused(tmp_path: Path, more: str) -> None:
    with pytest.raises(UsageError, match="leads out of the data folder"):
        fetch(task(tmp_path, "https://127.0.0.1/some.bin", more=more), tmp_path / "data")


def test_a_task_without_downloads_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no files to download"):
        fetch("digits", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist", "mnist"])
def test_a_missing_data_set_says_the_command(name: str, tmp_path: Path) -> None:
    cls = finder.find(name)
    with pytest.raises(DataError, match=rf"grappe fetch {name} --data {re.escape(str(tmp_path))}\b"):
        cls().data("train", tmp_path)
    assert all(one.url.startswith("https://") and len(one.sha256) == 64 for one in cls.downloads)


def test_downloads_lie_where_their_tasks_look(tmp_path: Path) -> None:
    for name in Cifar10.downloads[0].members:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(3073 * 10))
    assert len(Cifar10().data("train", tmp_path)) == 45
    idx_files.write(tmp_path / Mnist.downloads[0].folder, 12, 12)
    assert all((tmp_path / one.folder / one.url.rpartition("/")[2]).is_file() for one in Mnist.downloads)
    assert len(Mnist().data("train", tmp_path)) == 11
