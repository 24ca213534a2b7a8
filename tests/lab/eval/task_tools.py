"""What the tests of tasks share: tokenizers that need no files."""

from kvsift_lab.eval.tasks import Sample, make_sample

BOS = 256  # beside the 256 bytes
LONG = 16384  # bytes: room for every task


def encode(text: str) -> list[int]:
    """One token per byte, so that depths and counts can be checked against the text."""
    return list(text.encode())


def encode_words(text: str) -> list[int]:
    """One token per word and one per separator: pieces of several characters, as in a real tokenizer."""
    return [hash(word) & 0xFFFF for part in text.split("\n") for word in part.split(" ")]


def sample(task: str, length: int = LONG, seed: int = 0, num_questions: int = 8) -> Sample:
    return make_sample(task, length, seed, encode, num_questions, prefix=(BOS,))
