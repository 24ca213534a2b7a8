"""Files become text in a child process with little time and memory; documents are counted and survive an engine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsift.errors import InputError
from kvsift.server import documents, uploads
from kvsift.server.api_errors import ApiError
from kvsift.server.document_files import DocumentFiles
from kvsift.server.documents import Documents
from kvsift.server.extract import text_of_html
from kvsift.server.settings import ServerSettings
from kvsift.server.supervisor import Supervisor
from kvsift.server.uploads import Extraction, NoText, decoded, kind_of, readable_kinds, shown_name

ME, OTHER = ("127.0.0.1", ""), ("x", "x")


def extracted(kind: str, data: bytes) -> str:
    return asyncio.run(Extraction().text(kind, data, ME))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "takes more than 1 s to read"),
        ("import os; os.kill(os.getpid(), 24)", "took more than 10 s of a processor, or too much memory"),
        ("import sys; sys.stderr.write('it is odd'); sys.exit(2)", "it is odd."),
        ("import sys; sys.exit(1)", "failed"),
        ("print('  ')", "has no text"),
    ],
)
def test_a_child_that_fails_says_why_and_is_gone(monkeypatch: pytest.MonkeyPatch, code: str, reason: str) -> None:
    monkeypatch.setattr(uploads, "EXTRACT", (sys.executable, "-c", code))
    monkeypatch.setattr(uploads, "EXTRACT_S", 1.0)
    with pytest.raises(NoText, match=reason):
        extracted("pdf", b"%PDF-")


def test_memory_and_length_end(monkeypatch: pytest.MonkeyPatch) -> None:
    small = "from kvsift.server import extract; extract.{} = {}; extract.main()"
    page = b"<p>" + b"word " * 1_500_000
    for name, value, reason in (("MEMORY_BYTES", 40 << 20, "memory"), ("MOST_CHARACTERS", 1000, "longer than 1,000")):
        command = (sys.executable, "-c", small.format(name, value))
        monkeypatch.setattr(uploads, "EXTRACT", command)
        with pytest.raises(NoText, match=reason):
            extracted("html", page)


def test_a_file_written_by_an_attacker_opens_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret words")
    page = f"<iframe src='file://{secret}'></iframe><p>{secret.as_uri()}<object data='{secret}'>x</object>"
    assert extracted("html", page.encode()) == secret.as_uri()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a<p>b", "a\n\nb"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<pre>a\n  b</pre>c", "a\n  b\n\nc"),
        ("<p>x<pre>\nf:\r\n\n\n\n\ta\n\n\n  \n\tb \t c\n\n</pre>\n\n<p>d", "x\n\nf:\n\n\n\n\ta\n\n\n  \n\tb \t c\n\nd"),
        ("<pre><code>a\n\n\nb\n</code></pre>c\0\1", "a\n\n\nb\n\nc"),
        ("<table><tr><th>x<th>y<tr><td>1<td>2</table>", "x\ty\n1\t2"),
        ("<style>x</style><STYLE>y</STYLE>z", "z"),
        ("<svg><text>no</text><svg></svg><text>no</text></svg>yes", "yes"),
        ("</script>a<script>b", "a"),
        ("<head><title>t</title><body>b", "b"),
        ("&lt;b&gt; &amp;amp; &#128578;", "<b> &amp; 🙂"),
        ("a <!-- b --> c <![CDATA[ d ]]>", "a c"),
        ("", ""),
    ],
)
def test_pages_become_paragraphs(page: str, text: str) -> None:
    assert text_of_html(page) == text


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        ("<p>Привет".encode("cp1251"), "windows-1251", "<p>Привет"),
        ("<p>Привет".encode("koi8-r"), "KOI8-R", "<p>Привет"),
        ("<meta charset=utf-8>Привет".encode("cp1251"), "windows-1251", "<meta charset=utf-8>Привет"),  # HTTP counts
        ("<p>für".encode("utf-8-sig"), "windows-1251", "<p>für"),  # but for a byte order mark
        ("<p>für".encode("utf-16"), "windows-1251", "<p>für"),
        ("<p>für".encode("utf-16-le"), "utf-16", "<p>für"),
        ("<meta charset='iso-8859-1'>„für“".encode("cp1252"), None, "<meta charset='iso-8859-1'>„für“"),
        ("<?xml version='1.0' encoding='windows-1251'?>Да".encode("cp1251"), None, None),
        ("<meta charset = gb2312>朱镕基".encode("gbk"), None, "<meta charset = gb2312>朱镕基"),
        (b"<meta charset=nonsense>\xc3\xbc", None, "<meta charset=nonsense>ü"),
        (b"<meta charset=utf-16>\xc3\xbc", None, "<meta charset=utf-16>ü"),
        (b"<p>\xc3\xbc", None, "<p>ü"),
    ],
)  # fmt: skip
def test_a_page_is_read_in_the_charset_of_its_content_type_or_the_one_it_names(
    data: bytes, charset: str | None, text: str | None
) -> None:
    assert decoded(data, "html", charset) == (text or data.decode("cp1251"))


@pytest.mark.parametrize(
    ("data", "kind", "charset", "reason"),
    [
        (b"<p>caf\xe9</p>", "html", None, r"is not UTF-8 text \(byte 6\)"),
        (b"<meta charset=utf-8>\xe9", "html", None, "is not UTF-8 text"),
        (b"<p>caf\xe9</p>", "html", "shift_jis", "is not CP932 text"),
        (b"caf\xe9", "markdown", "utf-8", "is not UTF-8 text"),
        (b"a", "html", "punycode", "the charset 'punycode' of the Content-Type is not known"),
        (b"a", "markdown", "x" * 999, "is not known"),
    ],
)
def test_bytes_that_cannot_be_read_are_refused_and_not_replaced(
    data: bytes, kind: str, charset: str | None, reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        decoded(data, kind, charset)
    assert (refused.value.status, refused.value.code) == (400, "invalid_document")


def test_encodings_are_those_that_python_has() -> None:
    for name in uploads.ENCODINGS:
        assert b"a\0".decode(name)


def test_a_client_with_many_files_keeps_others_waiting_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client has one place; pages that keep the parser busy end after ten seconds of a processor."""
    monkeypatch.setattr(uploads, "EXTRACT", (sys.executable, "-c", "import sys; exec(sys.stdin.read())"))
    ended: list[str] = []

    async def extract(extraction: Extraction, name: str, code: str, owner: tuple[str, str]) -> None:
        await extraction.text("html", code.encode(), owner)
        ended.append(name)

    async def run() -> None:
        extraction = Extraction()
        slow = [asyncio.create_task(extract(extraction, f"a{number}", "import time; time.sleep(0.5); print(1)", ME))
                for number in range(uploads.AT_ONCE)]  # fmt: skip
        await asyncio.sleep(0.1)
        await extract(extraction, "b", "print(1)", OTHER)
        await asyncio.gather(*slow)

    asyncio.run(run())
    assert ended.index("b") <= 1


