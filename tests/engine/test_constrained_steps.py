"""Steps that choose tokens themselves answer under grammars, penalties and biases as composed ones do; on a CPU they
run without graphs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.apart import DEVICES
from engine.loop_sequences import alone, new_loop, together, tokens
from engine.test_grammars import PERSON, drawn_schema, fault_in
from engine.test_hybrid_steps import FAMILIES, SKETCH
from engine.tiny_directory import text_of, write_model
from refusals import refused
from turns import in_turns

from kvsift import LLM, Grammar, Sampling
from kvsift.api.answer import Answer
from kvsift.engine.graphs import sequence_groups
from kvsift.engine.graphs.session import Session
from kvsift.engine.graphs.slots import CapturedStep, Slots, StepKind
from kvsift.engine.options import GenerateOptions
from kvsift.engine.sampling import ConstrainedChooser

QUEST = "quest:budget=64:window=16:dense_layers=0"
EXACT = "sketch:budget=80:sinks=4:window=16:dense_layers=none"
TEXTS = [text_of(300), text_of(90), text_of(210)[::-1], text_of(150), text_of(45)]
SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=5, frequency_penalty=0.6, presence_penalty=-0.2),
    Sampling(repetition_penalty=1.4, logit_bias={70: 2.5, 90: -30.0}),
    Sampling(0.8, top_p=0.9, top_k=40, min_p=0.01, seed=2, repetition_penalty=1.2),
    Sampling(1.2, seed=9),
]
GRAMMARS = [Grammar.json(PERSON), Grammar.regex("[a-f ]{3,30}[.]"), Grammar.json(drawn_schema(random.Random(3)))]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    """Steps run where their model is."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    return write_model(folder, "Qwen3", hidden_size=128, head_dim=64, num_hidden_layers=3)


