"""The text of an HTML or PDF file, in a process of its own with little time and memory.

    python -m kvsift.server.extract html|pdf

The file, HTML in UTF-8, is read from standard input. Its text is written to standard output; what a user did wrong, to
standard error, with exit code 2. No file is opened, whatever the input asks for.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from html.parser import HTMLParser
from io import BytesIO

CPU_S = 10
MEMORY_BYTES = 2 << 30
MOST_CHARACTERS = 16 << 20

UNSEEN = {"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "select", "head"}
NO_END = {"br", "hr", "img", "input", "link", "meta", "area", "base", "col", "embed", "source", "track", "wbr"}
BREAKS = {
    "p", "div", "section", "article", "main", "header", "footer", "nav", "aside", "h1", "h2", "h3", "h4", "h5", "h6",
    "ul", "ol", "dl", "table", "blockquote", "pre", "figure", "form", "hr", "body", "title", "fieldset",
}  # fmt: skip
LINES = {"br", "li", "tr", "dt", "dd", "option", "caption", "figcaption"}
KEPT = str.maketrans({" ": "\0", "\t": "\1", "\n": "\n\2"})  # white space of preformatted text, and its lines
RESTORED = str.maketrans({"\0": " ", "\1": "\t", "\2": None})
CELLS = {"td", "th"}


class Refused(Exception):
    """A file without text for us, with the reason."""


class Paragraphs(HTMLParser):
    """Text of a page: blocks become paragraphs, rows and list items lines; what no reader sees is left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._unseen: list[str] = []
        self._preformatted = 0
        self._begins_preformatted = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self._unseen.clear()  # a head without an end
        if tag in UNSEEN or (self._unseen and tag == self._unseen[-1]):
            self._unseen.append(tag)
        self._preformatted += tag == "pre"
        self._begins_preformatted = tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            del self._unseen[len(self._unseen) - 1 - self._unseen[::-1].index(tag) :]
        self._preformatted -= tag == "pre" and self._preformatted > 0
        if tag not in NO_END:
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._begins_preformatted:
            data, self._begins_preformatted = data.removeprefix("\n"), False  # which HTML does not count
        if not self._unseen:
            self.parts.append(data.translate(KEPT) if self._preformatted else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if not self._unseen:
            self.parts.append("\n\n" if tag in BREAKS else "\n" if tag in LINES else "\t" if tag in CELLS else "")


def text_of_html(page: str) -> str:
    """Return the paragraphs of a page."""
    parser = Paragraphs()
    parser.feed(page.translate(dict.fromkeys(range(3))).replace("\r\n", "\n"))  # ``KEPT`` uses these
    parser.close()
    # without blank lines at the end of preformatted text
    text = re.sub(r"(\n\x02[\x00\x01]*)+(?=\n\n)", "", "".join(parser.parts))
    lines = (re.sub(r" *\t[ \t]*", "\t", re.sub(" {2,}", " ", line)).strip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip().translate(RESTORED)


def text_of_pdf(data: bytes) -> str:
    """Return the text of the pages of a PDF file.

    Raises:
        Refused: if it is encrypted, damaged or has only pictures.
    """
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its warnings would follow the reason
    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Refused("the PDF file is encrypted. Remove its password first")
        pages, characters = list[str](), 0
        for page in reader.pages:
            pages.append((page.extract_text() or "").strip())
            characters += len(pages[-1])
            if characters > MOST_CHARACTERS:
                break
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError) as error:
        raise Refused(f"the PDF file is damaged ({type(error).__name__})") from error
    text = "\n\n".join(filter(None, pages))
    if not text:
        raise Refused("the PDF file has no text, perhaps only pictures of pages. Recognise their text first")
    return text


def main() -> None:
    """Convert standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = sys.stdin.buffer.read()
    try:
        text = text_of_html(data.decode()) if sys.argv[1] == "html" else text_of_pdf(data)
        if len(text) > MOST_CHARACTERS:
            raise Refused(f"its text is longer than {MOST_CHARACTERS:,} characters")
    except Refused as error:
        sys.stderr.write(str(error))
        sys.exit(2)
    except MemoryError:
        sys.stderr.write(f"it needs more than {MEMORY_BYTES >> 30} GB of memory")
        sys.exit(2)
    except RecursionError:
        sys.stderr.write("it is nested too deeply")
        sys.exit(2)
    text = text.encode("utf-8", "replace").decode()  # PDF files may hold halves of characters
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    main()
