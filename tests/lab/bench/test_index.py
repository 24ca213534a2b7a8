"""The index benchmark in small: truth is true, knobs end where recall is reached, and the report says so."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from kvsift_lab.bench.index import IndexRecipe, auto_ratio, medians, point_table, point_text, reasons
from kvsift_lab.bench.index_cases import (
    Case,
    Contender,
    FaissFlat,
    exact,
    mass_of,
    probes,
    recall,
    synthetic,
)
from kvsift_lab.bench.index_measure import IndexBench, searched, tune
from torch import Tensor

from kvsift import InputError, native
from kvsift.indexes.samples import QuerySamples

TINY: dict[str, Any] = {
    "contexts": (700,), "ks": (10,), "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32, "samples": 128,
    "tokens": 6, "repeats": 2, "cold_bytes": 1 << 16,
}  # fmt: skip
needs_core = pytest.mark.skipif(not native.available(), reason=native.why_missing() or "the core is here")
needs_faiss = pytest.mark.skipif(find_spec("faiss") is None, reason="faiss is not installed")


class Half:
    """Finds the better half of what is asked, unless ``width`` is all there is to see; scores so many keys."""

    def __init__(self) -> None:
        self.width, self.searches, self.scored = 0, 0, 0

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.searches, self.scored = self.searches + 1, self.scored + self.width
        scores = torch.stack([keys[head // 2].float() @ q.float() for head, q in enumerate(queries)])
        best = scores.topk(k)
        cut = k if self.width >= 40 else k // 2
        return best.indices.where(torch.arange(k) < cut, torch.tensor(-1)), best.values

    def statistics(self) -> dict[str, Any]:
        scanned = self.scored / max(self.searches, 1)
        return {"kind": "half", "searches": self.searches, "scanned": scanned, "bytes": 4200, "build_seconds": 1.0}


@pytest.fixture(scope="module")
def case() -> Case:
    return synthetic("S", 300, 4, 2, 32, 64, 4)


def test_truth_is_what_sorting_all_logits_gives(case: Case) -> None:
    asked = case.decode_queries(0, 1)
    truth = exact(case, asked, 7)
    keys = case.keys.float().repeat_interleave(2, 0)
    logits = torch.einsum("thd,hnd->thn", asked.float(), keys) * case.scale
    assert torch.equal(truth.ids, logits.sort(-1, descending=True).indices[..., :7])
    weights = logits.softmax(-1)
    torch.testing.assert_close(truth.mass, weights.gather(-1, truth.ids).sum(-1))
    worst = logits.sort(-1).indices[..., :7]
    masses = torch.stack([mass_of(case, *each) for each in zip(asked, worst, truth.lse)])
    torch.testing.assert_close(masses, weights.gather(-1, worst).sum(-1))
    missing = torch.full_like(worst[0], -1)
    assert float(mass_of(case, asked[0], missing, truth.lse[0]).sum()) == 0


def test_recall_counts_ids_that_are_true_and_no_missing_ones() -> None:
    truth = torch.tensor([[[1, 2, 3, 4]]])
    assert recall(torch.tensor([[[4, 3, 2, 1]]]), truth) == 1
    assert recall(torch.tensor([[[9, 1, -1, -1]]]), truth) == 0.25
    assert recall(torch.tensor([[[-1, -1, -1, -1]]]), torch.tensor([[[0, -1, -1, -1]]])) == 0


def test_a_knob_ends_at_the_least_that_reaches_the_target(case: Case) -> None:
    asked = case.decode_queries(0, 1)
    truth, half = exact(case, asked, 10), Half()
    contender = Contender(lambda case, k: half, "width", lambda n, k: [10, 20, 40, 80])  # type: ignore[arg-type, return-value]
    found = tune(half, contender, case, asked, truth, 0.95)  # type: ignore[arg-type]
    assert found == {"knob": "width", "value": 40, "reached": True}
    short = contender._replace(values=lambda n, k: [10, 20])
    assert tune(half, short, case, asked, truth, 0.95) == {"knob": "width", "value": 20, "reached": False}  # type: ignore[arg-type]
    assert tune(half, contender, case, asked, truth, 0.5)["value"] == 10  # type: ignore[arg-type]


def test_only_what_answers_scored_counts_as_scanned(case: Case) -> None:
    asked = case.decode_queries(0, 1)
    truth, half = exact(case, asked, 10), Half()
    contender = Contender(lambda case, k: half, "width")  # type: ignore[arg-type, return-value]
    half.width = 300
    half.search(asked[0], case.keys, 10)  # tuning, which is over
    half.width = 30
    found = searched(half, case, asked, truth, contender)  # type: ignore[arg-type]
    assert found["recall"] == 0.5
    assert 0.5 < found["mass_recall"] < 1  # the better half weighs more
    assert found["worst_mass_recall"] <= found["mass_recall"]
    assert found["scanned"] == pytest.approx(30 / 300)
    assert found["num_bytes"] == 4 * 30 * 32 * 2  # query heads, keys, numbers, bytes each
    assert found["bytes_per_key"] == 4200 / (2 * 300)
    assert searched(half, case, asked, truth, contender._replace(shared=True))["num_bytes"] == 2 * 30 * 32 * 2  # type: ignore[arg-type]


@needs_core
def test_every_index_of_our_own_is_measured() -> None:
    names = ("flat", "flat_int8", "graph", "graph_causal", "graph_paper", "auto")
    recipe = IndexRecipe(("S", "T"), indexes=names, **TINY)
    points = list(IndexBench(recipe).run())
    assert [point["case"] for point in points] == ["S", "T"]
    for point in points:
        found = {each["name"]: each for each in point["indexes"]}
        assert [each.get("reason") for each in found.values()] == [None] * len(names)
        assert found["flat"]["recall"] == 1
        assert found["flat"]["scanned"] == 1
        assert found["flat_int8"]["recall"] >= 0.99
        assert found["graph"]["recall"] > 0.8
        assert all(len(each["samples_s"]) == 2 and min(each["samples_s"]) > 0 for each in found.values())
        assert len(point["bandwidth"]) == 2
        table = point_table(point)
        assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == list(names)
    assert "| 10 | graph | 2 |" in medians(points)


@needs_core
@needs_faiss
def test_indexes_of_faiss_are_measured_beside_the_baseline() -> None:
    recipe = IndexRecipe(("T",), indexes=("flat", "faiss_flat", "ivf", "hnsw"), **{**TINY, "ks": (5, 20)})
    for point, k in zip(IndexBench(recipe).run(), (5, 20), strict=True):
        found = {each["name"]: each for each in point["indexes"]}
        assert point["k"] == k
        assert found["faiss_flat"]["recall"] >= 0.99
        assert found["ivf"]["value"] in probes(700, k)
        assert 0 < found["ivf"]["scanned"] <= 1
        assert "over faiss_flat" in point_text(point)


def test_what_is_not_installed_is_said_and_the_rest_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise InputError("faiss is not installed")

    monkeypatch.setattr("kvsift_lab.bench.index_cases.load_faiss", missing)
    monkeypatch.setattr("kvsift.indexes.faiss_index.load_faiss", missing)
    recipe = IndexRecipe(("T",), indexes=("flat", "faiss_flat", "ivf", "hnsw"), **TINY)
    (point,) = IndexBench(recipe).run()
    assert point["indexes"][1] == {"name": "faiss_flat", "reason": "faiss is not installed"}
    assert "samples_s" in point["indexes"][0]
    assert point_text(point).endswith("\nfaiss_flat, ivf, hnsw: faiss is not installed\n")
    assert "not installed" not in point_text(point, known=reasons(point))


def test_auto_is_judged_by_the_fastest_it_could_have_chosen() -> None:
    times = {"flat": 3e-3, "flat_int8": 2e-3, "graph": 4e-3, "ivf": 1e-3, "auto": 2.2e-3}
    point = {"others": [0.0] * 3, "indexes": [{"name": name, "samples_s": [s] * 3} for name, s in times.items()]}
    assert auto_ratio(point) == pytest.approx(1.1)
    assert auto_ratio({**point, "indexes": point["indexes"][:-1]}) is None  # type: ignore[index]


@needs_faiss
def test_the_baseline_finds_the_nearest_keys(case: Case) -> None:
    asked = case.decode_queries(0, 1)
    ids = torch.stack([FaissFlat(case.keys).search(each, case.keys, 9)[0] for each in asked])
    assert recall(ids, exact(case, asked, 9).ids) >= 0.99
    assert FaissFlat(case.keys).search(asked[0], case.keys, 301)[0][:, -1].tolist() == [-1] * 4


def test_samples_of_a_case_keep_their_head(case: Case) -> None:
    first, second = case.heads()
    assert isinstance(second.samples, QuerySamples)
    assert torch.equal(second.samples.queries, case.samples.queries[2:])
    assert torch.equal(second.keys[0], case.keys[1])
    assert torch.equal(first.queries, case.queries[:2])
