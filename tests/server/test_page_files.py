"""Files of the page: what a browser is told about them, and that they ask for nothing elsewhere."""

import re
from html.parser import HTMLParser

import pytest
from server.test_app import answers

from kvsift.server.page_files import CSP, PAGE
from kvsift.server.settings import ServerSettings

KINDS = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize("path", PAGE)
def test_files_have_a_type_a_policy_and_a_tag(path: str) -> None:
    [response] = answers(ServerSettings(), ("GET", path, {}))
    assert response.status_code == 200
    assert response.headers["content-type"] == f"{KINDS[path.rpartition('.')[2] if '.' in path else '']}; charset=utf-8"
    assert response.headers["content-security-policy"] == CSP
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    again, weak, other = answers(
        ServerSettings(),
        ("GET", path, {"if-none-match": response.headers["etag"]}),
        ("GET", path, {"if-none-match": f'"x", W/{response.headers["etag"]}'}),
        ("GET", path, {"if-none-match": '"x"'}),
    )
    assert [again.status_code, again.content, again.headers["etag"]] == [304, b"", response.headers["etag"]]
    assert (weak.status_code, other.status_code) == (304, 200)


def test_the_policy_allows_this_origin_only() -> None:
    assert CSP.startswith("default-src 'self'; ")
    assert not re.search(r"unsafe|https?:|\*|data:|blob:", CSP)


def test_the_page_needs_no_key_and_the_interface_does() -> None:
    paths = [*PAGE, "/page/", "/page/other.js", "/page/../v1/models", "/v1/models", "/metrics"]
    found = answers(ServerSettings(keys=["k"]), *(("GET", path, {}) for path in paths))
    assert [response.status_code for response in found] == [200] * len(PAGE) + [401] * 5


def test_the_page_is_not_for_other_hosts_nor_for_other_methods() -> None:
    elsewhere, post = answers(ServerSettings(), ("GET", "/", {"host": "evil.example"}), ("POST", "/", {}))
    assert (elsewhere.status_code, post.status_code) == (403, 405)


def test_files_name_only_files_that_there_are_and_have_no_inline_code() -> None:
    texts = {path: answers(ServerSettings(), ("GET", path, {}))[0].text for path in PAGE}

    class Links(HTMLParser):
        found: list[str]

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            given = dict(attributes)
            self.found += [value for name in ("src", "href") if (value := given.get(name))]
            assert not [name for name in given if name == "style" or name.startswith("on")]
            assert tag != "style"
            assert tag != "script" or given.get("src")

    links = Links()
    links.found = []
    links.feed(texts["/"])
    imports = [f"/page/{name}" for text in texts.values() for name in re.findall(r' from "\./([^"]+)"', text)]
    assert {*links.found, *imports} | {"/"} == set(PAGE)
    for path, text in texts.items():
        assert "innerHTML" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