def models(directory: Path, device: str, **options: Any) -> tuple[LLM, LLM]:
    """With steps that choose tokens, and with composed ones."""
    fast = "eager" if device == "cpu" else "captured"
    settings = {"device": device, "dtype": "float32", "dense_below": 0, "chunk_size": 64, **options}
    return tuple(LLM(directory, QUEST, path=path, **settings) for path in (fast, "composed"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def both(directory: Path, device: str) -> tuple[LLM, LLM]:
    return models(directory, device)


@pytest.fixture(scope="module")
def exact(directory: Path, device: str) -> LLM:
    return models(directory, device, deterministic=True)[0]


def told(answers: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.token_ids, answer.finish_reason) for answer in answers]


@pytest.mark.parametrize("plan", [QUEST, "dense"])
def test_a_batch_under_penalties_and_biases_answers_as_composed_steps_do(both: tuple[LLM, LLM], plan: str) -> None:
    """Beside sequences without, which answer as ever."""
    fast, slow = (llm.generate(TEXTS, plan=plan, max_new_tokens=40, sampling=SAMPLINGS) for llm in both)
    assert {answer.path for answer in fast} <= {"eager", "captured"}
    assert told(fast) == told(slow)
    free = both[0].generate(TEXTS[::4], plan=plan, max_new_tokens=40, sampling=SAMPLINGS[::4])
    assert told(free) == told(fast[::4])


@pytest.mark.parametrize(("plan", "number"), [(QUEST, 0), ("dense", 1), (QUEST, 2)])
def test_a_batch_under_a_grammar_answers_as_composed_steps_do(both: tuple[LLM, LLM], plan: str, number: int) -> None:
    options: dict[str, Any] = {"plan": plan, "max_new_tokens": 60, "sampling": SAMPLINGS, "grammar": GRAMMARS[number]}
    fast, slow = (llm.generate(TEXTS, **options) for llm in both)
    assert {answer.path for answer in fast} <= {"eager", "captured"}
    assert told(fast) == told(slow)
    assert any(answer.finish_reason == "stop" for answer in fast)


def test_layers_without_pages_keep_their_states_under_a_grammar(device: str, tmp_path: Path) -> None:
    """Linear attention: sequences that end change the slots of others while a pass is launched ahead."""
    both = models(write_model(tmp_path, "Qwen3_5", **FAMILIES["Qwen3_5"]), device)
    options: dict[str, Any] = {"max_new_tokens": 40, "sampling": SAMPLINGS, "grammar": GRAMMARS[1]}
    fast, slow = (llm.generate(TEXTS, plan=SKETCH, **options) for llm in both)
    assert {answer.path for answer in fast} <= {"eager", "captured"}
    assert told(fast) == told(slow)
    assert len({len(answer.token_ids) for answer in fast}) > 1


def test_samples_have_masks_of_their_own(both: tuple[LLM, LLM]) -> None:
    colours = ["red", "green", "dark red"]
    options: dict[str, Any] = {"n": 6, "grammar": Grammar.choice(colours), "sampling": Sampling(1.5, seed=3)}
    fast, slow = (llm.generate("Colour:", **options) for llm in both)
    assert told(fast) == told(slow)
    assert len({answer.text for answer in fast}) > 1
    assert {answer.text for answer in fast} <= {*colours}


def test_documents_answer_under_grammars_and_penalties(both: tuple[LLM, LLM]) -> None:
    for options in ({"grammar": Grammar.json(PERSON)}, {"sampling": SAMPLINGS[3]}):
        fast, slow = (llm.read(TEXTS[0]).ask("Who?", max_new_tokens=30, **options) for llm in both)
        assert told([fast]) == told([slow])


def test_drawn_answers_are_valid_under_generated_schemas(both: tuple[LLM, LLM]) -> None:
    faults = []
    for seed in range(6):
        schema = drawn_schema(random.Random(seed))
        answer = both[0].generate(
            f"Record {seed}:", grammar=Grammar.json(schema), sampling=Sampling(1.0, seed=seed), max_new_tokens=150
        )
        faults.append(fault_in(answer, schema))
    assert not list(filter(None, faults))


def test_others_take_plain_steps_again_once_the_constrained_one_has_ended(
    both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, run = list[bool](), Slots.run

    def noted(slots: Slots, kind: StepKind, number: int) -> CapturedStep:
        kinds.append(kind.constrained)
        return run(slots, kind, number)

    monkeypatch.setattr(Slots, "run", noted)
    monkeypatch.setattr(sequence_groups, "MOVE_STEPS", 1)
    llm, constrained = both[0], Sampling(presence_penalty=1.0)
    new_loop(llm)
    # the constrained one is short and read second: while a long one was read, a GPU would decode all of the others
    cases = [(TEXTS[0], QUEST, 160), (TEXTS[1], QUEST, 8, constrained), (TEXTS[2], QUEST, 48)]
    seqs = together(llm, cases)
    assert [len(tokens(seq)) for seq in seqs] == [160, 8, 48]
    assert 7 <= sum(kinds) < 12
    assert not any(kinds[-8:])
    assert tokens(seqs[0]) == tokens(alone(llm, *cases[0]))


@pytest.mark.usefixtures("eager_pace")
@pytest.mark.parametrize(("grammar", "sampling"), in_turns([None, *GRAMMARS[:2]], SAMPLINGS[1:4])[:4])
def test_exact_answers_are_those_of_dense_decoding(exact: LLM, grammar: Grammar | None, sampling: Sampling) -> None:
    options: dict[str, Any] = {"sampling": sampling, "grammar": grammar, "max_new_tokens": 40}
    dense, drafted = (
        exact.generate(TEXTS[0], **{"plan": "dense", **options, **how}) for how in ({}, {"plan": EXACT, "exact": True})
    )
    assert told([drafted]) == told([dense])
    assert drafted.path == dense.path == exact.fast_path.name
    assert drafted.exact["drafted"] + drafted.exact["repeated"] > 0
    together = exact.generate(TEXTS[:3], plan=EXACT, exact=True, **options)
    assert told(together[:1]) == told([dense])


@pytest.mark.usefixtures("eager_pace")
def test_drafts_come_true_under_masks_and_penalties(exact: LLM) -> None:
    """They are chosen from the same logits as by the verification, under the same constraints."""
    whole = "quest:budget=4096:dense_layers=none"
    sampling = Sampling(1.0, seed=1, frequency_penalty=0.7, repetition_penalty=1.3)
    grammar = Grammar.regex("[a-z ]{60,90}[.]")
    answer = exact.generate(TEXTS[0], plan=whole, exact=True, sampling=sampling, grammar=grammar, max_new_tokens=60)
    assert answer.exact["drafts_wrong"] == 0
    assert answer.exact["drafts_accepted"] > 20


def test_deterministic_answers_are_those_of_composed_steps(exact: LLM, both: tuple[LLM, LLM]) -> None:
    for plan in ("dense", QUEST):
        options: dict[str, Any] = {"plan": plan, "sampling": SAMPLINGS, "max_new_tokens": 30, "grammar": GRAMMARS[1]}
        assert told(exact.generate(TEXTS, **options)) == told(both[1].generate(TEXTS, **options))
        assert told(exact.generate(TEXTS[:1], **{**options, "sampling": SAMPLINGS[0]})) == told(
            both[1].generate(TEXTS[:1], **{**options, "sampling": SAMPLINGS[0]})
        )


def test_slots_that_repeat_a_token_feed_what_the_first_has_chosen(
    directory: Path, device: str, both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bits depend on the number of rows, a step of one token has as many as a block of several."""
    monkeypatch.setattr(Session, "keeps_bits", False)
    blocks = models(directory, device, deterministic=True)[0]
    options: dict[str, Any] = {"plan": "dense", "sampling": SAMPLINGS, "max_new_tokens": 30, "grammar": GRAMMARS[1]}
    assert told(blocks.generate(TEXTS, **options)) == told(both[1].generate(TEXTS, **options))


def test_masks_follow_drafts_that_may_come(both: tuple[LLM, LLM]) -> None:
    llm = both[0]
    tokens = [llm.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abz"]
    options = llm.request([0], llm.plan, GenerateOptions(max_new_tokens=9, grammar=Grammar.regex("ab|ba")))
    chooser = options.chooser(torch.device("cpu"))
    assert isinstance(chooser, ConstrainedChooser)

    def may(drafts: list[int]) -> list[bool]:
        bits = chooser.mask(drafts, 259)
        assert bits is not None
        return [bool(int(bits[token // 32]) >> token % 32 & 1) for token in tokens]

    a, b, z = tokens
    assert may([]) == [True, True, False]
    assert may([a]) == [False, True, False]
    assert may([b]) == [True, False, False]
    assert may([z, a]) == may([]), "what follows a draft that may not come is any"
    assert chooser(a) == a
    assert may([]) == [False, True, False]


def test_a_grammar_that_fails_ends_its_answer_alone(both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    mask = ConstrainedChooser.mask

    def failing(chooser: ConstrainedChooser, drafts: Any, vocabulary: int) -> Any:
        if chooser.sampling.seed == 7 and chooser._length > 12:
            raise ValueError("it fails")
        return mask(chooser, drafts, vocabulary)

    monkeypatch.setattr(ConstrainedChooser, "mask", failing)
    options: dict[str, Any] = {"grammar": GRAMMARS[1], "max_new_tokens": 30}
    with pytest.raises(ValueError, match="it fails"):
        both[0].generate(TEXTS[:2], sampling=[Sampling(1.0, seed=7), Sampling()], **options)
    assert told(both[0].generate(TEXTS[:2], **options)) == told(both[1].generate(TEXTS[:2], **options))


def test_what_keeps_probabilities_is_refused_as_before(both: tuple[LLM, LLM]) -> None:
    with refused("conflict: probabilities"):
        both[0].generate(TEXTS[0], logprobs=1, grammar=GRAMMARS[0])
