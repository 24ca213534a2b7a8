"""The engine process: an LLM whose loop takes rows from messages, which one thread reads.

    python -m kvsift.server.worker FD

FD is a connected socket. The process ends when the other side closes it. Messages (``frames``):

    in    settings (first), {op: submit, id, ...}, {op: cancel, id}, {op: read | forget, document, ...}
    out   {op: ready | fatal}, {op: accepted | refused, id}, {op: step, rows: [...]}, {op: alive, step_s, rows, pages},
          {op: document, document, ...}
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from socket import socket
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Any

from kvsift import threads
from kvsift.api.generation import answer_of_row, row_of
from kvsift.api.llm import LLM
from kvsift.engine.options import GenerateOptions
from kvsift.engine.row import Row
from kvsift.engine.sampling import Sampling
from kvsift.engine.speculative.exactness import check_exact
from kvsift.errors import InputError, KVSiftError
from kvsift.plan.capabilities import NO_PROBES, PlanCase, check
from kvsift.plan.plan import Plan
from kvsift.server import frames
from kvsift.server.heap import trim
from kvsift.server.held_documents import HeldDocuments
from kvsift.server.prompt_limit import PromptLimit, TooLong
from kvsift.server.replies import Reply, usage_of
from kvsift.tokenization.growing_text import GrowingText
from kvsift.tokenization.prompt import PromptFormat, require_text
from kvsift.tokenization.text_offsets import TextOffsets

ALIVE_S = 1.0  # between two signs of life
CHAT_TOKENS = 512  # of an answer in a chat, unless the request says so


@dataclass(eq=False)
class OpenRow:
    """A row of a request that has not ended."""

    request: int
    index: int
    row: Row
    reply: Reply
    started: float
    num_read_sent: int | None = None


def _warm_up(llm: LLM, specs: list[str], num_tokens: int | None) -> None:
    """See ``LLM.warm_up``; where it fails, first requests wait instead."""
    try:
        done = llm.warm_up(specs, num_tokens)
    except Exception as error:  # of a kernel, a capture or the allocator: requests may do with less
        text = f"nothing was captured ahead, so that first requests wait ({type(error).__name__}: {error})"
    else:
        text = f"memory for {done.num_tokens:,} tokens, {done.num_steps} captured steps ({done.seconds:.0f} s)"
        if not done.num_tokens:
            return
    print(f"kvsift: {text}", file=sys.stderr, flush=True)


class Worker:
    """Rows of requests over the loop of an LLM."""

    def __init__(self, connection: socket, settings: dict[str, Any]) -> None:
        self._connection, self._sending = connection, Lock()
        specs = settings["plans"]
        model = {"probe_every": 16, **settings["model"]}
        keep = settings["keep_tokens"]
        self._llm = llm = LLM(**model, plan=specs[0], keep_tokens=keep)
        self._plans = [*map(llm.plans.parse, specs)]
        for plan in self._plans:
            llm.check_plan(plan)
        llm.load()
        self._reason = llm.composed_reason(llm.plan) or ""
        if settings["reserve_tokens"] != 0:
            _warm_up(llm, specs, settings["reserve_tokens"])
        self._form = PromptFormat(llm.tokenizer)
        self._limit = PromptLimit.of(llm)
        self._waiting: list[OpenRow] = []  # accepted rows that have not begun
        self._rows: list[OpenRow] = []
        self._lock = Lock()
        self._has_worked = False  # since the heap was trimmed
        self._documents = HeldDocuments[OpenRow](
            llm, self._form, self._limit, self._plans[0], self._send, self._begin, self._refuse_row
        )

    def run(self) -> None:
        """Serve until the other side closes."""
        llm = self._llm
        ready = {"model": llm.directory.name, "positions": llm.directory.max_positions, "rows": llm.loop.max_rows}
        self._send({"op": "ready", **ready, "plans": [str(plan) for plan in self._plans]})
        llm.loop.after_step, llm.loop.on_fault = self._report, _end_process
        llm.loop.start()
        Thread(target=self._show_life, daemon=True).start()
        while (message := frames.receive(self._connection)) is not None:
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "submit":
            self._submit(message)
        elif op == "cancel":
            self._cancel(message["id"])
        elif op == "read":
            self._documents.add(message)
        else:
            self._documents.forget(message["document"])

    def _send(self, message: dict[str, Any]) -> None:
        self._send_frame(frames.pack(message))

    def _send_frame(self, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(data)

    def _show_life(self) -> None:
        while True:
            started = self._llm.loop.step_started
            step_s = 0.0 if started is None else perf_counter() - started
            if self._has_worked and not self._rows:
                self._has_worked = False
                trim()
            self._send({"op": "alive", "step_s": step_s, **self._llm.loop.counts()})
            sleep(ALIVE_S)

    def _submit(self, message: dict[str, Any]) -> None:
        key = message["id"]
        try:
            prompts = self._prompts(message)
            rows = self._open(message, prompts, self._offsets(message))
        except TooLong as error:
            self._refuse(key, 400, error, "context_length_exceeded")
            return
        except InputError as error:
            self._refuse(key, 400, error, "invalid_value")
            return
        except Exception as error:  # of this request; the others go on
            traceback.print_exc()
            reason = f"the prompt cannot be read ({type(error).__name__}); the log has the reason."
            self._refuse(key, 500, RuntimeError(reason), "prompt_failed")
            return
        self._send({"op": "accepted", "id": key, "prompt_tokens": [len(ids) for ids in prompts]})
        with self._lock:
            self._waiting += rows
        for opened in rows:
            if (document := message.get("document")) is None:
                self._begin(opened)
            else:
                self._documents.ask(document, opened)

    def _begin(self, opened: OpenRow) -> None:
        """Let a row run unless it was cancelled; a request that does not fit the line of the loop ends, and a row that
        the loop cannot take."""
        with self._lock:
            if opened not in self._waiting:
                return
            self._waiting.remove(opened)
            self._rows.append(opened)
        try:
            self._llm.loop.submit(opened.row)
        except InputError as error:
            self._cancel(opened.request)
            self._refuse(opened.request, 429, error, "rate_limit_exceeded")
        except Exception as error:  # of this row
            self._send_frame(frames.pack_step([self._leave(opened, error)]))
        with self._lock:
            is_gone = opened not in self._rows
        if is_gone:  # cancelled while it was submitted
            self._llm.loop.close(opened.row)

    def _refuse_row(self, opened: OpenRow, reason: str) -> None:
        """End a row that has not begun."""
        ending = _ending_of(InputError(f"the document cannot be read: {reason}"))
        self._send_frame(frames.pack_step([self._encode(opened, ending)]))

    def _refuse(self, request: int, status: int, error: Exception, code: str) -> None:
        self._send({"op": "refused", "id": request, "status": status, "message": str(error), "code": code})

    def _prompts(self, message: dict[str, Any]) -> list[list[int]]:
        """Tokens of the prompts."""
        if "messages" in message:
            document, growing = self._document(message)
            self._limit.check_text(len(document) + sum(len(each["content"]) for each in message["messages"]))
            return [self._form.encode_messages(message["messages"], document, growing)]
        return [self._encoded(prompt) for prompt in message["prompts"]]

    def _document(self, message: dict[str, Any]) -> tuple[str, GrowingText | None]:
        """Text before the messages of a chat, and what encodes prompts about it."""
        return ("", None) if message.get("document") is None else self._documents.text(message["document"])

    def _offsets(self, message: dict[str, Any]) -> TextOffsets | None:
        if not message.get("passages"):
            return None
        return self._form.message_offsets(message["messages"], self._document(message)[0])

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        llm = self._llm
        if isinstance(prompt, str):
            require_text(prompt, "prompt")
            self._limit.check_text(len(prompt))
            return llm.encode(prompt)
        vocabulary = llm.directory.config.vocab_size
        if (largest := max(prompt)) >= vocabulary:
            raise InputError(f"the prompt has token {largest}, and the vocabulary {vocabulary} tokens, from 0 on.")
        return prompt

    def _open(
        self, message: dict[str, Any], prompts: Sequence[list[int]], offsets: TextOffsets | None
    ) -> list[OpenRow]:
        """The rows of a request, one for each prompt and sample; those that ended before a restart are left out."""
        plan, started = self._plan(message), perf_counter()
        if message["exact"] and message["min_recovery"] is None:
            plan = self._llm.plans.verified(plan)
        check_exact(self._llm, plan, message["exact"])
        runs_as, rows, samples = self._llm.composed_plan(plan), list[OpenRow](), message["n"]
        is_chat = "messages" in message
        end = self._form.stop if is_chat and not message["ignore_eos"] else None  # of an answer, as an eos token is
        stops = [*message["stop"], *filter(None, [end])]
        for index in range(len(prompts) * samples):
            if index in message["ended"]:
                continue
            ids = prompts[index // samples]
            most = self._room(ids, message["max_tokens"])
            self._llm.check_prompts([ids], most, plan)
            sampling = Sampling(message["temperature"], message["top_p"], message["seed"]).nth(index % samples)
            options = GenerateOptions(
                max_new_tokens=most,
                sampling=sampling,
                stop=stops,
                stop_token_ids=message.get("stop_token_ids"),
                skip_special_tokens=message.get("skip_special_tokens"),
                logprobs=message["logprobs"],
                exact=message["exact"],
            )
            request = self._llm.request(
                ids, runs_as, options, streamed=True, offsets=offsets, ignores_ends=bool(message["ignore_eos"]),
                client=message["client"], salt=message["salt"],
            )  # fmt: skip
            sent = message["sent"].get(str(index), ())
            reply = Reply(request, self._llm.tokenizer, self._llm.device, sent, strips=is_chat)
            rows.append(OpenRow(message["id"], index, row_of(self._llm, reply), reply, started))
        return rows

    def _room(self, ids: Sequence[int], asked: int | None) -> int:
        """Most tokens of an answer."""
        positions = self._limit.positions
        if not ids:
            raise InputError("the prompt is empty.")
        if asked is None:
            asked = CHAT_TOKENS if positions is None else max(min(CHAT_TOKENS, positions - len(ids)), 1)
        self._limit.check_tokens(len(ids), asked)
        return asked

    def _plan(self, message: dict[str, Any]) -> Plan:
        plan, least = self._plans[message["plan"]], message["min_recovery"]
        if least is None:
            return plan
        if plan.decode is None:
            raise InputError("min_recovery widens a budget, and this plan decodes densely. Leave it out.")
        rule = replace(plan.decode, budget=replace(plan.decode.budget, min_recovery=least))
        guarded = replace(plan, decode=rule)
        check(PlanCase(guarded, probe_every=self._llm.probe_every), NO_PROBES)
        return guarded

    def _cancel(self, request: int) -> None:
        with self._lock:
            self._waiting = [opened for opened in self._waiting if opened.request != request]
            gone = [opened for opened in self._rows if opened.request == request]
            self._rows = [opened for opened in self._rows if opened.request != request]
        for opened in gone:
            self._llm.loop.close(opened.row)

    def _report(self) -> None:
        """Send what a step has brought, in one message. A row whose news cannot be told ends; the others go on."""
        self._has_worked = True
        with self._lock:
            rows = list(self._rows)
        if told := [*filter(None, map(self._told, rows))]:
            self._send_frame(frames.pack_step(told))
        self._documents.report()

    def _told(self, opened: OpenRow) -> bytes:
        """What is new about a row, encoded; empty: nothing is."""
        try:
            new = self._news(opened)
            told = self._encode(opened, new) if new else b""
        except Exception as error:  # of this row
            return self._leave(opened, error)
        if "finish" in new:
            self._forget(opened)
        return told

    def _leave(self, opened: OpenRow, error: Exception) -> bytes:
        """End a row with an error; returns its last news, encoded."""
        self._forget(opened)
        return self._encode(opened, _ending_of(error))

    def _forget(self, opened: OpenRow) -> None:
        with self._lock:
            self._rows = [each for each in self._rows if each is not opened]
        self._llm.loop.close(opened.row)

    def _encode(self, opened: OpenRow, new: dict[str, Any]) -> bytes:
        return frames.encode({"id": opened.request, "index": opened.index, **new})

    def _news(self, opened: OpenRow) -> dict[str, Any]:
        """What is new about a row."""
        row, reply = opened.row, opened.reply
        ended = row.is_ended  # before its events are fetched
        new: dict[str, Any] = {}
        if row.state != "waiting" and reply.num_read != opened.num_read_sent:
            new["read"] = opened.num_read_sent = reply.num_read
        if reply.events:
            new["tokens"] = [reply.events.popleft() for _ in range(len(reply.events))]
        if ended:
            new |= self._ending(opened)
        return new

    def _ending(self, opened: OpenRow) -> dict[str, Any]:
        row = opened.row
        if row.error is not None:
            return _ending_of(row.error)
        answer = answer_of_row(self._llm, row, opened.reply.transcript, opened.started, self._reason)
        return {"finish": row.finish_reason, "usage": usage_of(answer, row.num_reused)}


def _end_process(error: BaseException) -> None:
    """End the process after a fault that no row explains; the server starts another."""
    traceback.print_exception(error)
    os._exit(1)


def _ending_of(error: BaseException) -> dict[str, Any]:
    """The end of a row with an error. The client is told what kvsift says itself; of other errors the log has the
    reason."""
    status, message = 400 if isinstance(error, InputError) else 500, str(error)
    if not isinstance(error, KVSiftError):
        traceback.print_exception(error)
        message = f"this answer failed ({type(error).__name__}); the log has the reason."
    elif status == 500:
        print(f"kvsift: an answer failed: {message}", file=sys.stderr)
    return {"finish": "error", "status": status, "message": message}


def main() -> None:
    """Serve the socket whose number is the first argument."""
    connection = socket(fileno=int(sys.argv[1]))
    settings = frames.receive(connection)
    assert settings is not None, "the server sends settings first"
    if settings["threads"] is not None:
        threads.use(settings["threads"])
    try:
        worker = Worker(connection, settings)
    except InputError as error:
        connection.sendall(frames.pack({"op": "fatal", "message": str(error)}))
        return
    code = 0
    try:
        worker.run()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # at once, whatever step is being taken


if __name__ == "__main__":
    main()
