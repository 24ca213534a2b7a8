"""kvsift as one attention implementation among transformers' own: by name, and behind its pipelines."""

import pytest
import torch
from models.tiny import CACHED, FAMILIES, SIZES, SPARSE, assert_sparse, greedy, logits, prompt, ragged, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

import kvsift


@pytest.mark.parametrize("family", FAMILIES)
def test_the_registered_attention_without_a_cache_of_ours_is_dense(family: str) -> None:
    model, batch = tiny(family), ragged(90, 61)
    real = batch["attention_mask"].bool()
    expected = logits(model, **batch)[real], logits(model, **batch, use_cache=False)[real], greedy(model, **batch)
    kvsift.register()
    kvsift.register()  # safe to repeat
    model.set_attn_implementation("kvsift")
    torch.testing.assert_close(logits(model, **batch)[real], expected[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits(model, **batch, use_cache=False)[real], expected[1], atol=2e-5, rtol=1e-4)
    assert torch.equal(greedy(model, **batch), expected[2])


@pytest.mark.parametrize("family", CACHED)
def test_a_model_made_with_our_attention_runs_sparsely_with_a_cache_of_ours(family: str) -> None:
    model = tiny(family)
    with kvsift.sparse(model, SPARSE) as run:
        expected = greedy(model, prompt())
    model.set_attn_implementation("kvsift")
    cache = kvsift.make_cache(model, SPARSE)
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)
    assert_sparse(cache.run)
    with kvsift.sparse(model, SPARSE) as run:
        assert torch.equal(greedy(model, prompt()), expected)
    assert_sparse(run)
    assert model.config._attn_implementation == "kvsift"


def test_a_model_is_loaded_with_our_attention_by_name(tmp_path: object) -> None:
    kvsift.register()
    model = tiny()
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="kvsift").eval()
    assert loaded.config._attn_implementation == "kvsift"
    assert torch.equal(greedy(loaded, prompt()), greedy(model, prompt()))
    configured = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="kvsift"))
    assert configured.config._attn_implementation == "kvsift"


def test_a_static_cache_under_our_attention_is_dense() -> None:
    model = tiny()
    expected = greedy(model, prompt(60))
    kvsift.register()
    model.set_attn_implementation("kvsift")
    assert torch.equal(greedy(model, prompt(60), cache_implementation="static"), expected)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w1 to w95 for tokens 1 to 95; 0 pads."""
    words = Tokenizer(WordLevel({"<pad>": 0} | {f"w{token}": token for token in range(1, 96)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="left")


def test_a_text_generation_pipeline_runs_sparsely(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [
        " ".join(f"w{token}" for token in prompt(n, seed=row)[0].tolist()) for row, n in enumerate((150, 121, 149))
    ]
    options = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}
    with kvsift.sparse(model, SPARSE) as run:
        expected = tokenizer.batch_decode(greedy(model, **ragged(150, 121, 149)), skip_special_tokens=True)
        run.stats.clear()
        together = [answer[0]["generated_text"].split() for answer in generate(texts, batch_size=3, **options)]
        one_by_one = [answer[0]["generated_text"].split() for answer in generate(texts, **options)]
    assert together == one_by_one == [text.split() for text in expected]
    assert_sparse(run)
