"""Documents over HTTP: uploaded, read once, asked about, deleted, and kept when the engine dies."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine.tiny_directory import text_of
from server.serving import OPTIONS, Served, events, metric, until

import kvsift

DOCUMENTS = "/v1/documents"
CHAT = "/v1/chat/completions"
MARKDOWN = {"content-type": "text/markdown"}


def upload(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    response = client.post(DOCUMENTS, json={"text": text, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def ready(client: httpx.Client, key: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        document = client.get(f"{DOCUMENTS}/{key}").json()
        return document if document["status"] != "reading" else None

    return until(found, 60)


def ask(client: httpx.Client, key: str, question: str = "Which mill?", **fields: Any) -> dict[str, Any]:
    messages = fields.pop("messages", [{"role": "user", "content": question}])
    response = client.post(CHAT, json={"messages": messages, "document": key, "max_tokens": 12, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def document(client: httpx.Client) -> Iterator[dict[str, Any]]:
    uploaded = upload(client, text_of(900), name="mills.txt")
    yield uploaded
    client.delete(f"{DOCUMENTS}/{uploaded['id']}")


def test_a_document_is_read_once_and_asked_about_as_in_a_chat(
    client: httpx.Client, alone: kvsift.LLM, document: dict[str, Any]
) -> None:
    assert (document["object"], document["name"], document["bytes"]) == ("document", "mills.txt", 900)
    done = ready(client, document["id"])
    counted = 'kvsift_responses_total{route="/v1/documents/{id}",status="200"}'
    assert metric(client.get("/metrics").text, counted) > 0
    about = client.get("/v1/models").json()["data"][0]
    assert about["documents"] == {"max_bytes": 16 << 20, "kinds": ["text", "markdown", "html", "pdf"]}
    assert about["has_sample"] is False
    assert (done["status"], done["read_tokens"], done["seconds_left"], done["pinned"]) == (
        "ready",
        done["tokens"],
        0,
        True,
    )
    chat = alone.chat(text_of(900))
    messages = list[dict[str, str]]()
    for question in ("Which mill?", "How many sacks?"):
        expected = chat.ask(question, max_new_tokens=12)
        messages.append({"role": "user", "content": question})
        body = ask(client, done["id"], messages=messages)
        chat.turns[-1] = (question, content := body["choices"][0]["message"]["content"])
        assert content.strip() == expected.text
        messages.append({"role": "assistant", "content": content})
        whole_chunks = done["tokens"] // 64 * 64
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole_chunks
        assert "passages" not in body["usage"]["sparsity"]


def test_documents_stay_when_the_memory_of_other_prompts_goes(server: Served, client: httpx.Client) -> None:
    document = upload(client, "Pinned. " + text_of(700))
    ready(client, document["id"])
    for number in range(14):  # more than --keep-tokens in this test's server is never given; these are other prompts
        client.post("/v1/completions", json={"prompt": f"{number} " + text_of(3000), "max_tokens": 2})
    usage = ask(client, document["id"])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 640
    client.delete(f"{DOCUMENTS}/{document['id']}")


def test_passages_index_into_the_text_of_the_document(client: httpx.Client, alone: kvsift.LLM) -> None:
    text = "Märchen 🙂. " + text_of(700)
    document = upload(client, text)
    assert client.get(f"{DOCUMENTS}/{document['id']}/text").text == text
    expected = alone.chat(text).ask("Why?", max_new_tokens=12, passages=True).passages
    sparsity = {"passages": True}
    whole = ask(client, document["id"], "Why?", sparsity=sparsity)["usage"]["sparsity"]["passages"]
    assert whole == json.loads(json.dumps(expected.as_dict()))
    assert whole["characters"] == len(text)
    assert whole["all"]
    assert whole["note"] is None or "Layers" in whole["note"]
    body = {"messages": [{"role": "user", "content": "Why?"}], "document": document["id"], "max_tokens": 12}
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}, "sparsity": sparsity}
    with client.stream("POST", CHAT, json=stream) as response:
        chunks = list(events(response))
    assert chunks[-1]["usage"]["sparsity"]["passages"] == whole
    dense = ask(client, document["id"], sparsity={"plan": "dense", "passages": True})["usage"]["sparsity"]["passages"]
    assert (dense["all"], dense["layers"], dense["note"]) == ([], {}, "Dense attention reads everything.")
    client.delete(f"{DOCUMENTS}/{document['id']}")


def test_the_events_of_a_document_end_when_it_is_ready(client: httpx.Client) -> None:
    document = upload(client, "Events. " + text_of(3500))
    with client.stream("GET", f"{DOCUMENTS}/{document['id']}/events") as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        documents = list(events(response))
    assert documents[-1]["status"] == "ready"
    read = [each["read_tokens"] for each in documents]
    assert read == sorted(read)
    assert read[-1] == documents[-1]["tokens"] > 3500
    client.delete(f"{DOCUMENTS}/{document['id']}")


def test_a_question_waits_for_its_document_which_may_be_deleted_meanwhile(client: httpx.Client, server: Served) -> None:
    first, second = (upload(client, f"{number}. " + text_of(3900)) for number in (1, 2))

    def later() -> httpx.Response:
        with server.client() as other:
            body = {"messages": [{"role": "user", "content": "Why?"}], "document": second["id"], "max_tokens": 4}
            return other.post(CHAT, json=body)

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(later)
        usage = answer.result().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 3900 // 64 * 64
    for document in (first, second):
        deleted = client.delete(f"{DOCUMENTS}/{document['id']}").json()
        assert deleted == {"id": document["id"], "object": "document", "deleted": True}
        assert client.get(f"{DOCUMENTS}/{document['id']}").status_code == 404
    third = upload(client, "3. " + text_of(3900))
    client.delete(f"{DOCUMENTS}/{third['id']}")
    lost = client.post(CHAT, json={"messages": [{"role": "user", "content": "?"}], "document": third["id"]})
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "document_not_found")
    assert ready(client, upload(client, "4. " + text_of(200))["id"])["status"] == "ready"


def test_the_same_text_is_the_same_document(client: httpx.Client, document: dict[str, Any]) -> None:
    assert upload(client, text_of(900), name="other.txt")["id"] == document["id"]
    listed = client.get(DOCUMENTS).json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]].count(document["id"]) == 1
    newer = upload(client, "Newer. " + text_of(100))
    assert client.get(DOCUMENTS).json()["data"][-1]["id"] == newer["id"]
    client.delete(f"{DOCUMENTS}/{newer['id']}")


def test_files_become_text(client: httpx.Client) -> None:
    page = (
        "<!DOCTYPE html><head><title>No</title><style>p{}</style></head><body><h1>Mühlen</h1><p>One  &amp;\n two.</p>"
        "<script>alert('no')</script><ul><li>a<li>b</ul><p>Ende 🙂"
    )
    cases = {
        ("text/html", "a.html"): (page.encode(), "Mühlen\n\nOne & two.\n\na\nb\n\nEnde 🙂"),
        ("application/octet-stream", "b.htm"): (page.encode(), "Mühlen\n\nOne & two.\n\na\nb\n\nEnde 🙂"),
        ("text/markdown", "c.md"): ("# Töne".encode(), "# Töne"),
        ("application/octet-stream", "d.txt"): (b"<b>as it is</b>", "<b>as it is</b>"),
        ("text/html; charset=windows-1251", "c.html"): ("<p>Привет</p>".encode("cp1251"), "Привет"),
        ("text/markdown; charset=windows-1251", "c.md"): ("Привет".encode("cp1251"), "Привет"),
        ("application/octet-stream", "e"): ("Grüße".encode("utf-16"), "Grüße"),
        ("application/pdf", "f.pdf"): (pdf_of("The mill grinds corn."), "The mill grinds corn."),
    }
    for (kind, name), (content, text) in cases.items():
        response = client.post(DOCUMENTS, content=content, params={"name": name}, headers={"content-type": kind})
        assert response.status_code == 200, response.text
        document = response.json()
        assert (document["name"], document["bytes"]) == (name, len(content))
        assert client.get(f"{DOCUMENTS}/{document['id']}/text").text == text
        client.delete(f"{DOCUMENTS}/{document['id']}")


def pdf_of(text: str) -> bytes:
    """A PDF file of one line."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    data, places = bytearray(b"%PDF-1.4\n"), list[int]()
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj%s endobj\n" % (number, content)
    start = len(data)
    data += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(data + b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % start)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"%PDF-1.4 nothing", "is damaged"),
        (pdf_of(""), "has no text"),
        (b"<html><script>x</script></html>", "has no text"),
    ],
)
def test_a_file_without_text_is_a_failed_document(client: httpx.Client, content: bytes, error: str) -> None:
    response = client.post(DOCUMENTS, content=content, headers={"content-type": "application/octet-stream"})
    assert response.status_code == 200, response.text
    document = response.json()
    assert (document["status"], document["pinned"]) == ("failed", False)
    assert error in document["error"]
    with client.stream("GET", f"{DOCUMENTS}/{document['id']}/events") as stream:
        assert [each["status"] for each in events(stream)] == ["failed"]
    text = client.get(f"{DOCUMENTS}/{document['id']}/text")
    assert (text.status_code, text.json()["error"]["code"]) == (400, "document_failed")
    asked = client.post(CHAT, json={"messages": [{"role": "user", "content": "?"}], "document": document["id"]})
    assert (asked.status_code, asked.json()["error"]["code"]) == (400, "document_failed")
    assert client.delete(f"{DOCUMENTS}/{document['id']}").status_code == 200