def test_a_page_that_keeps_the_parser_busy_ends_after_seconds_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "extract.Paragraphs.feed = lambda parser, page: all(zero == 0 for zero in iter(int, 1))"
    code = f"from kvsift.server import extract; extract.CPU_S = 1; {busy}; extract.main()"
    monkeypatch.setattr(uploads, "EXTRACT", (sys.executable, "-c", code))
    with pytest.raises(NoText, match="took more than 10 s of a processor"):
        extracted("html", b"<p>A mill.</p>")


def test_pdf_files_need_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "find_spec", lambda name: None)
    assert readable_kinds() == ["text", "markdown", "html"]
    with pytest.raises(ApiError, match=r"pip install 'kvsift\[pdf\]'") as refused:
        kind_of("application/octet-stream", "a.txt", b"%PDF-1.7")
    assert refused.value.status == 415


def test_names_are_shown_as_they_can_be() -> None:
    assert shown_name("a\r\nb\x00\u202e.md ", "x") == "ab.md"
    assert shown_name(" \n", "text") == shown_name(None, "text") == "text"
    assert len(shown_name("a" * 10_000, "x")) == 200


def sent_by(shelf: list[dict[str, Any]], files: DocumentFiles | None = None) -> Documents:
    return Documents(shelf.append, files, ["", "key"])


def test_documents_have_a_most_and_failed_ones_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_DOCUMENTS", 2)
    monkeypatch.setattr(documents, "MOST_CHARACTERS", 20)
    sent: list[dict[str, Any]] = []
    held = sent_by(sent)
    first = held.add("a", "aaaa", 4, ME)
    held.add("b", "bbbb", 4, ME)
    with pytest.raises(ApiError, match="there are 2 documents already"):
        held.add("c", "cccc", 4, ME)
    assert held.add("a", "aaaa", 4, ME) is first
    assert held.add("a", "aaaa", 4, OTHER).key != first.key
    with pytest.raises(ApiError, match="have 12 characters, of at most 20"):
        held.add("c", "c" * 9, 9, OTHER)
    assert len(sent) == 3
    held.received({"document": first.key, "status": "failed", "error": "no room", "pinned": False})
    again = held.add("a", "aaaa", 4, ME)
    assert (again.key, again.status, len(sent)) == (first.key, "reading", 4)
    assert [each.key for each in held.of(ME)][-1] == first.key


