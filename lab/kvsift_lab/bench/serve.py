"""kvsift bench serve: an OpenAI server of kvsift under load, plans in turns with dense on the same server; recipe
and report.

``vllm bench serve`` and guidellm send one kind of request to one server: they do not take turns of plans on the same
documents, ask further questions beside chats that go on, or run the engine alone. guidellm 0.8 would also bring 35
packages (pandas, pyarrow, a web server), and ``vllm bench serve`` comes with vLLM only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvsift.errors import Conflict, ContextLengthExceeded, InvalidValue
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench.report import Point, ms
from kvsift_lab.numbers import table, tokens

PLANS = "quest:budget=1024:dense_layers=none;sketch:budget=1024:dense_layers=none"
MODEL = "Hugging Face model directory or name; without it, the embedded model. With --url, that of the server."
URL = "Server to measure, such as http://127.0.0.1:8000, which must allow the plans; without it, one is started."
LEAST_CONTEXT = 256
MARGIN = 1024  # tokens of questions, and by which documents differ in length
COLUMNS = ("context", "plan", "tokens/s in all", "over dense", "ITL p50", "p99", "first token, cold", "second question",
           "ITL p99 beside a document")  # fmt: skip
PARTS = "load", "other"  # of a turn, with gaps between tokens
Turn = dict[str, Any]  # of a plan, in one round


@dataclass(frozen=True)
class ServeRecipe(r.BenchRecipe):
    """A server under load: clients with long documents, plans in turns with dense on the same server."""

    measured_by = "kvsift_lab.bench.serve_measure:ServeBench"

    contexts: tuple[int, ...] = r.contexts("8K,32K")
    clients: int = r.option(4, "Chats at once.", minimum=1)
    plans: tuple[str, ...] = r.plans(PLANS)
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
            raise InvalidValue(f"--contexts {min(self.contexts)}: give {LEAST_CONTEXT} tokens or more.")
        if self.unread >= min(self.contexts):
            raise InvalidValue(
                f"--unread {self.unread} must be less than the shortest context, {min(self.contexts)}: the rest of the "
                "other document is cached."
            )
        if not 0 <= self.rate < float("inf"):
            raise InvalidValue(f"--rate {self.rate:g} must be a number of questions per second, 0 or more.")
        if len(set(self.plans)) < len(self.plans):
            raise InvalidValue("--plans names a plan twice.")
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
            raise InvalidValue(f"--url {self.url} must begin with http://, for instance http://127.0.0.1:8000.")
        if self.direct:
            raise Conflict("--direct compares with a server that this command starts. Leave out --url or --direct.")
        if self.threads is not None:
            raise Conflict("--threads is for a server that this command starts. Leave out --url or --threads.")

    def _check_plans(self) -> None:
        from kvsift.models.hf.model_directory import ModelDirectory
        from kvsift.plan.syntax import parse_plan

        for plan in self.plans:
            if not parse_plan(plan).rules:
                raise Conflict("--plans: dense is measured in any case. Name others to compare with it.")
        positions = ModelDirectory.check(self.model).max_positions
        longest = max(self.contexts) + MARGIN + self.tokens
        if positions is not None and longest > positions:
            raise ContextLengthExceeded(
                f"a document of {max(self.contexts)} tokens, questions and answers take up to {longest} positions; the "
                f"model has {positions}. Give shorter --contexts."
            )


def plans_of(point: Point) -> list[str]:
    """Return the plans of a point, dense first."""
    return sorted(dict.fromkeys(turn["plan"] for turn in point["turns"]), key=lambda plan: plan != "dense")


def turns_of(point: Point, plan: str) -> list[Turn]:
    """Return the turns of a plan, by round."""
    return [turn for turn in point["turns"] if turn["plan"] == plan]


def rate(load: dict[str, Any]) -> float:
    """Return tokens per second of all clients while all get tokens, or else from first to last."""
    return float(load["together_tokens_per_s"] or load["tokens_per_s"])


def over_dense(point: Point, plan: str) -> float:
    """Return how many times the rate of dense a plan's is, in the same round; the median of rounds."""
    pairs = zip(turns_of(point, plan), turns_of(point, "dense"))
    return median(rate(one["load"]) / rate(dense["load"]) for one, dense in pairs)


def overhead(point: Point, plan: str) -> float | None:
    """Return the tokens per second of the engine alone over those of the server, the median of rounds; None if it was
    not measured."""
    ratios = [rate(turn["direct"]) / rate(turn["load"]) for turn in turns_of(point, plan) if "direct" in turn]
    return median(ratios) if ratios else None


def serve_table(points: Sequence[Point]) -> str:
    """Return a Markdown table: a row per context and plan."""
    return table(COLUMNS, [_row(point, plan) for point in points if "turns" in point for plan in plans_of(point)])


def _row(point: Point, plan: str) -> list[str]:
    turns = turns_of(point, plan)
    load, beside = ([gap for turn in turns for gap in turn.get(part, {"itl_s": []})["itl_s"]] for part in PARTS)
    seconds = [turn["second"]["ttft_s"] for turn in turns if "second" in turn]
    return [
        tokens(point["context"]),
        f"`{plan}`",
        f"{median(rate(turn['load']) for turn in turns):.0f}",
        "" if plan == "dense" else f"{over_dense(point, plan):.2f}x",
        f"{ms(percentile(load, 0.5), '.0f')} ms",
        f"{ms(percentile(load, 0.99), '.0f')} ms",
        f"{median(each['ttft_s'] for each in point['cold']):.1f} s",
        f"{median(seconds):.2f} s" if seconds else "-",
        f"{ms(percentile(beside, 0.99), '.0f')} ms" if beside else "-",
    ]


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample that so large a share of all does not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def point_text(point: Point) -> str:
    """Render a point: the busy share of others, a row per plan, and the cost of the server."""
    title = f"{tokens(point['context'])} tokens"
    if "turns" not in point:
        return f"{title}: not measured, {point['reason']}"
    alone = [(plan, ratio) for plan in plans_of(point) if (ratio := overhead(point, plan)) is not None]
    lines = [f"{plan}: the engine alone is {ratio:.2f}x as fast" for plan, ratio in alone]
    return "\n".join([f"{title}; {busy(point)}:", serve_table([point]), *lines])


def busy(point: Point) -> str:
    """Render the share of the processors that other processes used."""
    shares = [turn["others"] for turn in point["turns"] if turn["others"] is not None]
    if not shares:
        return "use by other processes unknown"
    return f"other processes used {100 * median(shares):.0f} % of the processors (at most {100 * max(shares):.0f} %)"
