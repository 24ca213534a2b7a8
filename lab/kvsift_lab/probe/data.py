"""Training rows for the embedded model, built by processes that run beside the training loop.

A row is a context with its questions and answers, exactly as prompt.py writes them; what is learned are the answers and
a little of the prose.
"""

import multiprocessing as mp
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from kvsift.texts import facts
from kvsift.texts.layout import Draft, lay_out
from kvsift.texts.prose import paragraphs
from kvsift.texts.words import DEFAULT, Lexicon
from kvsift.tokenization.prompt import answer_text
from kvsift_lab.eval.sample import Question, SampleRequest, Style
from kvsift_lab.eval.tasks import FAMILIES, TASKS
from kvsift_lab.probe.tokenizer import WordEncoder

PUBLISHED = (*FAMILIES["ruler"], *FAMILIES["infinite"])
KINDS = (*FAMILIES["own"], "mixed", *PUBLISHED)
PROSE = len(KINDS)  # the kind of a supervised token that is no answer
BOS, EOS, PAD = 0, 1, 2
TAIL = 224  # tokens of a row that a written context leaves for its question and answer
WRITTEN_WEIGHT = 4.0  # of their answers' tokens, which are few
FRAMED_SHARE = 0.3  # of the published tasks, asked in the package's own format


@dataclass(frozen=True)
class Batch:
    """BatchRows of one length, and the tokens to learn.

    Attributes:
        ids: int16 [num_rows, length].
        places: int32 [capacity], flat index of the token that predicts; targets: int16 [capacity], what it predicts.
        weights: float32 [capacity], 0 in unused entries; kinds: int8 [capacity], index into KINDS, or PROSE.
    """

    ids: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    kinds: np.ndarray


