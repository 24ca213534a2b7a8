"""A server without a model: documents are read in a moment, and questions say what happens to their answers.

drop   the connection is lost after two words
error  the stream ends with an error
slow   a word every tenth of a second, for a minute
busy   503 with Retry-After the first time, then an answer
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvsift.server.page_files import PAGE, page_file

PLANS = ["sketch:budget=1024", "quest:budget=512", "dense"]
QUESTIONS = ["What is the access code?", "Who is the captain?"]


class FakeServer:
    """The routes that the page uses.

    Attributes:
        bodies: of the chats that were asked.
        key: that requests must carry; None: none.
        documents: by id.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None
        self.documents: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self.num_busy = 0
        self.url = ""

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Route(path, page_file) for path in PAGE]
        for path, endpoint, method in (
            ("/v1/models", self._models, "GET"),
            ("/v1/sample", self._sample, "GET"),
            ("/v1/documents", self._list, "GET"),
            ("/v1/documents", self._add, "POST"),
            ("/v1/documents/{id}", self._delete, "DELETE"),
            ("/v1/documents/{id}/text", self._text, "GET"),
            ("/v1/documents/{id}/events", self._events, "GET"),
            ("/v1/chat/completions", self._chat, "POST"),
        ):
            routes.append(Route(path, self._guarded(endpoint), methods=[method]))
        return Starlette(routes=routes)

    def _guarded(self, endpoint: Any) -> Any:
        async def run(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1").decode()
            if self.key is not None and given != f"Bearer {self.key}":
                return refusal(401, "this server needs an API key, as in: Authorization: Bearer KEY.")
            return await endpoint(request)

        return run

    async def _models(self, request: Request) -> Response:
        limits = {"max_bytes": 4_000_000, "kinds": ["text", "markdown", "html", "pdf"]}
        model = {"id": "fake", "plans": PLANS, "documents": limits, "has_sample": True}
        return JSONResponse({"object": "list", "data": [model]})

    async def _sample(self, request: Request) -> Response:
        text = "".join(f"Line {i} of the sample, about nothing in particular.\n" for i in range(4000))
        about = "It copies facts out of a document, and can do nothing else."
        return JSONResponse({"name": "sample.txt", "text": text, "questions": QUESTIONS, "about": about})

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self.documents.values())})

    async def _add(self, request: Request) -> Response:
        if request.headers["content-type"].startswith("application/json"):
            body = await request.json()
            name, text = body.get("name", ""), body["text"]
        else:
            name, text = request.query_params["name"], (await request.body()).decode()
        key = f"doc-{len(self.texts):04x}"
        tokens = len(text) // 4 + 1
        self.texts[key] = text
        self.documents[key] = {
            "id": key, "object": "document", "name": name, "created": 0, "bytes": len(text.encode()),
            "characters": len(text), "tokens": tokens, "status": "reading", "read_tokens": 0, "seconds_left": None,
            "error": None, "pinned": True, "kept": False, "why_not_kept": None,
        }  # fmt: skip
        return JSONResponse(self.documents[key])

    async def _delete(self, request: Request) -> Response:
        if self.documents.pop(request.path_params["id"], None) is None:
            return refusal(404, "there is no such document.")
        return JSONResponse({"id": request.path_params["id"], "object": "document", "deleted": True})

    async def _text(self, request: Request) -> Response:
        return PlainTextResponse(self.texts[request.path_params["id"]])

    async def _events(self, request: Request) -> Response:
        key = request.path_params["id"]

        async def events() -> AsyncIterator[bytes]:
            document = self.documents[key]
            for step in range(1, 9):
                document.update(read_tokens=document["tokens"] * step // 8, seconds_left=(8 - step) * 0.1)
                if step == 4 and "unreadable" in self.texts[key]:
                    document.update(status="failed", error="the prompt has more tokens than the model has positions.")
                    break
                yield event(document)
                await asyncio.sleep(0.1)
            else:
                document.update(status="ready", seconds_left=None)
            yield event(document) + b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "busy" and self.num_busy == 0:
            self.num_busy += 1
            return refusal(503, "the server is restarting. Try again later.", {"retry-after": "1"})
        return StreamingResponse(self._answer(body, question), media_type="text/event-stream")

    async def _answer(self, body: dict[str, Any], question: str) -> AsyncIterator[bytes]:
        words = ["word "] * 600 if question == "slow" else f"An answer to: {question}".split(" ")
        yield b": waiting\n\n: read 40 of 100 tokens\n\n"
        await asyncio.sleep(0.2)
        for index, word in enumerate(words):
            yield event({"choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]})
            await asyncio.sleep(0.1 if question == "slow" else 0.02)
            if index == 1 and question == "drop":
                raise ConnectionError("dropped on purpose")
            if index == 1 and question == "error":
                yield event({"error": {"message": "the engine process died twice with this request."}})
                return
        plan = body["sparsity"]["plan"]
        document = self.texts.get(body.get("document", ""), "")
        sparsity = {"plan": plan, "density": 1.0 if plan == "dense" else 0.031, "recovery": None, "guard_events": 0,
                    "passages": passages(document, plan == "dense")}  # fmt: skip
        usage = {"prompt_tokens": 2000, "completion_tokens": len(words), "sparsity": sparsity,
                 "prompt_tokens_details": {"cached_tokens": 1980}}  # fmt: skip
        yield event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def passages(text: str, is_dense: bool) -> dict[str, Any]:
    """Spans at each tenth of a text; the words NEEDLE are read in all steps."""
    if is_dense:
        return {"characters": len(text), "all": [], "layers": {}, "note": "dense attention reads everything."}
    starts = range(50, len(text) - 50, len(text) // 10 + 60)
    spans = [[at, at + 20, [0.1, 0.3, 0.6][i % 3]] for i, at in enumerate(starts)]
    at = text.find("NEEDLE")
    if at >= 0:
        spans = sorted([span for span in spans if span[1] <= at or span[0] >= at + 6] + [[at, at + 6, 1.0]])
    return {
        "characters": len(text),
        "all": spans,
        "layers": {"0": spans, "3": sorted(spans, key=itemgetter(2))[-1:]},
        "note": None,
    }


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def refusal(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": text}}, status, headers)


@contextlib.contextmanager
def running(server: FakeServer) -> Iterator[str]:
    """Serve in a thread; the value is the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        server.app(), log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1
    )  # fmt: skip
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join()
