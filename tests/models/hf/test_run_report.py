"""What a run says about itself: tokens counted as they were seen, and a word when nothing was skipped."""

import json
import math

import pytest
import torch
from models.tiny import FAMILIES, SPARSE, WITH_SLIDING_LAYERS, greedy, prompt, ragged, tiny

import kvsift

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_a_small_budget_changes_the_answer_and_the_report_says_how_much_was_seen(family: str) -> None:
    model = tiny(family)
    dense = greedy(model, prompt())
    with kvsift.sparse(model, SPARSE) as run:
        assert not torch.equal(greedy(model, prompt()), dense)
    decode, prefill = (run.report()["phases"][phase] for phase in ("decode", "prefill"))
    num_layers = 1 if family in WITH_SLIDING_LAYERS else 2
    assert decode["queries"] == decode["sparse_queries"] == 9 * num_layers  # the tenth token is never fed
    assert prefill["queries"] == 150 * num_layers
    assert prefill["sparse_queries"] == 0
    assert prefill["density"] == 1.0
    # sinks and window in whole pages, and as many pages as still fit: 48 tokens or a page less
    assert 48 - 8 <= decode["visible_tokens"] <= 48
    assert decode["density"] == pytest.approx(decode["visible_tokens"] / (150 + 1 + 4))
    assert decode["kv_bytes_read"] < decode["kv_bytes_dense"]
    assert 0 < decode["recovery"] < 1


def test_visible_tokens_are_those_of_the_plan_counted_by_hand() -> None:
    model = tiny()
    with kvsift.sparse(model, "streaming_llm:budget=40:sinks=4:dense_layers=1") as run:
        greedy(model, prompt())
    rows = {(row["layer"], row["phase"]): row for row in run.report()["layers"]}
    assert rows[0, "decode"]["visible_tokens"] == 40  # 4 sinks and a window of 36
    assert rows[0, "decode"]["density"] == pytest.approx(40 / 155)
    assert rows[1, "decode"]["visible_tokens"] == 155  # the mean of 151 to 159
    assert rows[1, "decode"]["sparse_queries"] == 0


def test_rows_of_a_batch_are_counted_without_their_padding() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run:
        greedy(model, **ragged(150, 121))
    phases = run.report()["phases"]
    assert phases["prefill"]["queries"] == (150 + 121) * 2
    assert phases["decode"]["queries"] == 9 * 2 * 2


@pytest.mark.parametrize("family", WITH_SLIDING_LAYERS)
def test_sliding_layers_stay_the_model_s_own_and_are_not_counted(family: str) -> None:
    model = tiny(family, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    with kvsift.sparse(model, SPARSE) as run:
        cache = model.generate(prompt(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert {row["layer"] for row in run.report()["layers"]} == {1}  # the layer's index in the model
    names = [type(layer).__name__ for layer in cache.past_key_values.layers]
    assert names == ["DynamicSlidingWindowLayer", "SparseLayer", "DynamicSlidingWindowLayer"]


def test_dense_layers_are_counted_among_those_with_full_attention() -> None:
    model = tiny("Gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    with kvsift.sparse(model, SPARSE.replace("none", "0+2")) as run:
        greedy(model, prompt())
    sparse_queries = {row["layer"]: row["sparse_queries"] for row in run.report()["layers"] if row["phase"] == "decode"}
    assert sparse_queries == {1: 0, 3: 9}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("quest:budget=4096", "skipped nothing in decode"),
        ("quest:budget=128", "every layer is in dense_layers"),  # two layers, both dense by default
    ],
)
def test_a_run_that_skipped_nothing_says_so(plan: str, says: str) -> None:
    model = tiny()
    with pytest.warns(UserWarning, match=says), kvsift.sparse(model, plan):
        greedy(model, prompt())


def test_a_strict_run_that_skipped_nothing_fails_and_gives_the_model_back() -> None:
    model = tiny()
    with pytest.raises(kvsift.NothingSkipped, match="skipped nothing in decode"):  # noqa: SIM117
        with kvsift.sparse(model, "quest:budget=4096", strict=True):
            greedy(model, prompt())
    assert model.config._attn_implementation == "eager"


def test_an_error_in_the_block_is_not_replaced_by_nothing_skipped() -> None:
    model = tiny()

    def interrupted() -> None:
        with kvsift.sparse(model, "quest:budget=4096", strict=True):
            greedy(model, prompt())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


@pytest.mark.parametrize("probe_every", [0, 1, 4])
def test_probes_change_no_token_and_happen_as_often_as_asked(probe_every: int) -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run:
        expected = greedy(model, prompt())
    with kvsift.sparse(model, SPARSE, probe_every=probe_every) as run:
        assert torch.equal(greedy(model, prompt()), expected)
    expected_probes = 0 if probe_every == 0 else 2 * math.ceil(9 / probe_every)
    assert run.stats.phase("decode").probes == expected_probes


def test_a_report_is_json_and_names_its_plan() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run:
        greedy(model, prompt())
    report = json.loads(json.dumps(run.report()))
    assert report == run.report()
    assert str(kvsift.parse_plan(report["plan"])) == report["plan"]
    assert kvsift.parse_plan(report["plan"]) == kvsift.parse_plan(SPARSE)
