"""kvsift bench serve: an OpenAI server of kvsift under load, plans in turns with dense on the same server."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.errors import InputError
from kvsift_lab.bench import recipe as r

PLANS = "quest:budget=1024:dense_layers=none;sketch:budget=1024:dense_layers=none"
MODEL = "Hugging Face model directory or name; without it, the embedded model. With --url, that of the server."
URL = "Server to measure, such as http://127.0.0.1:8000, which must allow the plans; without it, one is started."
LEAST_CONTEXT = 256
MARGIN = 1024  # tokens of questions, and by which documents differ in length


@dataclass(frozen=True)
class ServeRecipe(r.BenchRecipe):
    """A server under load: clients with long documents, plans in turns with dense on the same server."""

    measured_by = "kvsift_lab.bench.serve_measure:ServeBench"

    contexts: tuple[int, ...] = r.contexts("8K,32K")
    clients: int = r.option(4, "Chats at once.", minimum=1)
    plans: tuple[str, ...] = r.option(
        PLANS,
        "Plans, with ; between them.",
        parse=lambda text, flag: tuple(filter(None, map(str.strip, text.split(";")))),
    )
    tokens: int = r.option(192, "Of each answer.", minimum=8)
    questions: int = r.option(1, "Of each client in a turn, one after the other.", minimum=1)
    rate: float = r.option(0.0, "Questions per second, at random times; 0: each client asks when it has its answer.")
    shared: bool = r.option(False, "All clients ask about one document.")
    unread: int = r.option(2048, "Tokens of another document that are read beside the chats; 0: none.", minimum=0)
    direct: bool = r.option(False, "At the shortest context, also the engine alone, in this process.")
    model: str | None = r.option(None, MODEL, kind=str | None)
    url: str | None = r.option(None, URL, kind=str | None, stored=False)
    repeats: int = r.option(3, "Turns of each plan.", minimum=1)
    seed: int = r.option(0, "Of documents and arrivals.", minimum=0)
    threads: int | None = r.threads()
    max_seconds: float | None = r.max_seconds()

    def __post_init__(self) -> None:
        r.require_some(self.contexts, self.plans, names="context and plan")
        if min(self.contexts) < LEAST_CONTEXT:
            raise InputError(f"--contexts {min(self.contexts)}: give {LEAST_CONTEXT} tokens or more.")
        if self.unread >= min(self.contexts):
            raise InputError(
                f"--unread {self.unread} must be less than the shortest context, {min(self.contexts)}: the rest of the "
                "other document is cached."
            )
        if not 0 <= self.rate < float("inf"):
            raise InputError(f"--rate {self.rate:g} must be a number of questions per second, 0 or more.")
        if len(set(self.plans)) < len(self.plans):
            raise InputError("--plans names a plan twice.")
        self._check_url()
        self._check_plans()

    @property
    def all_plans(self) -> tuple[str, ...]:
        """Dense first, then the others."""
        return "dense", *self.plans

    @property
    def keep_tokens(self) -> int:
        """Tokens that the server keeps: the documents of all clients, and those read beside them."""
        others = len(self.all_plans) * self.repeats * self.unread
        return (self.clients + 1) * (max(self.contexts) + MARGIN) + others

    def _check_url(self) -> None:
        if self.url is None:
            return
        if not self.url.startswith("http://"):
            raise InputError(f"--url {self.url} must begin with http://, for instance http://127.0.0.1:8000.")
        if self.direct:
            raise InputError("--direct compares with a server that this command starts. Leave out --url or --direct.")
        if self.threads is not None:
            raise InputError("--threads is for a server that this command starts. Leave out --url or --threads.")

    def _check_plans(self) -> None:
        from kvsift.models.transformers_load import ModelDirectory
        from kvsift.plan.syntax import parse_plan

        for plan in self.plans:
            if not parse_plan(plan).rules:
                raise InputError("--plans: dense is measured in any case. Name others to compare with it.")
        positions = ModelDirectory.check(self.model).max_positions
        longest = max(self.contexts) + MARGIN + self.tokens
        if positions is not None and longest > positions:
            raise InputError(
                f"a document of {max(self.contexts)} tokens, questions and answers take up to {longest} positions; the "
                f"model has {positions}. Give shorter --contexts."
            )
