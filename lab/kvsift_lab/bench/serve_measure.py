"""Measurement of a server under load."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, count
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any

from kvsift.errors import InputError
from kvsift.models.transformers_load import ModelDirectory
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.machine import host_environment
from kvsift_lab.bench.other_processes import OtherProcesses
from kvsift_lab.bench.serve import ServeRecipe
from kvsift_lab.bench.serve_client import ServerClient, StreamedReply
from kvsift_lab.bench.serve_direct import DirectEngine
from kvsift_lab.bench.serve_documents import DocumentMaker, question
from kvsift_lab.bench.serve_numbers import TimedAnswer, gaps, load_numbers
from kvsift_lab.bench.serve_process import running_server
from kvsift_lab.bench.serve_report import closing_table, point_text
from kvsift_lab.bench.timing import digits, rotated

LONG = 4096  # tokens of answers that are ended by their client
BEGUN = 8  # pieces after which a chat counts as answering


class ServeBench(Bench):
    """A server under the load of a recipe."""

    recipe: ServeRecipe
    kind = "serve"

    def __init__(self, recipe: ServeRecipe) -> None:
        super().__init__(recipe)
        directory = ModelDirectory.check(recipe.model)
        self._model_name = directory.name
        self._positions = directory.max_positions
        self._documents = DocumentMaker(directory.tokenizer(), recipe.seed)
        self._questions, self._turns = count(1), count(1)
        self._engine: DirectEngine | None = None
        self._client: ServerClient

    def environment(self) -> dict[str, Any]:
        return {"model": self._model_name, **host_environment()}

    def points(self) -> Sequence[int]:
        return sorted(self.recipe.contexts)

    def run(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            url = self.recipe.url or stack.enter_context(running_server(self.recipe))
            self._client = ServerClient(url.rstrip("/"))
            self._check_server()
            yield from super().run()

    def _check_server(self) -> None:
        """Refuse a server of another model, whose texts would have other lengths."""
        try:
            served = str(self._client.get("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{self.recipe.url}/v1/models lists no model; is it a server of kvsift?") from None
        if served != self._model_name:
            raise InputError(f"the server has the model {served!r}. Give its directory as --model, for its tokenizer.")

    def measure(self, point: int) -> dict[str, Any]:
        recipe = self.recipe
        texts = [self._documents.own(0 if recipe.shared else number, point) for number in range(recipe.clients)]
        distinct, meter = dict.fromkeys(texts), OtherProcesses()
        cold = []
        for text, plan in zip(distinct, recipe.all_plans * len(distinct)):
            reply = self._ask(text, plan, 2)
            cold.append({"plan": plan, "ttft_s": reply.ttft_s, "prompt_tokens": reply.usage["prompt_tokens"]})
        facts: dict[str, Any] = {"cold": cold, "others_cold": self._share(meter), "turns": []}
        if recipe.direct and point == min(recipe.contexts):
            self._engine = DirectEngine(recipe, texts)
        for number in range(recipe.repeats):
            for plan in rotated(recipe.all_plans, number):
                facts["turns"].append({"round": number, "plan": plan, **self._turn(plan, texts, point)})
        self._engine = None
        return facts

    def _turn(self, plan: str, texts: Sequence[str], context: int) -> dict[str, Any]:
        """Measure a plan once: under load, beside chats, and the engine alone."""
        meter = OtherProcesses()
        asked = self._poisson(plan, texts) if self.recipe.rate else self._closed_loop(plan, texts)
        answers = [TimedAnswer(reply.started, reply.times, reply.usage["completion_tokens"]) for reply in asked]
        found: dict[str, Any] = {"load": load_numbers(answers)}
        found["load"]["cached_tokens"] = [reply.cached_tokens for reply in asked]
        found["load"]["density"] = asked[0].usage["sparsity"]["density"]
        if self.recipe.clients > 1:
            found |= self._beside(plan, texts, context)
        if self._engine is not None:
            found["direct"] = load_numbers(self._engine.answers(plan, next(self._questions)))
        return found | {"others": self._share(meter)}

    def _closed_loop(self, plan: str, texts: Sequence[str]) -> list[StreamedReply]:
        def client(text: str) -> list[StreamedReply]:
            return [self._ask(text, plan, self.recipe.tokens) for _ in range(self.recipe.questions)]

        clients = in_threads([partial(client, text) for text in texts])
        return [reply for replies in clients for reply in replies]

    def _poisson(self, plan: str, texts: Sequence[str]) -> list[StreamedReply]:
        """Questions at random times, the same for all plans of a round."""
        recipe = self.recipe
        rng = random.Random(f"{recipe.seed} arrivals")
        number = recipe.clients * recipe.questions
        arrivals = accumulate(rng.expovariate(recipe.rate) for _ in range(number))
        begun = perf_counter()

        def asker(index: int, arrival: float) -> StreamedReply:
            sleep(max(0.0, begun + arrival - perf_counter()))
            return self._ask(texts[index % len(texts)], plan, recipe.tokens)

        return in_threads([partial(asker, index, at) for index, at in enumerate(arrivals)])

    def _beside(self, plan: str, texts: Sequence[str], context: int) -> dict[str, Any]:
        """Measure a further question, then another document, beside chats of the other clients that go on."""
        stop, long = Event(), self._longest(context)
        chats = [self._client.ask(text + question(next(self._questions)), plan, long, stop) for text in texts[1:]]
        try:
            for chat in chats:
                chat.wait(BEGUN)
            found = {"second": self._beside_one(texts[0], plan, [chat.reply for chat in chats])}
            if self.recipe.unread:
                turn = f"turn {next(self._turns)} at {context}"
                other = self._documents.other(context, self.recipe.unread, turn)
                found["other"] = self._beside_one(other, plan, [chat.reply for chat in chats])
        finally:
            stop.set()
            for chat in chats:
                chat.wait()
        return found

    def _beside_one(self, text: str, plan: str, chats: Sequence[StreamedReply]) -> dict[str, Any]:
        asked = self._ask(text, plan, BEGUN)
        begin, end = asked.started, asked.times[0]
        between = [gap for chat in chats for gap in gaps(list(chat.times), begin, end)]
        return {
            "ttft_s": asked.ttft_s,
            "cached_tokens": asked.cached_tokens,
            "prompt_tokens": asked.usage["prompt_tokens"],
            "itl_s": digits(between, 3),
            "chats_ended": sum(bool(chat.usage) for chat in chats),
        }

    def _longest(self, context: int) -> int:
        """Return the tokens of an answer that does not end by itself meanwhile."""
        return LONG if self._positions is None else min(LONG, self._positions - context - 512)

    def _ask(self, text: str, plan: str, max_tokens: int) -> StreamedReply:
        reply = self._client.ask(text + question(next(self._questions)), plan, max_tokens).wait()
        if not reply.times:
            raise InputError("an answer has no text, so it has no times")
        return reply

    def _share(self, meter: OtherProcesses) -> float | None:
        return meter.share() if self.recipe.url is None else None

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)

    def closing(self, result: dict[str, Any]) -> str:
        return closing_table(result)


def in_threads(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run functions side by side; returns what each returned.

    Raises:
        The error of one that failed, once all have ended.
    """
    done: dict[int, Any] = {}
    errors: list[Exception] = []

    def run(index: int) -> None:
        try:
            done[index] = runs[index]()
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=run, args=(index,), daemon=True) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [done[index] for index in range(len(runs))]
