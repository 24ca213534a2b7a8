"""Texts that share a prefix have the tokens that they have alone, whatever the tokenizer, and only ends are encoded."""

import random
from functools import cache
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvsift.cli.demo import make_document
from kvsift.models.embedded import embedded_model
from kvsift.tokenization.growing_text import GrowingText
from kvsift.tokenization.prompt import DocumentPrompts, PromptFormat

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDS = (
    "What?", "", "Where is it?\n\n\n", "  é\u0301 \U0001f600\u200d\U0001f680", "<|end|> and <|end", "x" * 3000,
    "a b\n" * 2000,
)  # fmt: skip
WITHOUT_WORDS = "no words"


@cache
def document() -> str:
    return make_document(8000)


def trained(name: str) -> Tokenizer:
    """A tokenizer of a kind, trained on the document."""
    if name == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=900, special_tokens=["<unk>", "<|end|>", "<s>"])
    elif name == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", "<|end|>", "<s>"], unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<|end|>", "<s>"], max_token_length=12)
        if name == WITHOUT_WORDS:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
            steps = [split] if name == "llama 3" else []
            level = pre_tokenizers.ByteLevel(add_prefix_space=name == "gpt 2", use_regex=name == "gpt 2")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
            tokenizer.decoder = decoders.ByteLevel()
    texts = document()[:4000].splitlines() if name == WITHOUT_WORDS else [document()]
    tokenizer.train_from_iterator([*texts, "é \U0001f600 <s>"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "<|end|>")]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["embedded", "gpt 2", "llama 3", "wordpiece", "unigram", WITHOUT_WORDS])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A tokenizer of transformers."""
    if request.param == "embedded":
        return AutoTokenizer.from_pretrained(embedded_model())
    fast = PreTrainedTokenizerFast(tokenizer_object=trained(request.param))
    fast.name_or_path = request.param
    return fast


class Recording:
    """A tokenizer that keeps the texts that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def __call__(self, *given: Any, **options: Any) -> Any:
        self.texts.append(given[-1])
        return self._tokenizer(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("special", [True, False])
def test_texts_have_their_own_tokens(tokenizer: Any, special: bool) -> None:
    recording = Recording(tokenizer)
    growing, draw = GrowingText(), random.Random(3)
    texts = [f"{document()}\n\nQuestion: {end}\nAnswer:" for end in ENDS]
    texts += [document() + "".join(draw.choices(document(), k=draw.randrange(400))) for _ in range(6)]
    grown = texts[0]
    for end in ENDS:  # turns of a conversation
        texts.append(grown := f"{grown} {end}\nQuestion: ")
    for text in texts:
        expected = tokenizer(text, add_special_tokens=special)["input_ids"]
        assert growing.encode(recording, text, special) == expected, text[-50:]
    encoded = [text for text in recording.texts if text in texts]
    if tokenizer.name_or_path == WITHOUT_WORDS:
        assert len(encoded) == len(texts)
    else:
        assert len(encoded) == 1, "of the others the end"


def test_texts_that_differ_early_and_short_ones_are_encoded_whole(tokenizer: Any) -> None:
    growing = GrowingText()
    for text in (document(), "Other " + document(), document()[:100], document()[:20_000], document(), ""):
        for special in (True, False):
            assert growing.encode(tokenizer, text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]


def test_questions_about_a_document_encode_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    form, questions = PromptFormat(tokenizer), ("What is the code?", "Who?")
    expected = [form.encode(document(), question) for question in questions]
    recording = Recording(type(tokenizer).__call__)
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *given, **options: recording(*given, **options))
    prompts = DocumentPrompts(form, document())
    assert [*map(prompts, questions)] == expected
    assert sum(len(text) >= 5000 for text in recording.texts) == 1
