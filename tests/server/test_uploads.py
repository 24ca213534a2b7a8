"""Files become text in a child process with little time and memory."""

import asyncio
import sys
from pathlib import Path

import pytest

from kvsift.server import uploads
from kvsift.server.api_errors import ApiError
from kvsift.server.extract import text_of_html
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
