"""An engine process without a model, which does what prompts tell it:

die     end
hang    show no sign of life
begin   send one token and end
answer  two tokens; those that were sent before are left out
wait    accept, and read nothing
slow    one token of four, and another one whenever it is submitted again

Documents are read at once; one that says die ends it.
"""

import os
import sys
import time
from socket import socket

from kvsift.server import frames

USAGE = {"completion_tokens": 2, "cached_tokens": 0, "plan": "dense", "density": 1.0, "visible_tokens": 4.0,
         "bytes_read": 8, "bytes_dense": 8, "recovery": None, "guard_events": 0, "no_reuse": ""}  # fmt: skip


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
    }
    connection.sendall(frames.pack({"op": "ready", "dialect": {}, **known}))
    while (message := frames.receive(incoming)) is not None:
        if message["op"] == "prefill":
            head = {"op": "document", "document": message["document"], "tokens": 4}
            connection.sendall(frames.pack({**head, "status": "reading", "num_prefilled": 0}))
            if message["text"] == "die":
                os._exit(9)
            connection.sendall(frames.pack({**head, "status": "ready", "num_prefilled": 4}))
        if message["op"] != "submit":
            continue
        [prompt], key = message["request"]["prompts"], message["id"]
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
