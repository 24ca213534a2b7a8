"""Measurement of a server under load."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate, count, pairwise
from threading import Event
from time import perf_counter, sleep
from typing import Any

from kvsift.api.llm import LLM
from kvsift.errors import FailedProcess, OtherModel
from kvsift.models.hf.generation_config import GenerationSettings
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.host_timing import OtherProcesses
from kvsift_lab.bench.machine import host_environment
from kvsift_lab.bench.serve import ServeRecipe, point_text, serve_table
from kvsift_lab.bench.serve_client import TimedAnswer, ask, get, running_server
from kvsift_lab.bench.timing import rotated
from kvsift_lab.numbers import digits

LONG = 4096  # tokens of answers that are ended by their client
BEGUN = 8  # pieces after which a chat counts as answering
STEP = 128  # tokens by which documents of clients differ, so that the ends of their last chunks differ
PLACES = "Oslo", "Genoa", "Porto", "Leith", "Varna", "Cadiz", "Turku", "Split"
GOODS = "salt", "copper wire", "paper", "clay tiles", "wool", "lamp oil", "glass", "barley"


class EndlessLLM(LLM):
    """An LLM whose answers do not end by themselves."""

    @property
    def generation_settings(self) -> GenerationSettings:
        settings = super().generation_settings
        settings.ends = frozenset()
        return settings


class ServeBench(Bench):
    """A server under the load of a recipe, and where it asks for that, the engine alone: the same prompts to an LLM of
    this process that has read the documents."""

    recipe: ServeRecipe
    kind = "serve"

    def __init__(self, recipe: ServeRecipe) -> None:
        super().__init__(recipe)
        directory = ModelDirectory.check(recipe.model)
        self._model_name = directory.name
        self._positions = directory.max_positions
        self._documents = DocumentMaker(directory.tokenizer(), recipe.seed)
        self._questions, self._turns = count(1), count(1)
        self._engine: EndlessLLM | None = None
        self._url: str

    def environment(self) -> dict[str, Any]:
        return {"model": self._model_name, **host_environment()}

    def run(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            self._url = (self.recipe.url or stack.enter_context(running_server(self.recipe))).rstrip("/")
            self._check_server()
            yield from super().run()

    def _check_server(self) -> None:
        """Refuse a server of another model, whose texts would have other lengths."""
        try:
            served = str(get(f"{self._url}/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise FailedProcess(f"{self._url}/v1/models lists no model; is it a server of kvsift?") from None
        if served != self._model_name:
            raise OtherModel(f"the server has the model {served!r}. Give its directory as --model, for its tokenizer.")

    def measure(self, point: int) -> dict[str, Any]:
        recipe = self.recipe
        texts = [self._documents.own(0 if recipe.shared else number, point) for number in range(recipe.clients)]
        distinct, meter = dict.fromkeys(texts), OtherProcesses()
        cold = []
        for text, plan in zip(distinct, recipe.all_plans * len(distinct)):
            answer = self._ask(text, plan, 2)
            cold.append({"plan": plan, "ttft_s": answer.ttft_s, "prompt_tokens": answer.usage["prompt_tokens"]})
        facts: dict[str, Any] = {"cold": cold, "others_cold": self._share(meter), "turns": []}
        if recipe.direct and point == min(recipe.contexts):
            self._engine = EndlessLLM(recipe.model, plan="dense", keep_tokens=recipe.keep_tokens)
            for text in texts:
                self._engine.generate(text, max_new_tokens=1)
        for number in range(recipe.repeats):
            for plan in rotated(recipe.all_plans, number):
                facts["turns"].append({"round": number, "plan": plan, **self._turn(plan, texts, point)})
        self._engine = None
        return facts

    def _turn(self, plan: str, texts: Sequence[str], context: int) -> dict[str, Any]:
        """Measure a plan once: under load, beside chats, and the engine alone."""
        meter = OtherProcesses()
        asked = self._load(plan, texts)
        found: dict[str, Any] = {"load": load_numbers(asked)}
        found["load"]["cached_tokens"] = [answer.cached_tokens for answer in asked]
        found["load"]["density"] = asked[0].usage["sparsity"]["density"]
        if self.recipe.clients > 1:
            found |= self._beside(plan, texts, context)
        if self._engine is not None:
            number = next(self._questions)
            prompts = [text + question(number + index) for index, text in enumerate(texts)]
            answers = self._engine.generate(prompts, plan=plan, max_new_tokens=self.recipe.tokens)
            times = [list(accumulate([answer.ttft_s, *answer.itl_s])) for answer in answers]
            counts = [len(answer.token_ids) for answer in answers]
            found["direct"] = load_numbers([TimedAnswer(0.0, *each) for each in zip(times, counts)])
        return found | {"others": self._share(meter)}

    def _load(self, plan: str, texts: Sequence[str]) -> list[TimedAnswer]:
        """Return the answers to all clients: each asks when it has its answer, or at random times, the same for all
        plans of a round."""
        recipe, stop, begun = self.recipe, Event(), perf_counter()
        rng = random.Random(f"{recipe.seed} arrivals")
        number = recipe.clients * recipe.questions if recipe.rate else recipe.clients
        arrivals = list(accumulate(rng.expovariate(recipe.rate) for _ in range(number))) if recipe.rate else []

        def client(index: int) -> list[TimedAnswer]:
            if arrivals:
                stop.wait(max(0.0, begun + arrivals[index] - perf_counter()))
            questions = 1 if arrivals else recipe.questions
            return [self._ask(texts[index % len(texts)], plan, recipe.tokens, stop) for _ in range(questions)]

        with ThreadPoolExecutor(number) as pool:
            try:
                return [answer for answers in pool.map(client, range(number)) for answer in answers]
            except KeyboardInterrupt:
                stop.set()
                raise

    def _beside(self, plan: str, texts: Sequence[str], context: int) -> dict[str, Any]:
        """Measure a further question, then another document, beside chats of the other clients that go on."""
        stop, chats = Event(), [TimedAnswer() for _ in texts[1:]]
        longest = LONG if self._positions is None else min(LONG, self._positions - context - 512)
        with ThreadPoolExecutor(len(chats)) as pool:
            prompts = [text + question(next(self._questions)) for text in texts[1:]]
            running = [
                pool.submit(ask, self._url, prompt, plan, longest, stop, chat) for prompt, chat in zip(prompts, chats)
            ]
            try:
                for chat, future in zip(chats, running):
                    while len(chat.times) < BEGUN and not future.done():
                        sleep(0.002)
                    if future.done():
                        future.result()  # raises its error
                found = {"second": self._beside_one(texts[0], plan, chats)}
                if self.recipe.unread:
                    turn = f"turn {next(self._turns)} at {context}"
                    other = self._documents.other(context, self.recipe.unread, turn)
                    found["other"] = self._beside_one(other, plan, chats)
            finally:
                stop.set()
            for future in running:
                future.result()
        return found

    def _beside_one(self, text: str, plan: str, chats: Sequence[TimedAnswer]) -> dict[str, Any]:
        asked = self._ask(text, plan, BEGUN)
        between = [gap for chat in chats for gap in gaps(list(chat.times), asked.started, asked.times[0])]
        return {
            "ttft_s": asked.ttft_s,
            "cached_tokens": asked.cached_tokens,
            "prompt_tokens": asked.usage["prompt_tokens"],
            "itl_s": digits(between, 3),
            "chats_ended": sum(bool(chat.usage) for chat in chats),
        }

    def _ask(self, text: str, plan: str, max_tokens: int, stop: Event | None = None) -> TimedAnswer:
        prompt = text + question(next(self._questions))
        answer = ask(self._url, prompt, plan, max_tokens, stop or Event())
        if not answer.times:
            raise FailedProcess("an answer has no text, so it has no times")
        return answer

    def _share(self, meter: OtherProcesses) -> float | None:
        return meter.share() if self.recipe.url is None else None

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)

    def closing(self, result: dict[str, Any]) -> str:
        is_measured = any("turns" in point for point in result["points"])
        return "\n" + serve_table(result["points"]) if is_measured else ""


def load_numbers(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Return the numbers of answers: tokens per second of all, from the first request to the last token, and while all
    get tokens (None if they never do at once); TTFT; and the gaps between pieces while all do, or else of all."""
    first, last = min(answer.started for answer in answers), max(answer.times[-1] for answer in answers)
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    together = begin < end
    span = (begin, end) if together else (first, last)
    shares = [sum(span[0] < time <= span[1] for time in answer.times) / len(answer.times) for answer in answers]
    in_span = sum(share * answer.tokens for share, answer in zip(shares, answers))
    return {
        "tokens_per_s": sum(answer.tokens for answer in answers) / (last - first),
        "together_tokens_per_s": in_span / (end - begin) if together else None,
        "ttft_s": digits(answer.ttft_s for answer in answers),
        "itl_s": digits((gap for answer in answers for gap in gaps(answer.times, *span)), 3),
    }


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the seconds between pieces, of gaps that end in a span; the first may begin before it."""
    return [after - before for before, after in pairwise(times) if begin < after <= end]


class DocumentMaker:
    """Reports of a harbour, as long as wanted.

    Args:
        tokenizer: of the model.
        seed: of all texts.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed

    def make(self, name: str, num_tokens: int) -> str:
        """Return the text of this name, of at least so many tokens and at most a sentence more."""
        text, total = "", 0
        for line in self._lines(name):
            text += line
            total += len(self._tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"])
            if total >= num_tokens:
                break
        return text

    def own(self, client: int, context: int) -> str:
        """Return the document of a client."""
        return self.make(f"client {client}", context + STEP * client)

    def other(self, context: int, unread: int, turn: str) -> str:
        """Return a document that begins as that of client 0, and ends with ``unread`` tokens of its own."""
        return self.make("client 0", context - unread) + self.make(turn, unread)

    def _lines(self, name: str) -> Iterator[str]:
        rng = random.Random(f"{self._seed} {name}")
        yield f"Report of the harbour for {name}.\n"
        while True:
            crate, weight = rng.randrange(10_000), rng.randrange(900)
            place, goods = rng.choice(PLACES), rng.choice(GOODS)
            yield f"Crate {crate} from {place} holds {weight} kilograms of {goods}.\n"


def question(number: int) -> str:
    """Return a question; no two are alike."""
    place = PLACES[number % len(PLACES)]
    return f"\n\nQuestion {number}: Which crates came from {place}, and what do they hold?\nAnswer: Crate"
