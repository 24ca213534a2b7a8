"""The engine process: an LLM whose loop takes sequences from messages, which one thread receives.

    python -m kvsift.server.worker FD

FD is a connected socket. The process ends when the other side closes it. Messages (``frames``):

    in    settings (first), {op: submit, id, request, sent, ended}, {op: cancel, id},
          {op: tokenize | detokenize, id, ...}, {op: prefill | forget, document, ...}
    out   {op: ready | fatal}, {op: accepted | refused | converted, id}, {op: step, news: [...]},
          {op: heartbeat, step_s, sequences, pages, state_bytes}, {op: document, document, ...}
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from socket import socket
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Any, BinaryIO

from kvsift import threads
from kvsift.api.generation import answer_of_sequence, sequence_of
from kvsift.api.llm import LLM
from kvsift.engine.options import GenerateOptions
from kvsift.engine.sampling import Sampling
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.exactness import check_exact
from kvsift.errors import EmptyText, InputError, InvalidValue, KVSiftError, UnreadableFile, UnusedOption
from kvsift.plan.capabilities import NO_PROBES, PlanCase, check
from kvsift.plan.plan import Plan
from kvsift.server import frames
from kvsift.server.frames import AnswerRequest
from kvsift.server.held_documents import HeldDocuments
from kvsift.server.replies import Reply, usage_of
from kvsift.server.tool_calls import Dialect
from kvsift.tokenization.grammar import Grammar
from kvsift.tokenization.growing_text import GrowingText
from kvsift.tokenization.prompt import PromptFormat, require_text

HEARTBEAT_S = 1.0  # between two heartbeats
CHAT_TOKENS = 512  # of an answer in a chat, unless the request says so


@dataclass(eq=False)
class OpenSequence:
    """A sequence of a request that has not ended."""

    request: int
    index: int
    seq: EngineSequence
    reply: Reply
    started: float
    num_prefilled_sent: int | None = None


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
    """Sequences of requests over the loop of an LLM."""

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
        llm.reason_uncaptured(llm.plan)  # captures its trial step now, or refuses the plan
        if settings["reserve_tokens"] != 0:
            _warm_up(llm, specs, settings["reserve_tokens"])
        self._form = PromptFormat(llm.tokenizer)
        self._dialect = Dialect.of(str(llm.tokenizer.chat_template or ""))
        self._waiting: list[OpenSequence] = []  # accepted sequences whose document is in prefill
        self._seqs: list[OpenSequence] = []
        self._lock = Lock()
        self._has_worked = False  # since the heap was trimmed
        self._documents = HeldDocuments[OpenSequence](
            llm, self._form, self._plans[0], self._send, self._begin, self._refuse_sequence
        )

    def run(self, incoming: BinaryIO) -> None:
        """Serve the messages of a socket's file until the other side closes."""
        llm = self._llm
        ready = {"model": llm.directory.name, "positions": llm.directory.max_positions, "max_seqs": llm.loop.max_seqs}
        self._send(
            {"op": "ready", **ready, "plans": [str(plan) for plan in self._plans], "dialect": vars(self._dialect)}
        )
        llm.loop.after_step, llm.loop.on_fault = self._report, _end_process
        llm.loop.start()
        Thread(target=self._send_heartbeats, daemon=True).start()
        while (message := frames.receive(incoming)) is not None:
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "submit":
            self._submit(message)
        elif op == "cancel":
            self._cancel(message["id"])
        elif op in ("tokenize", "detokenize"):
            self._convert(message)
        elif op == "prefill":
            self._documents.add(message)
        else:
            self._documents.forget(message["document"])

    def _send(self, message: dict[str, Any]) -> None:
        self._send_frame(frames.pack(message))

    def _send_frame(self, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(data)

    def _send_heartbeats(self) -> None:
        while True:
            started = self._llm.loop.step_started
            step_s = 0.0 if started is None else perf_counter() - started
            if self._has_worked and not self._seqs:
                self._has_worked = False
                _trim_heap()
            self._send({"op": "heartbeat", "step_s": step_s, **self._llm.loop.counts()})
            sleep(HEARTBEAT_S)

    def _submit(self, message: dict[str, Any]) -> None:
        key, request = message["id"], AnswerRequest(**message["request"])
        try:
            prompts = self._prompts(request)
            seqs = self._open(message, request, prompts)
        except InputError as error:
            self._refuse(key, 400, error, error.code)
            return
        except Exception as error:  # of this request; others continue
            traceback.print_exc()
            reason = f"the prompt cannot be read ({type(error).__name__}); the log has the reason."
            self._refuse(key, 500, RuntimeError(reason), "prompt_failed")
            return
        begins = bool(request.messages) and self._dialect.begins_reasoning(self._llm.tokenizer.decode(prompts[0][-16:]))
        counts = [len(ids) for ids in prompts]
        self._send({"op": "accepted", "id": key, "prompt_tokens": counts, "begins_reasoning": begins})
        with self._lock:
            self._waiting += seqs
        for opened in seqs:
            if request.document is None:
                self._begin(opened)
            else:
                self._documents.ask(request.document, opened)

    def _convert(self, message: dict[str, Any]) -> None:
        """Answer a request for tokens, or for the text of some."""
        tokenizer = self._llm.tokenizer
        try:
            if message["op"] == "detokenize":
                self._check_tokens(message["tokens"])
                found = {"text": tokenizer.decode(message["tokens"])}
            else:
                [ids] = self._prompts(AnswerRequest(**message["request"]), message["special"])
                pieces = tokenizer.convert_ids_to_tokens(ids) if message["pieces"] else None
                found = {"tokens": ids, "pieces": pieces}
        except InputError as error:
            self._refuse(message["id"], 400, error, error.code)
        except Exception as error:
            traceback.print_exc()
            reason = f"the text cannot be converted ({type(error).__name__}); the log has the reason."
            self._refuse(message["id"], 500, RuntimeError(reason), "conversion_failed")
        else:
            self._send({"op": "converted", "id": message["id"], **found})

    def _begin(self, opened: OpenSequence) -> None:
        """Submit a sequence to the loop, unless it was cancelled. A full queue ends its request, another error the
        sequence."""
        with self._lock:
            if opened not in self._waiting:
                return
            self._waiting.remove(opened)
            self._seqs.append(opened)
        try:
            self._llm.loop.submit(opened.seq)
        except InputError as error:
            self._cancel(opened.request)
            self._refuse(opened.request, 429, error, "rate_limit_exceeded")
        except Exception as error:  # of this sequence
            self._send_frame(frames.pack_step([self._fail(opened, error)]))
        with self._lock:
            is_cancelled = opened not in self._seqs
        if is_cancelled:  # while it was submitted
            self._llm.loop.close(opened.seq)

    def _refuse_sequence(self, opened: OpenSequence, reason: str) -> None:
        """End a sequence that was not submitted."""
        ending = _ending_of(UnreadableFile(f"the document cannot be read: {reason}"))
        self._send_frame(frames.pack_step([self._encode(opened, ending)]))

    def _refuse(self, request: int, status: int, error: Exception, code: str) -> None:
        self._send({"op": "refused", "id": request, "status": status, "message": str(error), "code": code})

    def _prompts(self, request: AnswerRequest, special: bool = True) -> list[list[int]]:
        """Tokens of the prompts, those of a text with the tokens that the tokenizer adds if they are ``special``."""
        if not request.messages:
            return [self._encode_prompt(prompt, special) for prompt in request.prompts]
        text, growing = self._document(request)
        calls = [call for message in request.messages for call in message.get("tool_calls", ())]
        rest = [json.dumps(each, ensure_ascii=False) for each in [*request.variables.values(), *calls]]
        self._llm.check_text("\n".join([text, *(each["content"] for each in request.messages), *rest]))
        return [self._form.encode_messages(request.messages, text, growing, request.variables, request.continues)]

    def _document(self, request: AnswerRequest) -> tuple[str, GrowingText | None]:
        """Text before the messages of a chat, and what encodes prompts about it."""
        return ("", None) if request.document is None else self._documents.text(request.document)

    def _encode_prompt(self, prompt: str | list[int], special: bool) -> list[int]:
        llm = self._llm
        if isinstance(prompt, str):
            require_text(prompt, "prompt")
            llm.check_text(prompt)
            return llm.encode(prompt) if special else llm.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        self._check_tokens(prompt)
        return prompt

    def _check_tokens(self, ids: list[int]) -> None:
        vocabulary = self._llm.directory.config.vocab_size
        if (largest := max(ids, default=0)) >= vocabulary:
            raise InvalidValue(f"the prompt has token {largest}, and the vocabulary {vocabulary} tokens, from 0 on.")

    def _open(self, message: dict[str, Any], request: AnswerRequest, prompts: list[list[int]]) -> list[OpenSequence]:
        """The sequences of a request, one for each prompt and sample; those that ended before a restart are left
        out."""
        llm, started, is_chat = self._llm, perf_counter(), bool(request.messages)
        grammar, bias = request.options.get("grammar"), request.sampling.get("logit_bias", ())
        options = GenerateOptions(**{**request.options, "grammar": grammar and Grammar(**grammar)})
        plan = self._plan(request)
        if options.exact and request.min_recovery is None:
            plan = llm.plans.verified(plan)
        check_exact(llm, plan, options.exact)
        seqs, sampling = list[OpenSequence](), Sampling(**{**request.sampling, "logit_bias": dict(bias)})
        offsets = None
        if options.passages:
            text, _ = self._document(request)
            offsets = self._form.message_offsets(request.messages, text, request.variables)
        stops = options.stops
        if is_chat and self._form.stop and not request.ignore_eos:  # it ends an answer as an eos token does
            stops += (self._form.stop,)
        for index in range(request.num_answers):
            if index in message["ended"]:
                continue
            prompt, sample = divmod(index, request.num_samples)
            ids = prompts[prompt]
            most = max(self._max_new_tokens(ids, request.max_tokens), 1)
            llm.check_prompts([ids], most, plan)
            runs_as = llm.executed_plan(plan, len(ids) + most, options)
            of_sequence = llm.request(
                ids, runs_as, replace(options, max_new_tokens=most, sampling=sampling.nth(sample), stop=stops),
                streamed=True, offsets=offsets, ignores_ends=request.ignore_eos, client=request.client,
                salt=request.salt, asked=plan,
            )  # fmt: skip
            sent = message["sent"].get(str(index), ())
            reply = Reply(
                of_sequence, llm.tokenizer, llm.device, sent,
                strips=is_chat and grammar is None and not request.continues,
                echoes=request.echo, is_empty=request.max_tokens == 0,
            )  # fmt: skip
            score = reply.score if request.echo and options.logprobs is not None else None
            seqs.append(OpenSequence(message["id"], index, sequence_of(llm, reply, score=score), reply, started))
        return seqs

    def _max_new_tokens(self, ids: Sequence[int], max_tokens: int | None) -> int:
        positions = self._llm.directory.max_positions
        if not ids:
            raise EmptyText("the prompt is empty.")
        if max_tokens is None:
            max_tokens = CHAT_TOKENS if positions is None else max(min(CHAT_TOKENS, positions - len(ids)), 1)
        return max_tokens

    def _plan(self, request: AnswerRequest) -> Plan:
        plan = self._plans[request.plan]
        if request.min_recovery is None:
            return plan
        if plan.decode is None:
            raise UnusedOption("min_recovery widens a budget, and this plan decodes densely. Leave it out.")
        rule = replace(plan.decode, budget=replace(plan.decode.budget, min_recovery=request.min_recovery))
        guarded = replace(plan, decode=rule)
        check(PlanCase(guarded, probe_every=self._llm.probe_every), NO_PROBES)
        return guarded

    def _cancel(self, request: int) -> None:
        with self._lock:
            self._waiting = [opened for opened in self._waiting if opened.request != request]
            cancelled = [opened for opened in self._seqs if opened.request == request]
            self._seqs = [opened for opened in self._seqs if opened.request != request]
        for opened in cancelled:
            self._llm.loop.close(opened.seq)

    def _report(self) -> None:
        """Send what a step has brought, in one message. A sequence whose news cannot be sent ends; others continue."""
        self._has_worked = True
        with self._lock:
            seqs = list(self._seqs)
        if encoded := [*filter(None, map(self._encode_news, seqs))]:
            self._send_frame(frames.pack_step(encoded))
        self._documents.report()

    def _encode_news(self, opened: OpenSequence) -> bytes:
        """What is new about a sequence, encoded; empty: nothing is."""
        try:
            new = self._news(opened)
            encoded = self._encode(opened, new) if new else b""
        except Exception as error:  # of this sequence
            return self._fail(opened, error)
        if "finish" in new:
            self._forget(opened)
        return encoded

    def _fail(self, opened: OpenSequence, error: Exception) -> bytes:
        """End a sequence with an error; returns its last news, encoded."""
        self._forget(opened)
        return self._encode(opened, _ending_of(error))

    def _forget(self, opened: OpenSequence) -> None:
        with self._lock:
            self._seqs = [each for each in self._seqs if each is not opened]
        self._llm.loop.close(opened.seq)

    def _encode(self, opened: OpenSequence, new: dict[str, Any]) -> bytes:
        return frames.encode({"id": opened.request, "index": opened.index, **new})

    def _news(self, opened: OpenSequence) -> dict[str, Any]:
        """What is new about a sequence."""
        seq, reply = opened.seq, opened.reply
        ended = seq.is_ended  # before its events are fetched
        new: dict[str, Any] = {}
        if seq.state != "waiting" and reply.num_prefilled != opened.num_prefilled_sent:
            new["prefilled"] = opened.num_prefilled_sent = reply.num_prefilled
        if reply.events:
            new["tokens"] = [reply.events.popleft() for _ in range(len(reply.events))]
        if ended:
            new |= self._ending(opened)
        return new

    def _ending(self, opened: OpenSequence) -> dict[str, Any]:
        seq = opened.seq
        if seq.error is not None:
            return _ending_of(seq.error)
        answer = answer_of_sequence(self._llm, seq, opened.reply.transcript, opened.started)
        stop = opened.reply.transcript.stop
        return {"finish": seq.finish_reason, "stop": stop, "usage": usage_of(answer, seq.num_reused)}


def _trim_heap() -> None:
    """Return what is free inside the heap of glibc to the system, in some milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _end_process(error: BaseException) -> None:
    """End the process after a fault that no sequence explains; the server starts another."""
    traceback.print_exception(error)
    os._exit(1)


def _ending_of(error: BaseException) -> dict[str, Any]:
    """The end of a sequence with an error. Messages of kvsift are sent to the client; those of other errors are
    logged."""
    message = str(error)
    if isinstance(error, InputError):
        return {"finish": "error", "status": 400, "message": message, "code": error.code}
    if not isinstance(error, KVSiftError):
        traceback.print_exception(error)
        message = f"this answer failed ({type(error).__name__}); the log has the reason."
    else:
        print(f"kvsift: an answer failed: {message}", file=sys.stderr)
    return {"finish": "error", "status": 500, "message": message, "code": "answer_failed"}


def main() -> None:
    """Serve the socket whose number is the first argument."""
    connection = socket(fileno=int(sys.argv[1]))
    incoming = connection.makefile("rb")
    settings = frames.receive(incoming)
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
        worker.run(incoming)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # at once, whatever step is being taken


if __name__ == "__main__":
    main()
