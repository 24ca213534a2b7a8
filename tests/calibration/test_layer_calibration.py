"""What layers recover with the selections of others: against dense attention, and in a case with a known answer."""

from itertools import product
from math import inf
from pathlib import Path

import pytest
import torch
from contracts.harness import SHAPE, draw_tokens
from engine.tiny_directory import text_of, write_model
from refusals import refused
from torch import Tensor

from kvsift import LLM
from kvsift.calibration.fidelity import DecodedText
from kvsift.calibration.layer_calibration import LayerOptions, LayerPairs, calibrate_layers, compare
from kvsift.methods.common.anchors import read

LENGTH, DECODED, SELECTED = 200, 6, 20


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(directory, "dense", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def text(llm: LLM) -> DecodedText:
    return DecodedText(llm.tokenizer(text_of(400))["input_ids"][:LENGTH], LENGTH - DECODED)


def attention_of(llm: LLM, ids: list[int]) -> Tensor:
    """Mean attention of each KV head's group, from transformers: [num_layers, num_kv_heads, num_tokens, num_tokens]."""
    model = llm.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return torch.stack([layer[0].unflatten(0, (2, -1)).mean(1) for layer in attentions])


def test_layers_recover_what_dense_attention_says(llm: LLM, text: DecodedText) -> None:
    shares = attention_of(llm, list(text.ids))
    pairs = compare(llm, [text], LayerOptions(SELECTED, dense_layers=()))
    assert pairs.num_queries == DECODED
    for lower, upper in ((0, 1), (0, 2), (1, 2)):
        (own, always), recovered = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
        for position in range(LENGTH - DECODED, LENGTH):
            seq = shares[:, :, position, 4 : position + 1 - 64].double()
            own += seq[upper].topk(SELECTED).values.sum(-1)
            always += 1 - seq[upper].sum(-1)
            for h, g in product(range(2), range(2)):
                recovered[h, g] += seq[upper, h, seq[lower, g].topk(SELECTED).indices].sum()
        best, heads = recovered.max(-1)
        gain, found = pairs.gain(lower, upper)
        assert gain == pytest.approx(float((always + best).sum() / (always + own).sum()), rel=1e-4)
        assert found == tuple(heads.tolist())
        assert pairs.gain(upper, lower) == (-inf, ())


def test_the_same_attention_is_recovered_whole_and_by_the_head_that_it_is_of() -> None:
    """Layer 3 has the queries and keys of layer 2 with its heads exchanged; layer 5 has others."""
    tokens, other = draw_tokens(LENGTH, 0), draw_tokens(LENGTH, 1)
    pairs = LayerPairs(SELECTED, dense_layers=(7,))
    exchanged = tokens.queries.unflatten(0, (2, 2)).flip(0).flatten(0, 1), tokens.keys.flip(0)
    given = {2: (tokens.queries, tokens.keys), 3: exchanged, 5: (other.queries, other.keys)}
    for layer, (queries, keys) in {**given, 7: given[2]}.items():
        pairs.add(SHAPE._replace(layer=layer), LENGTH - 1, queries[:, -1:], keys)
    assert pairs.gain(2, 3) == (pytest.approx(1), (1, 0))
    assert pairs.gain(2, 5)[0] < 0.9
    assert pairs.gain(2, 7) == (-inf, ()), "a dense layer was compared"


def test_layers_with_other_heads_do_not_share() -> None:
    pairs, tokens = LayerPairs(SELECTED, ()), draw_tokens(LENGTH, 0)
    for layer, heads in ((2, 2), (3, 1)):
        shape = SHAPE._replace(layer=layer, num_kv_heads=heads)
        pairs.add(shape, LENGTH - 1, tokens.queries[:, -1:], tokens.keys[:heads])
    assert pairs.gain(2, 3) == (-inf, ())


def test_texts_are_apart_and_short_contexts_are_left_out(llm: LLM, text: DecodedText) -> None:
    options = LayerOptions(SELECTED, dense_layers=())
    short = DecodedText(text.ids[:80], 40)
    once, both = compare(llm, [text], options), compare(llm, [text, short, text], options)
    assert both.num_queries == 2 * once.num_queries
    torch.testing.assert_close(both.recovered[0, 2], 2 * once.recovered[0, 2])


def test_the_file_holds_what_was_found_and_plans_run_by_it(llm: LLM, text: DecodedText, tmp_path: Path) -> None:
    out = tmp_path / "anchors.json"
    options = LayerOptions(SELECTED, dense_layers=(), anchors=2)
    facts = calibrate_layers(llm, [text], {"manual": text_of(400)}, out, options)
    found = read("anchors", str(out))
    assert list(found.anchors) == facts["anchors"]
    assert [len(choice["anchors"]) for choice in facts["choices"]] == [1, 2, 3]
    assert facts["choices"][2] == {"anchors": [0, 1, 2], "mean_recovery": 1.0, "least_recovery": 1.0}
    (layer,) = found.reuse
    expected = compare(llm, [text], options).gain(found.reuse[layer].anchor, layer)
    assert (found.reuse[layer].recovery, found.reuse[layer].heads) == (
        pytest.approx(expected[0], abs=1e-4),
        expected[1],
    )
    assert found.recipe["tokens"] == LENGTH
    assert found.recipe["queries"] == DECODED
    plan = f"tidal_decode:budget=64:window=16:dense_layers=none:anchors={out}"
    answer = llm.generate(text_of(300), plan=plan, max_new_tokens=3)
    seqs = {seq["layer"]: seq["visible_tokens"] for seq in answer.stats["layers"] if seq["phase"] == "decode"}
    assert {layer for layer, visible in seqs.items() if visible <= 64} == set(found.reuse)
    other = LLM(write_model(tmp_path / "other", seed=9), plan)
    with refused("other_model"):
        other.generate(text_of(300), max_new_tokens=3)
    deeper = LLM(write_model(tmp_path / "shallow", num_hidden_layers=2), plan)
    with refused("other_model"):
        deeper.generate(text_of(300), max_new_tokens=3)


def test_what_cannot_be_compared_is_refused_and_nothing_written(llm: LLM, text: DecodedText, tmp_path: Path) -> None:
    for options in (LayerOptions(512), LayerOptions(SELECTED, dense_layers=(0, 1, 2))):
        with refused("too_short"):
            calibrate_layers(llm, [text], {}, tmp_path / "anchors.json", options)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_kvsift_does_not_attend_are_no_part_of_it(tmp_path: Path) -> None:
    """Every other layer slides. Logits are capped too, and layers are numbered as in the model."""
    types = ["sliding_attention", "full_attention"] * 3
    llm = LLM(write_model(tmp_path / "Gemma2", "Gemma2", num_hidden_layers=6, layer_types=types), "dense", device="cpu")
    texts = [DecodedText(llm.tokenizer(text_of(400))["input_ids"][:LENGTH], LENGTH - DECODED)]
    out = tmp_path / "anchors.json"
    facts = calibrate_layers(llm, texts, {}, out, LayerOptions(SELECTED, dense_layers=(0,), anchors=1))
    assert (facts["anchors"], facts["dense"], list(facts["reuse"])) == ([3], [1], [5])
    answer = llm.generate(
        text_of(300), plan=f"tidal_decode:budget=64:window=16:dense_layers=0:anchors={out}", max_new_tokens=3
    )
    seqs = {seq["layer"]: seq["sparse_queries"] for seq in answer.stats["layers"] if seq["phase"] == "decode"}
    assert {layer for layer, sparse in seqs.items() if sparse} == {5}
    with refused("unsupported_plan: layer 2 reuses the selection of layer 1"):
        llm.generate(text_of(300), plan=f"tidal_decode:budget=64:window=16:dense_layers=1:anchors={out}")