def test_a_document_beyond_the_positions_of_the_model_fails_with_the_numbers(client: httpx.Client) -> None:
    document = ready(client, upload(client, text_of(5000))["id"])
    assert document["status"] == "failed"
    assert "length is 4096 tokens" in document["error"]
    client.delete(f"{DOCUMENTS}/{document['id']}")


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        ({"content": b"a", "headers": {"content-type": "text/plain"}}, 415, "application/octet-stream with ?name=FILE"),
        ({"content": b"a", "headers": {"content-type": "image/png"}}, 415, "documents are application/json"),
        ({"content": b"PK\x03\x04....", "headers": MARKDOWN}, 415, "a zip archive"),
        ({"content": b"", "headers": MARKDOWN}, 400, "is empty"),
        ({"content": b"\xff\x00\x99", "headers": MARKDOWN}, 400, "is not UTF-8"),
        ({"content": b"<p>caf\xe9</p>", "headers": {"content-type": "text/html"}}, 400, "is not UTF-8"),
        ({"content": b"a\0b", "headers": MARKDOWN}, 400, "is binary"),
        ({"content": b"a", "headers": MARKDOWN, "params": {"nam": "a"}}, 400, "did you mean 'name'"),
        ({"json": {"txt": "a"}}, 400, "did you mean 'text'"),
        ({"json": {"text": "  \n"}}, 400, "is empty"),
        ({"json": {"text": 5}}, 400, "valid string"),
        ({"json": {}}, 400, "text is missing"),
        ({"json": {"text": "a", "name": 3}}, 400, "name"),
        ({"content": b" " * ((16 << 20) + 1), "headers": MARKDOWN}, 413, "larger than 16 MB"),
    ],
)
def test_what_is_no_document_is_refused(client: httpx.Client, request_: dict, status: int, text: str) -> None:
    response = client.post(DOCUMENTS, **request_)
    assert response.status_code == status, response.text
    assert text in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sparsity": {"passages": True}}, "those of a document"),
        ({"document": "doc-x", "sparsity": {"passages": True}, "stream": True}, "include_usage"),
        ({"document": "doc-x", "sparsity": {"passages": True}, "n": 2, "temperature": 1.0}, "and n=2"),
        ({"sparsity": {"passage": True}}, "did you mean 'passages'"),
        ({"documents": "doc-x"}, "did you mean 'document'"),
    ],
)
def test_questions_that_name_no_document_are_refused(client: httpx.Client, fields: dict, text: str) -> None:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "?"}], **fields})
    assert response.status_code == 400, response.text
    assert text in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["doc-0", "..%2f..%2fetc%2fpasswd", "%00", "doc-" + "0" * 9999])