def test_the_seconds_that_are_left_follow_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("kvsift.server.served_document.monotonic", lambda: clock[0])
    document = sent_by([]).add("a", "aaaa", 4, ME)
    assert document.seconds_left is None
    document.update(tokens=1000, num_prefilled=0)
    assert document.seconds_left is None
    clock[0] = 102.0
    document.update(num_prefilled=400)
    assert document.seconds_left == 3.0
    document.update(status="ready", num_prefilled=1000)
    assert document.seconds_left == 0.0


def test_a_document_that_kills_the_engine_twice_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = sys.executable, str(Path(__file__).parent / "fake_worker.py")
    monkeypatch.setattr("kvsift.server.supervisor.WORKER", worker)

    async def run() -> None:
        supervisor = Supervisor(ServerSettings(), lambda job: None)
        task = asyncio.create_task(supervisor.run())
        try:
            async with asyncio.timeout(20):
                await supervisor.ready.wait()
                well, bad = (supervisor.documents.add("a", text, 3, ME) for text in ("well", "die"))
                while bad.status == "reading" or well.status == "reading":
                    await asyncio.sleep(0.02)
            assert (bad.status, bad.error) == ("failed", documents.ENGINE_LOST)
            assert well.status == "ready"
            assert supervisor.restarts == 2
        finally:
            supervisor.stop()
            await task

    asyncio.run(run())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        DocumentFiles(tmp_path / "file")


def test_a_document_that_cannot_be_written_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvsift.server.document_files.write_atomically", full)
    held = sent_by([], DocumentFiles(tmp_path))
    document = held.add("a", "aaaa", 4, ME)
    assert document.status == "reading"
    told = document.as_dict()
    assert (told["kept"], told["why_not_kept"]) == (False, "the disk is full.")
    assert "is not kept: the disk is full" in capsys.readouterr().err
    monkeypatch.undo()
    told = held.add("a", "aaaa", 4, ME).as_dict()  # there is room again
    assert (told["kept"], told["why_not_kept"]) == (True, None)


def test_a_document_of_a_server_without_a_folder_says_that_it_is_not_kept() -> None:
    told = sent_by([]).add("a", "aaaa", 4, ME).as_dict()
    assert (told["kept"], told["why_not_kept"]) == (False, documents.NO_FOLDER)


def test_a_second_server_on_a_folder_of_documents_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    first = DocumentFiles(tmp_path)
    partial = tmp_path / f"doc-{'0' * 24}.json.1-2.partial"
    partial.write_text("being written")
    reason = rf"is in use by another kvsift serve: process {os.getpid()} on .+, since 20"
    with pytest.raises(InputError, match=reason):
        DocumentFiles(tmp_path)
    assert partial.exists()
    del first  # as the end of a process, however it comes
    DocumentFiles(tmp_path)


def test_files_of_another_form_or_name_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = DocumentFiles(tmp_path)
    document = sent_by([], files).add("ä", "Grüße 🙂\n\n", 4, ("127.0.0.1", "key"))
    path = tmp_path / f"{document.key}.json"
    assert path.stat().st_mode & 0o077 == 0
    (tmp_path / f"doc-{'0' * 24}.json").write_text('{"form": 2, "checksum": ""}\n{}')
    (tmp_path / f"doc-{'1' * 24}.json").write_text("[]")
    (tmp_path / f"doc-{'2' * 24}.json").write_bytes(b"\xff")
    (tmp_path / "doc-notes.json").write_text("{}")
    again = sent_by([], files)
    [loaded] = again.of(("elsewhere", "key"))
    assert (loaded.key, loaded.name, loaded.text) == (document.key, "ä", "Grüße 🙂\n\n")
    told = capsys.readouterr().err
    assert Documents([].append, files, ["another"]).of(("elsewhere", "key")) == []
    assert told.count("is left out") == 3
    assert "has form 2, and this version reads 1" in told
    assert len(list(tmp_path.iterdir())) == 6
