"""Decode steps in one call of the compiled core: the bits, the cache and the counters of composed steps."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from models.gguf_files import pack_model
from models.tiny import tiny
from refusals import refused
from turns import in_turns

from kvsift import native
from kvsift.layer import selection
from kvsift.methods.common.anchors import AnchorMap, Reuse, write
from kvsift.models.decoder import Decoder
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.sparse import SparseCache, feeding, make_cache
from kvsift.models.native_step import NativeStep
from kvsift.plan.capabilities import reason

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
QUEST = "quest:budget=48:window=8:page_size=8"
SKETCH = "sketch:budget=48:window=16"
PLANS = [
    "dense", QUEST, f"{QUEST}:dense_layers=none", f"{QUEST}:heads=query:dense_layers=1:sinks=0", SKETCH,
    f"{SKETCH}:bits=2:dense_layers=none", f"{SKETCH}:heads=query:rest=false:dense_layers=1:sinks=0",
    "sketch:budget=64:window=33:page_size=32:sinks=9:dense_layers=0", "streaming_llm:budget=48:dense_layers=1",
]  # fmt: skip
VERIFIED = ["dense", QUEST, SKETCH, "streaming_llm:budget=48"]
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Gemma2", "Gemma3", "Ministral",
            "Ministral3", "Glm4Moe"]  # fmt: skip
WINDOWED = ["Gemma2", "Gemma3", "Ministral"]
PLACES = ["device", "host:kv_dtype=int8"]
DTYPES = [torch.float32, torch.bfloat16]
MODELS = [*((family, PLACES[0]) for family in FAMILIES), ("Qwen3", PLACES[1]), ("Gemma3", PLACES[1])]
UNDOABLE = [each for each in MODELS if each[0] not in WINDOWED]


def of_three_layers(family: str) -> Any:
    """A model with three layers of full attention, and perhaps a window before the last of them."""
    full = ["full_attention"] * 3
    types = [*full[:2], "sliding_attention", *full[2:]] if family in WINDOWED else full
    settings = {"layer_types": types} if family in WINDOWED else {}
    model = tiny(family, num_hidden_layers=len(types), **settings)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)  # which experts are chosen depends on it
    return model


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def filled(
    model: Any, plan: str, length: int, probe_every: int = 0, seed: int = 3, place: str = "device"
) -> SparseCache:
    """A cache behind a prompt of so many random tokens."""
    cache = make_cache(model, plan, probe_every=probe_every, placement=place)
    ids = torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode(), feeding(cache, "prefill"):
        ForwardPass(Decoder(model)).prefill(ids, cache, "prefill")
    return cache


def both(model: Any) -> tuple[ForwardPass, ForwardPass]:
    """Native and composed steps of a model."""
    taken, composed = ForwardPass(Decoder(model)), ForwardPass(Decoder(model))
    assert taken.native is not None
    composed.native = None
    return taken, composed


def generated(model_pass: ForwardPass, caches: list[SparseCache], count: int) -> list[torch.Tensor]:
    """Logits of the steps of sequences, each of which goes on with its likeliest tokens."""
    tokens, found = torch.arange(5, 5 + len(caches)), []
    with torch.inference_mode():
        for cache in caches:
            cache.run.feeding = "decode"
        for _ in range(count):
            found.append(model_pass.decode(tokens, caches))
            tokens = found[-1][:, 0].argmax(-1)
    return found


def take_all(model_pass: ForwardPass, caches: list[SparseCache], count: int) -> torch.Tensor:
    """As ``generated``, where no step may be composed."""
    native_step, taken = model_pass.native, list[bool]()

    def counted(*arguments: Any) -> torch.Tensor | None:
        assert native_step is not None
        logits = native_step(*arguments)
        taken.append(logits is not None)
        return logits

    model_pass.native = counted  # type: ignore[assignment]
    logits = torch.stack(generated(model_pass, caches, count))
    assert taken == [True] * count
    return logits


def counters(cache: SparseCache) -> dict[str, Any]:
    every = {key: dict(vars(tally)) for key, tally in cache.stats.tallies.items()}
    for tally in every.values():
        del tally["select_s"]
        tally["visible_tokens"], tally["kv_bytes_read"] = float(tally["visible_tokens"]), int(tally["kv_bytes_read"])
        tally["estimated"] = float(tally["estimated"])
    return every


def assert_alike(one: SparseCache, other: SparseCache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    assert counters(one) == counters(other)
    assert_alike_windows(one, other)
    for own_layer, expected_layer in zip(one.layers, other.layers, strict=True):
        if not isinstance(own_layer, SparseLayer):
            continue
        own, expected = own_layer.attention, expected_layer.attention
        assert own is not None
        assert own.store.lengths == expected.store.lengths
        for tensor, same in zip(own.rows(0), expected.rows(0), strict=True):
            assert torch.equal(bits(tensor), bits(same))
        summaries = own.summaries(0)
        assert summaries.keys() == expected.summaries(0).keys()
        for kind, rows in summaries.items():
            assert torch.equal(bits(rows), bits(expected.summaries(0)[kind]))


def assert_alike_windows(one: SparseCache, other: SparseCache) -> None:
    for own, expected in zip(one.layers, other.layers, strict=True):
        if not isinstance(own, SparseLayer):
            assert own.cumulative_length == expected.cumulative_length
            assert torch.equal(bits(own.keys), bits(expected.keys))
            assert torch.equal(bits(own.values), bits(expected.values))


def is_taken(model_pass: ForwardPass, cache: SparseCache) -> bool:
    return model_pass.reason_composed(cache) is None


@pytest.mark.parametrize(("case", "of"), in_turns(product(PLANS, DTYPES), MODELS), ids=str)
def test_native_steps_have_the_bits_of_composed_ones(case: tuple[str, torch.dtype], of: tuple[str, str]) -> None:
    (plan, dtype), (family, place) = case, of
    model = of_three_layers(family).to(dtype)
    taken, composed = both(model)
    one, other = (filled(model, plan, 90, place=place) for _ in range(2))
    found, expected = generated(taken, [one], 20), generated(composed, [other], 20)
    assert is_taken(taken, one) or (
        family == "Gemma2" and plan.startswith("sketch")
    )  # logits of sketches are not capped
    for logits, same in zip(found, expected, strict=True):
        assert torch.equal(bits(logits), bits(same))
    assert_alike(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Moe", "Gemma3"])
def test_native_steps_of_packed_weights_have_the_bits_of_composed_ones(
    family: str, kind: Kind, dtype: torch.dtype
) -> None:
    experts = {"moe_intermediate_size": 32} if family == "Qwen3Moe" else {}
    model = pack_model(tiny(family, head_dim=32, intermediate_size=96, **experts).to(dtype), kind)
    taken, composed = both(model)
    assert taken.joins
    lengths = (40, 75, 200)
    caches, others, alone = ([filled(model, PLANS[2], length) for length in lengths] for _ in range(3))
    native_logits, expected = generated(taken, caches, 12), generated(composed, others, 12)
    for one, other in zip(native_logits, expected, strict=True):
        assert torch.equal(bits(one), bits(other))
    for cache, other in zip(caches, others, strict=True):
        assert_alike(cache, other)
    first = torch.cat([taken.decode(torch.tensor([5 + i]), [cache]) for i, cache in enumerate(alone)])
    assert torch.equal(bits(first), bits(native_logits[0]))
    if family in WINDOWED:
        return  # its tokens cannot be undone
    tokens = [8, 9, 10, 11, 12, 13]
    together = verified(taken, caches[1], tokens, 6)
    assert torch.equal(bits(together), bits(verified(composed, others[1], tokens, 1)))


def test_heads_that_no_blocks_of_packed_weights_cover_are_composed() -> None:
    step = Decoder(pack_model(tiny("Llama"), Kind.Q8_0))
    assert reason(step, NativeStep.of_weights) == "its heads have 16 channels, and packed weights take blocks of 32"


def test_a_token_without_an_embedding_is_an_error_as_in_composed_steps() -> None:
    model = tiny("Llama")
    taken, composed = both(model)
    for model_pass in (taken, composed):
        cache = filled(model, QUEST, 30)
        cache.run.feeding = "decode"
        with torch.inference_mode(), pytest.raises(IndexError):
            model_pass.decode(torch.tensor([model.config.vocab_size]), [cache])


def test_weights_stay_while_their_model_is_cast() -> None:
    model = tiny("Llama")
    taken, composed = both(model)
    one, other = (filled(model, QUEST, 90) for _ in range(2))
    expected = generated(composed, [other], 10)
    model.double()
    torch.randn(1 << 20)  # takes what was given back
    for logits, same in zip(generated(taken, [one], 10), expected, strict=True):
        assert torch.equal(bits(logits), bits(same))


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_go_on_after_composed_steps_and_copies(family: str) -> None:
    model = of_three_layers(family)
    taken, composed = both(model)
    one, other = (filled(model, QUEST, 20) for _ in range(2))
    for count in (9, 3, 40):  # until windows of 32 tokens are full, and have moved on in their memory
        assert torch.equal(take_all(taken, [one], count), torch.stack(generated(composed, [other], count)))
        assert torch.equal(torch.stack(generated(composed, [one], 2)), torch.stack(generated(taken, [other], 2)))
        assert_alike(one, other)
        one.mark()
        first = take_all(taken, [one], 70)
        one.rewind()
        assert torch.equal(first, take_all(taken, [one], 70))
        one.rewind()
        assert_alike_windows(one, other)
        one.restart_stats()
        other.restart_stats()


@settings(max_examples=25, deadline=None)
@given(
    head_dim=st.sampled_from([8, 16, 24, 64]), kv_heads=st.integers(1, 3), group=st.integers(1, 5),
    hidden=st.sampled_from([8, 40, 64]), inter=st.sampled_from([8, 56, 96]), length=st.integers(1, 700),
    level=st.sampled_from(native.levels() if native.available() else [""]), plan=st.sampled_from(PLANS),
    tied=st.booleans(), threads=st.integers(1, 3), bf16=st.booleans(), place=st.sampled_from(PLACES),
)  # fmt: skip
def test_shapes(
    head_dim: int, kv_heads: int, group: int, hidden: int, inter: int, length: int, level: str, plan: str, tied: bool,
    threads: int, bf16: bool, place: str,
) -> None:  # fmt: skip
    before, number = native.level(), torch.get_num_threads()
    model = tiny(
        "Qwen3", hidden_size=hidden, intermediate_size=inter, num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=tied,
    ).to(torch.bfloat16 if bf16 else torch.float32)  # fmt: skip
    taken, composed = both(model)
    try:
        native.use_level(level)
        torch.set_num_threads(threads)
        one, other = (filled(model, plan, length, place=place) for _ in range(2))
        found, expected = generated(taken, [one], 4), generated(composed, [other], 4)
        assert is_taken(taken, one)
    finally:
        native.use_level(before)
        torch.set_num_threads(number)
    for logits, same in zip(found, expected, strict=True):
        assert torch.equal(bits(logits), bits(same))
    assert_alike(one, other)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [1100, 2200, 4200])  # one task per KV head, of one block or two; several tasks
def test_sketches_of_long_contexts_are_ranked_in_blocks(length: int, threads: int) -> None:
    model, number = tiny(num_key_value_heads=1).to(torch.bfloat16), torch.get_num_threads()
    taken, composed = both(model)
    one, other = (filled(model, f"{SKETCH}:dense_layers=none", length) for _ in range(2))
    try:
        torch.set_num_threads(threads)
        assert torch.equal(bits(take_all(taken, [one], 3)), bits(torch.stack(generated(composed, [other], 3))))
    finally:
        torch.set_num_threads(number)
    assert_alike(one, other)


@pytest.mark.parametrize("threads", [1, 3])  # one task per KV head, or several
@pytest.mark.parametrize("place", PLACES)
def test_votes_are_compared_with_sinks_and_window_of_each_head(place: str, threads: int) -> None:
    model, number = tiny(num_key_value_heads=1).to(torch.bfloat16), torch.get_num_threads()
    for layer in model.model.layers:  # heads that share a list, of logits from small to large
        queries = layer.self_attn.q_proj.weight.unflatten(0, (model.config.num_attention_heads, -1))
        queries.data.mul_(torch.tensor([1.0, 10.0, 40.0, 3.0])[: len(queries), None, None])
    taken, composed = both(model)
    one, other, unlike = (filled(model, f"{SKETCH}:dense_layers=none", 4200, place=place) for _ in range(3))
    try:
        torch.set_num_threads(threads)
        found = take_all(taken, [one], 3)
        assert torch.equal(bits(found), bits(torch.stack(generated(composed, [other], 3))))
        with patch.object(selection, "past_lse", lambda shape, *_: torch.zeros(shape.num_query_heads, 1)):
            wrong = torch.stack(generated(composed, [unlike], 3))
    finally:
        torch.set_num_threads(number)
    assert_alike(one, other)
    assert not torch.equal(found[0], wrong[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["Qwen2", "Mixtral", "Gemma3"])
def test_sequences_of_several_plans_in_one_native_step_have_the_bits_that_each_has_alone(
    family: str, dtype: torch.dtype
) -> None:
    model = of_three_layers(family).to(dtype)
    taken, _ = both(model)
    lengths = [600, 70, 15, 130, 500, 77, 20, 190]
    places = [PLACES[number % 2] for number in range(len(lengths))]
    alone, together = (
        [filled(model, plan, length, 0, length, place) for plan, length, place in zip(PLANS, lengths, places)]
        for _ in range(2)
    )
    found = generated(taken, together, 6)
    for number, cache in enumerate(alone):
        with torch.inference_mode():
            token = torch.tensor([5 + number])
            for logits in found:
                own = taken.decode(token, [cache])
                assert torch.equal(bits(own[0]), bits(logits[number]))
                token = own[:, 0].argmax(-1)
        assert_alike(together[number], cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", [QUEST, f"{SKETCH}:dense_layers=none", f"{SKETCH}:heads=query:bits=2:dense_layers=1"])
@pytest.mark.parametrize("place", PLACES)
def test_steps_are_probed_as_composed_ones(place: str, plan: str, dtype: torch.dtype) -> None:
    model = of_three_layers("Gemma3" if place == PLACES[0] else "Llama").to(dtype)
    taken, composed = both(model)
    one, other = (filled(model, plan, 90, probe_every=4, place=place) for _ in range(2))
    found = take_all(taken, [one], 10)
    assert torch.equal(bits(found), bits(torch.stack(generated(composed, [other], 10))))
    assert_alike(one, other)
    assert one.stats.tallies[one.attentions[-1].shape.layer, "decode"].probes == 3
    assert one.stats.probe_s > 0


@pytest.mark.parametrize("plan", [QUEST, SKETCH])
def test_a_guard_widens_a_budget_as_in_composed_steps(plan: str) -> None:
    model = tiny(num_hidden_layers=3)
    taken, composed = both(model)
    one, other = (filled(model, f"{plan}:min_recovery=0.999", 200, probe_every=4) for _ in range(2))
    found = take_all(taken, [one], 12)
    assert torch.equal(bits(found), bits(torch.stack(generated(composed, [other], 12))))
    assert_alike(one, other)
    assert one.stats.widenings == other.stats.widenings
    assert [each.after for each in one.stats.widenings] == ["budget=96", "budget=192", "dense"]


def test_a_sequence_goes_on_after_its_last_tokens_are_undone_and_its_plan_is_changed() -> None:
    model = tiny().to(torch.bfloat16)
    taken, composed = both(model)
    one, other = (filled(model, "dense", 90) for _ in range(2))
    for model_pass, cache in ((taken, one), (composed, other)):
        generated(model_pass, [cache], 9)
        cache.undo(93)
        cache.replan(f"{QUEST}:dense_layers=none")
    found, expected = generated(taken, [one], 9), generated(composed, [other], 9)
    assert is_taken(taken, one)
    assert torch.equal(bits(torch.stack(found)), bits(torch.stack(expected)))
    assert_alike(one, other)


def verified(model_pass: ForwardPass, cache: SparseCache, tokens: list[int], together: int) -> torch.Tensor:
    """Logits of tokens that are attended to everything, so many in a pass; none is composed if some are native."""
    cache.run.feeding, cache.run.exact = "decode", "dense"
    passes, composed = torch.tensor(tokens).split(together), Mock(side_effect=AssertionError)
    with (
        torch.inference_mode(),
        nullcontext() if model_pass.native is None else patch.object(model_pass, "_run", composed),
    ):
        logits = torch.cat([model_pass.verify(each, cache) for each in passes])
    cache.run.exact = ""
    return logits


@pytest.mark.parametrize(("case", "of"), in_turns(product(VERIFIED, DTYPES), UNDOABLE), ids=str)
def test_verifications_have_the_bits_of_composed_ones_and_of_dense_steps(
    case: tuple[str, torch.dtype], of: tuple[str, str]
) -> None:
    (plan, dtype), (family, place) = case, of
    model = of_three_layers(family).to(dtype)
    taken, composed = both(model)
    one, other, alone = (filled(model, plan, 90, place=place) for _ in range(3))
    for cycle in range(3):
        tokens = [7 + cycle, 30, 11, 52, 4, 18, 25, 40][: 8 - 3 * cycle]
        kept = len(tokens) - cycle
        for model_pass, cache in ((taken, one), (composed, other)):  # drafts
            start = cache.get_seq_length()
            generated(model_pass, [cache], 3)
            cache.undo(start)
        found, expected = verified(taken, one, tokens, 8), verified(composed, other, tokens, 8)
        assert torch.equal(bits(found), bits(expected))
        assert torch.equal(bits(found), bits(verified(composed, alone, tokens, 1)))
        assert_alike(one, other)
        for cache in (one, other, alone):
            cache.undo(start + kept)
    assert is_taken(taken, one)


@settings(max_examples=25, deadline=None)
@given(
    head_dim=st.sampled_from([8, 24, 64]), kv_heads=st.integers(1, 3), group=st.integers(1, 9),
    length=st.integers(1, 700), counts=st.lists(st.integers(1, 8), min_size=1, max_size=3), threads=st.integers(1, 3),
    level=st.sampled_from(native.levels() if native.available() else [""]), bf16=st.booleans(),
    place=st.sampled_from(PLACES),
)  # fmt: skip
def test_shapes_of_verifications(
    head_dim: int, kv_heads: int, group: int, length: int, counts: list[int], threads: int, level: str, bf16: bool,
    place: str,
) -> None:  # fmt: skip
    before, number = native.level(), torch.get_num_threads()
    model = tiny(
        "Qwen3", num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, head_dim=head_dim
    ).to(torch.bfloat16 if bf16 else torch.float32)  # fmt: skip
    taken, composed = both(model)
    try:
        native.use_level(level)
        torch.set_num_threads(threads)
        one, other = (filled(model, QUEST, length, place=place) for _ in range(2))
        for count in counts:
            tokens = [*range(5, 5 + count)]
            assert torch.equal(bits(verified(taken, one, tokens, count)), bits(verified(composed, other, tokens, 1)))
    finally:
        native.use_level(before)
        torch.set_num_threads(number)
    for own, expected in zip(one.attentions, other.attentions, strict=True):
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(own.rows(0), expected.rows(0), strict=True))


def test_verified_tokens_whose_keys_are_cut_otherwise_have_the_bits_of_dense_steps() -> None:
    model = tiny(num_attention_heads=16, num_key_value_heads=16, head_dim=8, num_hidden_layers=1)
    taken, composed = both(model)
    one, other = (filled(model, "dense", 2045) for _ in range(2))  # pieces get longer after 2,048 tokens of 16 heads
    tokens = [5, 6, 7, 8, 9, 10]
    assert torch.equal(bits(verified(taken, one, tokens, 6)), bits(verified(composed, other, tokens, 1)))


def test_queries_that_are_not_finite_are_refused() -> None:
    model = tiny()
    taken, _ = both(model)
    cache = filled(model, f"{QUEST}:dense_layers=none", 90)
    assert is_taken(taken, cache)
    taken._step.layers[0].before_attention[0].fill_(torch.nan)
    with refused("not_finite: NaN or infinity"):
        generated(taken, [cache], 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_visible_keys_that_are_not_finite_are_refused_where_votes_are_compared_with_them(threads: int) -> None:
    model, number = tiny(num_key_value_heads=1), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for model_pass in both(model):
            cache = filled(model, f"{SKETCH}:dense_layers=none", 4200)
            with torch.inference_mode():
                cache.attentions[-1].store.pool.keys[:, 0, 0] = torch.nan  # of the first sink
            with refused("not_finite: NaN or infinity"):
                generated(model_pass, [cache], 1)
    finally:
        torch.set_num_threads(number)


def test_layers_that_reuse_selections_of_others_are_composed(tmp_path: Path) -> None:
    model = tiny(num_hidden_layers=3)
    origin = filled(model, SKETCH, 9).attentions[0].shape.origin
    assert origin is not None
    file = tmp_path / "anchors.json"
    write(file, AnchorMap.of(origin, (0, 1), {2: Reuse(1, (0, 1), 0.9)}, (), {}))
    plan = f"{SKETCH}:dense_layers=none:anchors={file}"
    taken, composed = both(model)
    one, other = (filled(model, plan, 90) for _ in range(2))
    assert "anchors.json" in (reason(one, NativeStep.of_caches) or "")
    found, expected = generated(taken, [one], 3), generated(composed, [other], 3)
    assert torch.equal(bits(torch.stack(found)), bits(torch.stack(expected)))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("sketch:budget=64:window=8", "page being filled compete"),
        ("sketch:budget=64:window=30:page_size=24", "does not read"),
        ("quest:budget=64:window=8:score_by=mean_std", "kind"),
        ("quest:mass=0.9", "different lengths"),
        ("quest:budget=64:layer_budgets=pyramid:window=8", "of their own"),
        ("quest:budget=64:window=0", "window=0"),
        ("streaming_llm:budget=64:positions=cache", "numbers tokens anew"),
        ("h2o:budget=64:window=8", "observes|not in pages|drops"),
    ],
)
def test_what_the_step_does_not_take_is_composed_and_why_is_said(plan: str, why: str) -> None:
    model = tiny(num_hidden_layers=3)
    taken, composed = both(model)
    one, other = (filled(model, plan, 90) for _ in range(2))
    said = reason(one, NativeStep.of_caches)
    assert said is not None
    assert any(word in said for word in why.split("|")), said
    found, expected = generated(taken, [one], 3), generated(composed, [other], 3)
    assert torch.equal(bits(torch.stack(found)), bits(torch.stack(expected)))