def test_ids_are_looked_up_and_never_opened(client: httpx.Client, path: str) -> None:
    for method, end in (("GET", ""), ("GET", "/text"), ("GET", "/events"), ("DELETE", "")):
        assert client.request(method, f"{DOCUMENTS}/{path}{end}").status_code == 404


def test_a_document_belongs_to_its_key_and_stays_between_starts(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    folder = tmp_path / "kept"
    arguments = (str(model), *OPTIONS, "--api-key-file", str(keys), "--documents", str(folder))
    server = Served(tmp_path, *arguments)
    one, two = (server.client(authorization=f"Bearer {key}") for key in ("one", "two"))
    try:
        document, other = upload(one, text_of(400), name="../../mine\n"), upload(two, text_of(400))
        assert document["name"] == "../../mine"
        assert document["id"] != other["id"]
        for method, end in (("GET", ""), ("GET", "/text"), ("GET", "/events"), ("DELETE", "")):
            assert two.request(method, f"{DOCUMENTS}/{document['id']}{end}").status_code == 404
        body = {"messages": [{"role": "user", "content": "?"}], "document": document["id"]}
        assert two.post(CHAT, json=body).status_code == 404
        assert [each["id"] for each in two.get(DOCUMENTS).json()["data"]] == [other["id"]]
        two.delete(f"{DOCUMENTS}/{other['id']}")
        damaged = upload(one, text_of(300))
        ready(one, document["id"])
        answer = ask(one, document["id"])["choices"]
    finally:
        server.stop()
    path = folder / f"{damaged['id']}.json"
    path.write_bytes(path.read_bytes()[:-20])
    read = folder / f"{document['id']}.kvsift"
    data = bytearray(read.read_bytes())
    data[len(data) // 2] ^= 1
    read.write_bytes(data)
    (folder / f"{document['id']}.json.1-2.partial").write_bytes(b"half")
    names = {each.name for each in folder.iterdir()}
    assert names == {f"{key}.{end}" for key in (document["id"], damaged["id"]) for end in ("json", "kvsift")} | {
        f"{document['id']}.json.1-2.partial", "kvsift.lock"
    }  # fmt: skip
    server = Served(tmp_path, *arguments)
    one = server.client(authorization="Bearer one")
    try:
        assert "is left out: its checksum is wrong" in server.log.read_text()
        [kept] = one.get(DOCUMENTS).json()["data"]
        same = "id", "name", "created", "bytes", "characters"
        assert [kept[name] for name in same] == [document[name] for name in same]
        ready(one, kept["id"])
        assert ask(one, kept["id"])["choices"] == answer
        assert f"{document['id']} is read again from its text: " in server.log.read_text()
        assert kept["kept"]
        lock = "kvsift.lock"
        assert {each.name for each in folder.iterdir()} == {path.name, read.name, f"{document['id']}.json", lock}
        one.delete(f"{DOCUMENTS}/{kept['id']}")
        assert {each.name for each in folder.iterdir()} == {path.name, lock}
    finally:
        server.stop()
