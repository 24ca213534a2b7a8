"""The tokenizer of the embedded model: byte-level BPE with 4096 entries, every digit and every newline on its own.

python -m kvsift_lab.probe.tokenizer DIRECTORY      trains it and writes tokenizer.json and tokenizer_config.json
"""

import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvsift.texts.facts import facts
from kvsift.texts.prose import paragraphs
from kvsift_lab.eval.tasks import FAMILIES, make_sample

VOCABULARY = 4096
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
# A word with the space in front of it, one digit, punctuation, one newline, other space. Because no token crosses
# these bounds, text may be encoded in pieces that end at a bound (see WordEncoder).
PATTERN = r" ?[^\W\d_]+|\d| ?[^\s\w]+|_|\n|[^\S\n]+|\w"


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


class WordEncoder:
    """The same ids as the tokenizer, from a table of words: fast enough to feed training."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._split = re.compile(PATTERN).findall
        self._table: dict[str, list[int]] = {}

    def vocabulary(self) -> list[str]:
        """The text of every token."""
        return [self._tokenizer.decode([i]) for i in range(self._tokenizer.get_vocab_size())]

    def __call__(self, text: str) -> list[int]:
        table, ids = self._table, []
        for word in self._split(text):
            found = table.get(word)
            if found is None:
                found = self._tokenizer.encode(word, add_special_tokens=False).ids
                if len(table) < 200_000:
                    table[word] = found
            ids += found
        return ids


def save(tokenizer: Tokenizer, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(directory)


def _corpus() -> Iterator[str]:
    """Prose, and the tasks in about the share that English around them leaves."""
    yield from paragraphs()
    rng = random.Random(0)
    for _ in range(300):
        yield "\n".join(
            f"{f.statement}\n\nQuestion: {f.question}\nAnswer: {f.answer}\n" for f in islice(facts(rng), 20)
        )
    for task in FAMILIES["own"]:
        for seed in range(10):
            yield make_sample(task, 8192, -1 - seed, lambda text: list(text.encode())).context


if __name__ == "__main__":
    save(train(), Path(sys.argv[1]))
