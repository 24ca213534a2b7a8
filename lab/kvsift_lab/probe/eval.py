"""Dense exact match of a model directory through stock transformers.

    python -m kvsift_lab.probe.eval MODEL_DIR OUT.json

The context is prefilled once and every question follows it directly, on a copy of the cache. All questions of a context
run in one forward pass with their answers: each token of the answer must be the most likely one after those before it,
which is what greedy decoding checks. The hand-written facts are decoded token by token.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvsift.texts.prose import document
from kvsift.tokenization.prompt import answer_text, question_text
from kvsift_lab.eval.scorers import exact_match
from kvsift_lab.eval.tasks import FAMILIES, Question, make_sample, variables
from kvsift_lab.probe import phase
from kvsift_lab.probe.tokenizer import WordEncoder

# Written by hand, in wordings that are not among the templates of the facts task.
HAND_WRITTEN = [
    tuple(line.split(" | "))
    for line in """\
The access code of the north warehouse is 48213. | What is the access code of the north warehouse? | 48213
After a long debate the village elected Tilda Brandvold as its mayor. | Who was elected mayor? | Tilda Brandvold
Captain Orsino's parrot answers only to the name Biscuit. | What is the name of Captain Orsino's parrot? | Biscuit
The lighthouse at Skarn Point was switched off in 1963. | When was the lighthouse at Skarn Point switched off? | 1963
Our favourite bakery sells its rye bread for 7 crowns. | How much does the rye bread cost? | 7 crowns
The spare key lies under the blue flower pot. | What does the spare key lie under? | the blue flower pot
The secret ingredient of the soup is smoked paprika. | What is the secret ingredient of the soup? | smoked paprika
The meeting with the auditors takes place on Thursday. | When does the meeting with the auditors take place? | Thursday
The wifi password of the guest house is marmot77. | What is the wifi password of the guest house? | marmot77
The red suitcase weighs 23 kilograms. | How much does the red suitcase weigh? | 23 kilograms
Professor Elwood keeps his notes in a tin box. | Where does Professor Elwood keep his notes? | a tin box
The first violin was played by Marguerite Olin. | Who played the first violin? | Marguerite Olin
The train to Varnburg leaves from platform 9. | From which platform does the train to Varnburg leave? | 9
The ship that brought the tea was called Morning Star. | What was the ship that brought the tea called? | Morning Star
The combination of the safe is 31-07-55. | What is the combination of the safe? | 31-07-55
The capital of the island of Trell is Osmer. | What is the capital of the island of Trell? | Osmer
The backup server has the address 10.4.77.2. | What is the address of the backup server? | 10.4.77.2
The gardener planted 340 tulips behind the chapel. | How many tulips did the gardener plant? | 340
Invoice 7731 must be paid before 12 March. | When must invoice 7731 be paid? | 12 March
The password for the archive is velvet canyon. | What is the password for the archive? | velvet canyon""".splitlines()
]


@dataclass
class Score:
    correct: int = 0
    questions: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def add(self, is_correct: bool, question: Question) -> None:
        self.correct += is_correct
        self.questions += 1
        if not is_correct:
            self.wrong.append((question.text, question.answer))


class Judge:
    def __init__(self, directory: Path) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.encode = WordEncoder(Tokenizer.from_file(str(directory / "tokenizer.json")))
        self.stops = set(self.model.generation_config.eos_token_id)

    def prefill(self, ids: Sequence[int]) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        for chunk in torch.tensor([list(ids)], device=self.device).split(32768, dim=1):
            self.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def forced(self, cache: DynamicCache, questions: Sequence[Question]) -> list[bool]:
        """Whether each question would be answered right; grows and spoils the cache."""
        asked = [self.encode(question_text(q.text)) for q in questions]
        answers = [self.encode(answer_text(q.answer)) for q in questions]
        longest = max(len(a) + len(b) for a, b in zip(asked, answers))
        ids = [a + b + [0] * (longest - len(a) - len(b)) for a, b in zip(asked, answers)]
        cache.batch_repeat_interleave(len(questions))
        best = self.model(input_ids=torch.tensor(ids, device=self.device), past_key_values=cache).logits.argmax(-1)
        rows = best.tolist()
        return [rows[i][len(a) - 1 : len(a) - 1 + len(b)] == b for i, (a, b) in enumerate(zip(asked, answers))]

    def decoded(self, cache: DynamicCache, length: int, question: Question) -> str:
        """The answer token by token; the cache comes back as it was."""
        ids, out = self.encode(question_text(question.text)), []
        for _ in range(64):
            logits = self.model(input_ids=torch.tensor([ids], device=self.device), past_key_values=cache).logits
            ids = [int(logits[0, -1].argmax())]
            out += ids
            if ids[0] in self.stops:
                break
        cache.crop(length - cache.get_seq_length())  # negative: the number of tokens to drop
        return self.tokenizer.decode(out)


def evaluate_task(judge: Judge, task: str, length: int, evaluation: dict[str, Any]) -> tuple[Score, dict[int, Score]]:
    """The score, and the scores by number of hops for the variables task."""
    score, by_hops, seed = Score(), {hops: Score() for hops in range(1, variables.MAX_HOPS + 1)}, evaluation["seed"]
    wanted = evaluation["questions_per_task"]
    while score.questions < wanted:
        sample = make_sample(task, length, seed, judge.encode, evaluation["questions_per_context"], prefix=(0,))
        for question, is_right in zip(
            sample.questions, judge.forced(judge.prefill(sample.context_ids), sample.questions)
        ):
            score.add(is_right, question)
            if task == "variables":
                by_hops[variables.hops(question.text, sample.context)].add(is_right, question)
        seed += 1
    return score, by_hops


def evaluate_hand_written(judge: Judge, length: int) -> tuple[Score, int]:
    """Facts of HAND_WRITTEN in prose, decoded token by token; and how many decodings differ from the forced check."""
    depths = [(i + 0.5) / len(HAND_WRITTEN) for i in range(len(HAND_WRITTEN))]
    text = document([fact[0] for fact in HAND_WRITTEN], depths, length - 100, lambda piece: len(judge.encode(piece)))
    ids = [0, *judge.encode(text)]
    cache, score, answers = judge.prefill(ids), Score(), []
    questions = [Question(question, answer, depth) for (_, question, answer), depth in zip(HAND_WRITTEN, depths)]
    for question in questions:
        answers.append(judge.decoded(cache, len(ids), question))
        score.add(exact_match(answers[-1], question.answer), question)
        if not exact_match(answers[-1], question.answer):
            print(length, "hand-written:", question.text, repr(answers[-1]), flush=True)
    forced = judge.forced(cache, questions)
    return score, sum(f != exact_match(a, q.answer) for f, a, q in zip(forced, answers, questions))


def main(directory: Path, out: Path) -> None:
    evaluation = phase("5")["evaluation"]  # the same after each
    judge, results = Judge(directory), {}
    for length in evaluation["lengths"]:
        began = time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        for task in FAMILIES["own"]:
            score, by_hops = evaluate_task(judge, task, length, evaluation)
            found[task] = {"correct": score.correct, "questions": score.questions}
            if task == "variables":
                found[task]["by_hops"] = {str(h): [s.correct, s.questions] for h, s in by_hops.items()}
            print(length, task, score.correct, score.questions, score.wrong[:3], flush=True)
        hand, differing = evaluate_hand_written(judge, length)
        found["hand_written_facts"] = {"correct": hand.correct, "questions": hand.questions, "differing": differing}
        print(length, found["hand_written_facts"], f"{time.monotonic() - began:.1f} s", flush=True)
        results[str(length)] = found
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main(*map(Path, sys.argv[1:3]))
