"""The bench of servers: what it asks and counts, with a server of canned answers and with a small real one."""

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from engine.tiny_directory import write_model
from kvsift_lab.bench.serve import ServeRecipe, over_dense, overhead, percentile, serve_table
from kvsift_lab.bench.serve_client import TimedAnswer
from kvsift_lab.bench.serve_measure import ServeBench, gaps, load_numbers
from refusals import refused

PLAN = "quest:budget=96:window=32:dense_layers=none"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token per byte and room for 4096."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


class CannedServer(ThreadingHTTPServer):
    """A server whose answers are numbers, a piece per token; it keeps what it is asked."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), CannedHandler)
        self.name, self.asked = name, list[dict[str, Any]]()
        self.error: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class CannedHandler(BaseHTTPRequestHandler):
    server: CannedServer

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": self.server.name}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if self.server.error is not None:
            return self._answer(json.dumps(self.server.error).encode(), 400)
        chunks = [{"choices": [{"text": f"{number} "}]} for number in range(min(asked["max_tokens"], 400))]
        sparsity = {"plan": asked["sparsity"], "density": 0.5}
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": len(chunks), "sparsity": sparsity,
                 "prompt_tokens_details": {"cached_tokens": 64}}  # fmt: skip
        events = [*chunks, {"choices": [], "usage": usage}]
        self._answer(b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n")

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def canned(model: Path) -> Iterator[CannedServer]:
    with CannedServer(model.name) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def recipe_for(model: Path, **changes: Any) -> ServeRecipe:
    small = ServeRecipe((1024, 512), 3, (PLAN,), tokens=16, unread=256, model=str(model), repeats=2)
    return replace(small, **changes)


def test_every_plan_has_its_turn_in_every_round_on_the_same_documents(canned: CannedServer, model: Path) -> None:
    points = list(ServeBench(recipe_for(model, url=canned.url)).run())
    assert [point["context"] for point in points] == [512, 1024]
    for point in points:
        order = [(turn["round"], turn["plan"]) for turn in point["turns"]]
        assert order == [(0, "dense"), (0, PLAN), (1, PLAN), (1, "dense")]
        assert len(point["cold"]) == 3
        for turn in point["turns"]:
            assert len(turn["load"]["ttft_s"]) == 3
            assert turn["load"]["cached_tokens"] == [64] * 3
            assert turn["second"]["ttft_s"] > 0
            assert turn["other"]["prompt_tokens"] >= point["context"]
    assert {asked["sparsity"] for asked in canned.asked} == {"dense", PLAN}
    assert all(asked["ignore_eos"] for asked in canned.asked)
    assert len({asked["prompt"] for asked in canned.asked}) == len(canned.asked), "no question comes twice"
    assert "| 512 | `dense` |" in serve_table(points)
    assert over_dense(points[0], PLAN) > 0
    assert overhead(points[0], PLAN) is None


@pytest.mark.parametrize(
    ("changes", "asked"),
    [({"shared": True, "questions": 2}, 1 + 2 * (6 + 2 + 2)), ({"rate": 200.0, "unread": 0}, 3 + 2 * (3 + 2 + 1)),
     ({"clients": 1}, 1 + 2)],
)  # fmt: skip
def test_clients_may_share_a_document_ask_more_or_come_at_random(
    canned: CannedServer, model: Path, changes: dict[str, Any], asked: int
) -> None:
    recipe = recipe_for(model, url=canned.url, contexts=(512,), repeats=1, **changes)
    [point] = ServeBench(recipe).run()
    assert "reason" not in point, point
    assert len(canned.asked) == asked
    assert len(point["turns"]) == 2


def test_what_the_server_refuses_is_the_reason_of_a_point(canned: CannedServer, model: Path) -> None:
    canned.error = {"error": {"message": "the plan is not allowed"}}
    [point] = ServeBench(recipe_for(model, url=canned.url, contexts=(512,))).run()
    assert "the plan is not allowed" in point["reason"]


def test_a_server_of_another_model_or_none_is_refused(canned: CannedServer, model: Path) -> None:
    canned.name = "another"
    with refused("other_model: 'another'"):
        next(ServeBench(recipe_for(model, url=canned.url)).run())
    with refused("failed_process"):
        next(ServeBench(recipe_for(model, url="http://127.0.0.1:9")).run())


def test_a_small_server_is_started_measured_beside_the_engine_and_ended(model: Path) -> None:
    recipe = recipe_for(model, contexts=(1024,), clients=2, repeats=1, threads=1, direct=True)
    [point] = ServeBench(recipe).run()
    assert "reason" not in point, point
    for turn in point["turns"]:
        assert turn["load"]["cached_tokens"] == [1024, 1024]
        assert turn["load"]["tokens_per_s"] > 0
        assert turn["second"]["cached_tokens"] == 1024
        assert turn["other"]["cached_tokens"] == 512
        assert len(turn["direct"]["ttft_s"]) == 2
        assert turn["others"] is None or turn["others"] >= 0
    assert point["turns"][0]["load"]["density"] == 1
    assert point["turns"][1]["load"]["density"] < 0.5
    ratio = overhead(point, PLAN)
    assert ratio is not None
    assert ratio > 0


def test_rates_and_gaps_are_those_while_all_get_tokens() -> None:
    one = TimedAnswer(0.0, [1.0, 2.0, 3.0, 4.0], 4)
    other = TimedAnswer(1.0, [1.5, 2.5, 3.5], 6)
    numbers = load_numbers([one, other])
    assert numbers["tokens_per_s"] == 10 / 4
    assert numbers["together_tokens_per_s"] == (2 + 2 * 2) / 2  # from 1.5 to 3.5
    assert numbers["ttft_s"] == [1.0, 0.5]
    assert numbers["itl_s"] == [1.0, 1.0, 1.0, 1.0]
    apart = load_numbers([one, TimedAnswer(5.0, [6.0, 7.0], 2)])
    assert apart["together_tokens_per_s"] is None
    assert apart["itl_s"] == [1.0] * 4
    assert gaps([1.0, 2.0, 5.0, 6.0], 1.5, 5.5) == [1.0, 3.0]
    assert (percentile([3.0, 1.0, 2.0], 0.5), percentile(list(range(100)), 0.99)) == (2.0, 99)
