"""An engine process without a model, which does what prompts tell it:

die     end
hang    show no sign of life
begin   send one token and end
answer  two tokens; those that were sent before are left out
wait    accept, and read nothing
slow    one token of four, and another one whenever it is submitted again

In a chat it calls the first tool, if there are tools, until the last message is the result of one, which it repeats; of
a message that begins with "say " it says the rest. It writes as Qwen3 does. Documents are read at once; one that says
die ends it, and one that says die unheard does before it has begun.
"""

import json
import os
import sys
import time
from socket import socket

from kvsift.server import frames

USAGE = {"completion_tokens": 2, "cached_tokens": 0, "plan": "dense", "density": 1.0, "visible_tokens": 4.0,
         "bytes_read": 8, "bytes_dense": 8, "recovery": None, "guard_events": 0, "no_reuse": ""}  # fmt: skip
DIALECT = {"has_tools": True, "tools": "hermes", "reasoning": 0, "variables": ["enable_thinking"]}


def scripted(messages: list, variables: dict, is_forced: bool) -> str:
    """The answer in a chat. Under a grammar it is JSON: calls, if there are tools."""
    content = messages[-1]["content"]
    if is_forced:
        return json.dumps([call(variables["tools"][0]["function"])] if "tools" in variables else {"city": "Paris"})
    if content.startswith("say "):
        return content.removeprefix("say ")
    if messages[-1]["role"] == "tool":
        return f"The result of {messages[-1]['name']} is {content}."
    if "tools" not in variables:
        return f"<think>\nWho is it?\n</think>\n\nHello, {len(messages)}."
    called = json.dumps(call(variables["tools"][0]["function"]))
    return f"<think>\nI need it.\n</think>\n\n<tool_call>\n{called}\n</tool_call>"


def call(function: dict) -> dict:
    """A call with Paris for every text, and 7 for other values."""
    properties = function["parameters"].get("properties", {})
    arguments = {name: "Paris" if each.get("type") == "string" else 7 for name, each in properties.items()}
    return {"name": function["name"], "arguments": arguments}


def pieces(text: str, num_characters: int = 3) -> list:
    """A text as tokens."""
    starts = range(0, len(text), num_characters)
    return [[start, text[start : start + num_characters], None] for start in starts]


def main() -> None:
    connection = socket(fileno=int(sys.argv[1]))
    incoming = connection.makefile("rb")
    settings = frames.receive(incoming)
    if settings is None or settings["model"].get("model") == "bad":
        sys.exit(3)
    known = {
        "model": "fake",
        "positions": 64,
        "plans": settings["plans"],
        "max_seqs": settings["model"].get("max_seqs", 0),
        "dialect": DIALECT,
    }
    connection.sendall(frames.pack({"op": "ready", **known}))
    while (message := frames.receive(incoming)) is not None:
        if message["op"] == "prefill":
            if message["text"] == "die unheard":
                os._exit(9)
            head = {"op": "document", "document": message["document"], "tokens": 4}
            connection.sendall(frames.pack({**head, "status": "reading", "num_prefilled": 0}))
            if message["text"] == "die":
                os._exit(9)
            connection.sendall(frames.pack({**head, "status": "ready", "num_prefilled": 4}))
        if message["op"] == "tokenize":
            data = json.dumps(message["request"]["prompts"] or message["request"]["messages"]).encode()
            connection.sendall(frames.pack({"op": "converted", "id": message["id"], "tokens": [*data], "pieces": None}))
        if message["op"] == "detokenize":
            text = bytes(message["tokens"]).decode()
            connection.sendall(frames.pack({"op": "converted", "id": message["id"], "text": text}))
        if message["op"] != "submit":
            continue
        key, messages = message["id"], message["request"]["messages"]
        if messages:
            accepted = {"op": "accepted", "id": key, "prompt_tokens": [4], "begins_reasoning": False}
            connection.sendall(frames.pack(accepted))
            for index in range(message["request"]["num_samples"]):
                is_forced = message["request"]["options"].get("grammar") is not None
                text = scripted(messages, message["request"]["variables"], is_forced)
                stop = next((each for each in message["request"]["options"].get("stop") or () if each in text), None)
                tokens = pieces(text.partition(stop)[0] if stop else text)
                is_cut = len(tokens) > (most := message["request"]["max_tokens"] or 1000)
                for token in tokens[:most]:
                    new = {"id": key, "index": index, "prefilled": 4, "tokens": [token]}
                    connection.sendall(frames.pack({"op": "step", "news": [new]}))
                end = {
                    "id": key,
                    "index": index,
                    "finish": "length" if is_cut else "stop",
                    "stop": stop,
                    "usage": USAGE,
                }
                connection.sendall(frames.pack({"op": "step", "news": [end]}))
            continue
        [prompt] = message["request"]["prompts"]
        if prompt == "hang":
            time.sleep(60)
        if prompt == "die":
            os._exit(9)
        connection.sendall(frames.pack({"op": "accepted", "id": key, "prompt_tokens": [4], "begins_reasoning": False}))
        if prompt == "wait":
            continue
        sent = len(message["sent"].get("0", ()))
        if prompt == "slow":
            end = {"finish": "stop", "usage": USAGE} if sent == 3 else {}
            row = {"id": key, "index": 0, "prefilled": 4, "tokens": [[sent, f"{sent} ", None]], **end}
            connection.sendall(frames.pack({"op": "step", "news": [row]}))
            continue
        tokens = [[1, "one ", None], [2, "two", None]][sent : 1 if prompt == "begin" and not sent else 2]
        end = {} if len(tokens) + sent < 2 else {"finish": "stop", "usage": USAGE}
        step = {"op": "step", "news": [{"id": key, "index": 0, "prefilled": 4, "tokens": tokens, **end}]}
        connection.sendall(frames.pack(step))
        if prompt == "begin" and not sent:
            os._exit(9)


if __name__ == "__main__":
    main()
