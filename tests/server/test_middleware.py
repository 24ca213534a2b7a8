"""Hosts, keys and origins that are let in."""

from pathlib import Path

import pytest
from server.test_app import answers

from kvsift.server.settings import ServerSettings, read_keys


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LOCALHOST:80", 200), ("192.168.0.7:80", 200), ("[fe80::1]", 200), ("mine.example", 200),
     ("localhost:", 200), ("[::1]:80", 200), ("", 403), ("[::1", 403), ("a b", 403),
     ("localhost:80@evil.com", 403), ("[::1]evil", 403), ("evil.example", 403),
     ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403)],
)  # fmt: skip
def test_host_headers(host: str, status: int) -> None:
    [response] = answers(ServerSettings(hosts=["Mine.example"]), ("GET", "/metrics", {"host": host}))
    assert response.status_code == status


def test_browsers_elsewhere_are_let_in_by_name() -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    wanted = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"  # OpenAI's client
    preflight = ("OPTIONS", "/v1/completions", {**asked, "access-control-request-headers": wanted})
    [closed] = answers(ServerSettings(), preflight)
    foreign = (*preflight[:2], {**preflight[2], "origin": "https://x.y"})
    opened, used, other, refused = answers(
        ServerSettings(origins=["https://app.example"], keys=["k"]),
        preflight,
        ("GET", "/metrics", {"origin": "https://app.example"}),
        ("GET", "/metrics", {"origin": "https://x.y"}),
        foreign,
    )
    assert "access-control-allow-origin" not in closed.headers
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-origin"] == "https://app.example"
    assert opened.headers["access-control-allow-headers"] == wanted
    assert used.headers["access-control-expose-headers"] == "retry-after, x-request-id, x-kvsift-ignored"
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    assert other.status_code == 401
    assert "access-control-allow-origin" not in other.headers


def test_keys_of_a_file_with_a_mark_and_any_letters_let_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufefffirst\r\n\n# of Anna\n  #x\n \nschlüssel#1\n".encode())
    settings = ServerSettings(keys=read_keys(file, {}))
    keys = "first", "schlüssel#1", "x", "# of Anna", "#x", "#"
    asked = [("GET", "/v1/models", {"authorization": f"Bearer {key}".encode()}) for key in keys]
    asked += [("GET", "/v1/models", {"x-api-key": key.encode()}) for key in keys]  # of Anthropic's client
    statuses = [response.status_code for response in answers(settings, *asked)]
    assert statuses == [503, 503, 401, 401, 401, 401] * 2  # nothing is loaded
