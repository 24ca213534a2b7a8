"""What OpenAI's client for Python makes of a server: client.py URL SCENE prints one JSON object in the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Who?"}]
ENDLESS = {"model": MODEL, "prompt": "Stop", "max_tokens": 4000, "stream": True}
URL = sys.argv[1]


def client(max_retries: int = 0, api_key: str = "any") -> Any:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=api_key, max_retries=max_retries)


def failure(work: Callable[[], Any]) -> dict[str, Any] | None:
    try:
        work()
    except openai.APIError as error:
        status = getattr(error, "status_code", None)
        return {"name": type(error).__name__, "status": status, "code": error.code, "param": error.param}
    return None


def begun() -> Any:
    stream = client().completions.create(**ENDLESS)
    next(stream)
    print("begun", flush=True)
    return stream


def answers() -> dict[str, Any]:
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12}
    whole = client().chat.completions.create(**chat)
    text = client().completions.create(model=MODEL, prompt="Hello", max_tokens=12, n=2, temperature=1, seed=3)
    chunks = list(client().chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    return {
        "chat": whole.choices[0].message.content,
        "streamed": "".join(each.choices[0].delta.content or "" for each in chunks if each.choices),
        "models": [model.id for model in client().models.list()],
        "texts": [choice.text for choice in text.choices],
        "usage": whole.usage.model_dump(),
        "streamed_usage": chunks[-1].usage.model_dump(),
    }


def errors() -> dict[str, Any]:
    def chat(**fields: Any) -> dict[str, Any] | None:
        body = {"model": MODEL, "messages": MESSAGES, **fields}
        return failure(lambda: client().chat.completions.create(**body))

    return {
        "field": chat(extra_body={"temprature": 1}),
        "value": chat(n=99),
        "model": chat(model="gpt-5"),
        "long": chat(messages=[{"role": "user", "content": "a " * 5000}]),
        "large": chat(messages=[{"role": "user", "content": "a" * (17 << 20)}]),
        "stream": chat(stream=True, tools=[{"type": "function", "function": {"name": "f"}}]),
    }


def key() -> dict[str, Any]:
    return {"wrong": failure(client().models.list), "right": len(client(0, "secret").models.list().data)}


def busy() -> dict[str, Any]:
    def flood(retries: int) -> list[dict[str, Any]]:
        def ask(number: int) -> dict[str, Any] | None:
            create = client(retries).completions.create
            return failure(lambda: create(model=MODEL, prompt=f"Hello {number}", max_tokens=200))

        with ThreadPoolExecutor(24) as pool:
            return [each for each in pool.map(ask, range(24)) if each is not None]

    refused = flood(0)
    return {"refused": refused[0], "count": len(refused), "without_limit": flood(20)}


def down() -> dict[str, Any]:
    short = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
    hasty = failure(lambda: client().completions.create(**short))
    return {"hasty": hasty, "text": client(30).completions.create(**short).choices[0].text}


def abort() -> dict[str, Any]:
    begun().close()
    return {}


def lost() -> dict[str, Any]:
    stream = begun()
    return {"error": failure(lambda: list(stream))}


scene = {each.__name__: each for each in (answers, errors, key, busy, down, abort, lost)}[sys.argv[2]]
print(json.dumps(scene()))