class BatchRows:
    """Makes rows; one per process."""

    def __init__(self, config: dict[str, Any], tokenizer_file: Path, rng: random.Random) -> None:
        self.config, self.rng = config["data"], rng
        self.mixture: dict[str, float] = self.config["mixture"]  # shares of the kinds; a stage may have its own
        self.encode = WordEncoder(Tokenizer.from_file(str(tokenizer_file)))
        self.encode_stock = lru_cache(maxsize=100_000)(self.encode)
        words = sorted({word for text in paragraphs() for word in re.findall(r"\b[a-z]{3,10}\b", text)})
        self.words = words
        self.lexicons = (DEFAULT, _wide_lexicon(words), _wild_lexicon(self.encode.vocabulary(), rng))
        self.code = _source_code()

    def row(self, length: int) -> tuple[list[int], list[tuple[int, float, int]]]:
        """Ids of one row, and (position of the token to learn, weight, kind) for each that counts."""
        rng, mixture = self.rng, self.mixture
        kind = rng.choices(list(mixture), list(mixture.values()))[0]
        if kind in TASKS and TASKS[kind].write:
            return self._written(kind, length)
        count = self._num_questions(kind, length)
        style = TASKS[kind].style if kind in TASKS else Style()
        while True:
            draft = self._draft(kind, count)
            asks = rng.sample(draft.questions, len(draft.questions))
            questions, answers = self._questions(
                kind, [style.question(ask.text, ask.answer, 0.0, ask.answers, ask.answer_prefix) for ask in asks]
            )
            room = length - len(questions) - 1
            try:
                layout = lay_out(draft, room, self.encode, self.encode_stock, rng, (BOS,))
                break
            except ValueError:  # too many for this length
                count = max(1, count // 2)
        ids = layout.ids[:room] + questions + [EOS]
        learned = [(room + i, 1.0, KINDS.index(kind)) for i in answers]
        learned.append((length - 1, 1.0, KINDS.index(kind)))
        if draft.is_stock:
            share, weight = self.config["prose_loss_share"], self.config["prose_loss_weight"]
            learned += [(i, weight, PROSE) for i in rng.sample(range(1, room), int(share * room))]
        return ids, learned

    def _written(self, kind: str, length: int) -> tuple[list[int], list[tuple[int, float, int]]]:
        """The same of a task that writes its context, and what it asks, to a length."""
        write = TASKS[kind].write
        assert write is not None
        sample = write(SampleRequest(self.rng, length - TAIL, 1, self.encode, (BOS,)))
        questions, answers = self._questions(kind, sample.questions)
        ids, start = [*sample.context_ids, *questions, EOS], len(sample.context_ids)
        assert len(ids) <= length, f"{kind}: a question of {len(questions)} tokens"
        learned = [(start + i, WRITTEN_WEIGHT, KINDS.index(kind)) for i in answers]
        return ids + [PAD] * (length - len(ids)), learned

    def _num_questions(self, kind: str, length: int) -> int:
        if self.rng.random() < self.config["few_questions_share"]:
            return self.rng.randint(1, 3)
        task = TASKS.get(kind, TASKS["facts"])
        most = min(self.config["max_questions"], 4 + length // (2 * task.tokens_per_question))
        return self.rng.randint(max(1, most // 2), most)

    def _draft(self, kind: str, count: int) -> Draft:
        draft = self._mixed(count) if kind == "mixed" else self._single(kind, count)
        if kind in PUBLISHED:
            return draft
        draw = self.rng.random()
        if draft.is_stock and draw < self.config["code_share"]:
            return replace(draft, filler=self._code_lines())
        if draft.is_stock and draw < self.config["code_share"] + self.config["scrambled_share"]:
            return replace(draft, filler=self._scrambled(draft.filler), is_stock=False)
        return draft

    def _single(self, kind: str, count: int) -> Draft:
        if kind == "facts":
            return facts.draft(self.rng, count, self.rng.choice(self.lexicons))
        draft = TASKS[kind].draft
        assert draft is not None
        if kind == "variables":
            return draft(self.rng, self.rng.randint(2, count + 2))  # a few chains, or many
        if kind == "vt" or kind.startswith("niah_"):  # one question each; several contexts in one make several
            return self._merged([draft(self.rng, 1) for _ in range(count)])
        return draft(self.rng, min(count, TASKS[kind].max_questions))

    def _mixed(self, count: int) -> Draft:
        """Several tasks in one context."""
        kinds = self.rng.sample([kind for kind in FAMILIES["own"] if kind != "key_value"], 3)
        return self._merged([self._single(kind, max(1, count // 3)) for kind in kinds])

    def _merged(self, drafts: list[Draft]) -> Draft:
        """Several drafts in one; the order of needles inside each is kept."""
        turns = [i for i, draft in enumerate(drafts) for _ in draft.needles]
        self.rng.shuffle(turns)
        needles, asks, seen = [], [], Counter[int]()
        for place, i in enumerate(turns):
            needles.append(drafts[i].needles[seen[i]])
            asks += [replace(ask, needle=place) for ask in drafts[i].questions if ask.needle == seen[i]]
            seen[i] += 1
        filler = next((draft for draft in drafts if draft.is_stock), drafts[0])
        return Draft(needles, asks, filler.filler, filler.is_stock, drafts[0].intro)

    def _questions(self, kind: str, questions: Sequence[Question]) -> tuple[list[int], list[int]]:
        """Ids of all questions with answers, and which of them are answers."""
        if kind in PUBLISHED and self.rng.random() < FRAMED_SHARE:
            questions = [question.framed() for question in questions]
        ids: list[int] = []
        answers: list[int] = []
        for i, question in enumerate(questions):
            # After an answer, whose newline is already there, one more separates the next question.
            ids += self.encode(question.tail[i > 0 and question.is_framed :])
            text = question.answer
            if kind == "cwe":  # numbered, as in the example before the list; in an order that can be learned
                text = " ".join(f"{place}. {word}" for place, word in enumerate(sorted(question.answers), 1))
            answer = self.encode(answer_text(text))
            answers += range(len(ids), len(ids) + len(answer))
            ids += answer
        return ids, answers

    def _code_lines(self) -> Iterator[str]:
        index = self.rng.randrange(len(self.code))
        while True:
            yield "\n" + self.code[index % len(self.code)]
            index += 1

    def _scrambled(self, filler: Iterator[str]) -> Iterator[str]:
        """Filler with many words exchanged, so that prose cannot be learned by heart."""
        share = self.rng.uniform(0.1, 0.6)
        lexicon = self.rng.choice(self.lexicons)
        pool = self.rng.choice((self.words, lexicon.nouns, lexicon.surnames))
        for piece in filler:
            words = piece.split(" ")
            yield " ".join(
                self.rng.choice(pool) if word.isalpha() and self.rng.random() < share else word for word in words
            )

    def batch(self, length: int, num_tokens: int, capacity: int) -> Batch:
        num_rows = num_tokens // length
        ids = np.empty((num_rows, length), np.int16)
        learned: list[tuple[int, float, int]] = []
        for r in range(num_rows):
            ids[r], marks = self.row(length)
            learned += [(r * length + place, weight, kind) for place, weight, kind in marks]
        if len(learned) > capacity:
            learned = self.rng.sample(learned, capacity)
        places, weights, kinds = (
            np.zeros(capacity, np.int32),
            np.zeros(capacity, np.float32),
            np.zeros(capacity, np.int8),
        )
        used = len(learned)
        positions, weights[:used], kinds[:used] = zip(*learned)
        places[:used] = np.array(positions) - 1
        return Batch(ids, places, ids.reshape(-1)[places + 1], weights, kinds)


def start_workers(
    config: dict[str, Any], tokenizer_file: Path, progress: "Synchronized[float]", rank: int = 0
) -> tuple["mp.Queue[Batch]", list[mp.Process]]:
    """Processes that fill a queue; they read from ``progress`` (0 to 1) which stage of the curriculum it is."""
    count = config["data"]["num_workers"]
    queue: mp.Queue[Batch] = mp.Queue(maxsize=2 * count)
    workers = [
        mp.Process(target=_work, args=(config, tokenizer_file, progress, queue, number), daemon=True)
        for number in range(rank * count, (rank + 1) * count)
    ]
    for worker in workers:
        worker.start()
    return queue, workers


def _work(
    config: dict[str, Any], tokenizer_file: Path, progress: "Synchronized[float]", queue: "mp.Queue[Batch]", number: int
) -> None:
    rows = BatchRows(config, tokenizer_file, random.Random(f"{config['data']['seed']}:{number}"))
    training = config["training"]
    while True:
        now = min(progress.value, 1 - 1e-9)
        stage = next(stage for stage in training["stages"] if now < stage["until"])
        lengths = stage["lengths"]
        length = int(rows.rng.choices(list(lengths), list(lengths.values()))[0])
        rows.mixture = stage.get("mixture", config["data"]["mixture"])
        queue.put(rows.batch(length, training["tokens_per_step"], training["supervised_per_step"]))


def _wide_lexicon(words: list[str]) -> Lexicon:
    """The default words and every plain lower-case word of the prose, so that any word may name something."""
    return replace(DEFAULT, adjectives=DEFAULT.adjectives + tuple(words), nouns=DEFAULT.nouns + tuple(words))


def _wild_lexicon(vocabulary: list[str], rng: random.Random) -> Lexicon:
    """Words glued from random tokens: to answer with them a model must copy, whatever it knows about spelling."""
    starts = [token[1:] for token in vocabulary if re.fullmatch(r" [a-z]+", token)]
    rests = [token for token in vocabulary if re.fullmatch(r"[a-z]{1,6}", token)]
    made = tuple(rng.choice(starts) + "".join(rng.choices(rests, k=rng.randint(1, 2))) for _ in range(4000))
    names = tuple(word.capitalize() for word in made)
    return Lexicon(made[:1500], made[1500:], names[:1000], names[1000:2500], names[2500:], *([made] * 4))


def _source_code() -> list[str]:
    """ASCII lines of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = (line.rstrip() for file in files for line in file.read_text("utf-8", "ignore").splitlines())
    return [line for line in lines if line.strip() and line.isascii() and len(line) < 200]
