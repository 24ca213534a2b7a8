"""A bench is one file and one line of the table; --help of the table stays light, and stored recipes still run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Refused, Run
from kvsift_lab.bench import BENCHES, load
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.prefill import PrefillLayerRecipe

from kvsift import InputError

RESULTS = Path(__file__).parents[3] / "results"


@dataclass(frozen=True)
class ToyRecipe(r.BenchRecipe):
    """Sums of numbers."""

    measured_by = f"{__name__}:ToyBench"

    contexts: tuple[int, ...] = r.contexts("1,2,3")
    factor: int = r.option(2, "Factor of the sums.", minimum=1)
    threads: int | None = r.threads()
    max_seconds: float | None = r.max_seconds()


class ToyBench(Bench):
    recipe: ToyRecipe
    kind = "toy"

    def environment(self) -> dict[str, Any]:
        return {"machine": "a toy"}

    def points(self) -> Iterator[int]:
        yield from self.recipe.contexts

    def measure(self, point: int) -> dict[str, Any]:
        if point == 2:
            raise InputError("2 is refused\nfor a long reason")
        return {"sum": self.recipe.factor * point}

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return f"{point['context']}: {point.get('sum', point.get('reason'))}"

    def closing(self, result: dict[str, Any]) -> str:
        return f"{len(result['points'])} points"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(BENCHES, "toy", f"{__name__}:ToyRecipe")


def test_a_bench_is_one_file_and_one_line(run: Run, toy: None, tmp_path: Path) -> None:
    assert "Sums of numbers." in run("bench", "--help").out
    text = run("bench", "toy", "--help").out
    assert all(flag in text for flag in ("--contexts", "--factor", "--threads", "--max-seconds", "--out", "--json"))
    outcome = run("bench", "toy", "--contexts", "1,2,1K", "--factor", 3, "--out", "toy.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "1: 3\n2: 2 is refused\n1024: 3072\n3 points\n"
    result = json.loads((tmp_path / "toy.json").read_text())
    assert (result["kind"], result["machine"]) == ("toy", "a toy")
    assert result["recipe"] == {"contexts": [1, 2, 1024], "factor": 3, "max_seconds": None}
    assert result["points"][1] == {"context": 2, "reason": "2 is refused"}
    assert run("bench", "toy", "--json").document["points"][2] == {"context": 3, "sum": 6}


def test_points_after_the_time_limit_are_listed(run: Run, toy: None) -> None:
    points = run("bench", "toy", "--max-seconds", 0, "--json").document["points"]
    assert [point["context"] for point in points] == [1, 2, 3]
    assert {point["reason"] for point in points} == {"--max-seconds 0 had passed"}


def test_every_point_is_in_the_file_before_the_next_starts(
    run: Run, toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(bench: ToyBench, point: int) -> dict[str, Any]:
        if point > 1:
            assert len(json.loads((tmp_path / "toy.json").read_text())["points"]) == point - 1
        return {"sum": 0}

    monkeypatch.setattr(ToyBench, "measure", measure)
    assert run("bench", "toy", "--out", "toy.json").code == 0


def test_values_that_cannot_be_used_are_refused(refused: Refused, toy: None) -> None:
    assert refused("bench", "toy", "--contexts", "x").startswith("--contexts x: 'x' is not a token count.")
    assert refused("bench", "toy", "--out", "no/toy.json") == "--out no/toy.json: the directory no does not exist."


ASK_FOR_HELP = """
import sys
from kvsift.cli.main import main
for command in sys.argv[1:]:
    sys.argv = ["kvsift", *command.split(), "--help"]
    try: main()
    except SystemExit as stop: print("after", command, stop.code, sorted({"torch", "transformers"} & {*sys.modules}))
"""


def test_help_imports_neither_torch_nor_transformers() -> None:
    commands = ["", "bench", *(f"bench {name}" for name in BENCHES)]
    told = subprocess.run([sys.executable, "-c", ASK_FOR_HELP, *commands], capture_output=True, text=True, check=True)
    lines = [line for line in told.stdout.splitlines() if line.startswith("after ")]
    assert lines == [f"after {command} 0 []" for command in commands]


def _stored() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in sorted(RESULTS.glob("*/summary.json")):
        result = json.loads(path.read_text())
        if result.get("kind") in {*BENCHES, "prefill layer"}:
            yield path.parent.name, result["kind"], result["recipe"]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize(("kind", "stored"), [pytest.param(*each, id=name) for name, *each in _stored()])
def test_a_stored_recipe_makes_the_recipe_of_today(kind: str, stored: dict[str, Any]) -> None:
    recipe = PrefillLayerRecipe if kind == "prefill layer" else load(BENCHES[kind])
    made = recipe(**{key: _tuples(value) for key, value in stored.items()})
    assert json.loads(json.dumps(made.stored())) | stored == json.loads(json.dumps(made.stored()))
