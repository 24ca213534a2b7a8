"""Sequences of the loop: what each answers, counts and leaves behind is what it would alone, bit for bit on a CPU."""

import os
import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.loop_sequences import new_loop
from engine.tiny_directory import text_of, write_model
from refusals import refused
from torch import Tensor

from kvsift import LLM, InputError, Sampling
from kvsift.engine import pauses, schedule
from kvsift.engine.executor import Executor
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence, FinishReason
from kvsift.engine.transcript import Transcript
from kvsift.methods import catalogue, method_class
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.native_step import NativeSequence
from kvsift.plan.syntax import parse_plan
from kvsift.stores.kv_pool import LayerPool

GRID = 64
SMALL = "budget=80:sinks=4:window=16:dense_layers=none"
PLANS = [
    "dense",
    f"sketch:{SMALL}",
    f"quest:{SMALL}:page_size=16",
    "quest:budget=128:window=32:dense_layers=1",
    f"prefill=quoka:{SMALL},decode=sketch:{SMALL}",
    f"snapkv:{SMALL}:evict=true",
    f"both=h2o:{SMALL}:evict=true",
    f"retrieval_attention:{SMALL}:index=flat",
    f"retrieval_attention:{SMALL}:index=graph:block=96:beam=9",
    f"oracle_tokens:{SMALL}:min_recovery=0.9",
]
KNOBS = {"retrieval_attention": ":index=flat", "infllm": ":block=16:chunk=32", "critiprefill": ":block=16:segment=32"}
BLOCKS = [
    "index=graph:block=64:beam=9",  # narrow: what is found depends on the graph
    "index=graph:block=100:beam=9:audit=4",
    "index=graph:block=128:heads=kv:per=query_head:audit=0",
    "index=auto:block=192",
    "index=flat_int8",
    *(("index=hnsw", "index=ivf") if find_spec("faiss") else ()),
]
HISTORIES = int(20 * float(os.environ.get("KVSIFT_EXAMPLES", "1")))


class Recorded:
    """An output that takes the likeliest token and remembers the logits."""

    constraint = None

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.logits, self.tokens, self.num_prefilled = num_tokens, [], [], 0
        self.logits: list[Tensor]
        self.tokens: list[int]

    def note_prefilled(self, num_tokens: int) -> None:
        self.num_prefilled = num_tokens

    def take(self, logits: Tensor, probe_s: float) -> tuple[int, FinishReason]:
        self.logits.append(logits.clone())
        self.tokens.append(int(logits.argmax()))
        return self.tokens[-1], "length" if len(self.tokens) == self.num_tokens else ""


def new_llm(directory: Path, **options: Any) -> LLM:
    return LLM(directory, "dense", device="cpu", chunk_size=GRID, dtype="float32", probe_every=3, **options)


def new_sequence(llm: LLM, text: str, plan: str, num_tokens: int = 6, **asked: Any) -> EngineSequence:
    ids = llm.tokenizer(text)["input_ids"]
    return EngineSequence(Request(ids, num_tokens, parse_plan(plan), **asked), Recorded(num_tokens))


def finish(llm: LLM, seqs: Sequence[EngineSequence], after_step: Callable[[], object] = lambda: None) -> None:
    """Take steps until these sequences have ended, and check what the loop counts after each."""
    while not all(seq.is_ended for seq in seqs):
        llm.loop.step()
        llm.loop.check()
        after_step()


def run(llm: LLM, *seqs: EngineSequence) -> EngineSequence:
    for seq in seqs:
        llm.loop.submit(seq)
    finish(llm, seqs)
    for seq in seqs:
        llm.loop.close(seq)
    return seqs[-1]


def assert_equal(seq: EngineSequence, alone: EngineSequence) -> None:
    """Both gave the same tokens, logits and decode counters; ``seq`` may have ended before."""
    assert seq.error is None
    count = len(seq.output.tokens)
    assert seq.output.tokens == alone.output.tokens[:count]
    assert all(torch.equal(one, other) for one, other in zip(seq.output.logits, alone.output.logits))
    if count == len(alone.output.tokens):
        assert counters(seq) == counters(alone)


def counters(seq: EngineSequence) -> dict[str, Any]:
    report = seq.report.stats.report()
    return {key: value for key, value in report["phases"]["decode"].items() if key != "select_s"} | {
        "guard": report["guard"]
    }


@pytest.mark.parametrize("plan", PLANS[::2])
def test_a_prompt_that_pauses_between_layers_changes_no_bit_and_keeps_others_going(
    plan: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = text_of(100), text_of(250)
    alone = [run(llm := new_llm(llama), new_sequence(llm, text, plan, 40)) for text in texts]
    monkeypatch.setattr(pauses, "PAUSE_S", 0.0)
    llm, gained = new_llm(llama), []
    first, second = (new_sequence(llm, text, plan, 40) for text in texts)
    llm.loop.submit(first)
    while len(first.output.tokens) < 2:
        llm.loop.step()
    llm.loop.submit(second)
    llm.loop.after_step = lambda: gained.append(len(first.output.tokens))
    while second.state != "decoding":
        llm.loop.step()
    assert len(set(gained)) > 3
    assert sorted(gained) == gained, "a token each time"
    run_on(llm, first, second)
    for seq, expected in zip((first, second), alone):
        assert_equal(seq, expected)


def test_a_failure_in_a_pause_ends_the_sequence_that_fails(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(llm := new_llm(llama), new_sequence(llm, text_of(250), PLANS[2]))
    monkeypatch.setattr(pauses, "PAUSE_S", 0.0)
    llm = new_llm(llama)
    first, second = new_sequence(llm, text_of(100), PLANS[2], 40), new_sequence(llm, text_of(250), PLANS[2])
    llm.loop.submit(first)
    while len(first.output.tokens) < 2:
        llm.loop.step()
    llm.loop.submit(second)

    def take(*args: object) -> None:
        raise ValueError("in the middle of a chunk")

    monkeypatch.setattr(first.output, "take", take)
    run_on(llm, first, second)
    assert (first.finish_reason, str(first.error)) == ("error", "in the middle of a chunk")
    assert_equal(second, alone)
    assert llm.loop.pages.kv.pages.num_used == 0


def run_on(llm: LLM, *seqs: EngineSequence) -> None:
    finish(llm, seqs)
    for seq in seqs:
        llm.loop.close(seq)


def test_histories_of_joining_cancelling_and_failing_change_no_other_sequence(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text_of(length) for length in (70, 199, 260)] + [text_of(260)[:180] + "?"]  # two share a prefix
    llm = new_llm(llama)
    alone = {(text, plan): run(llm, new_sequence(llm, text, plan, 8)) for text in texts for plan in PLANS}
    for seed in range(HISTORIES):
        rng, llm = random.Random(seed), new_llm(llama)
        monkeypatch.setattr(pauses, "PAUSE_S", rng.choice([0.0, 1.0]))
        monkeypatch.setattr(schedule, "PLACED_STEPS", rng.choice([1, 4, 16]))
        new_loop(llm, max_seqs=rng.choice([1, 2, 5, 9]), keep_tokens=rng.choice([0, 999]))
        coming = [rng.choice(list(alone)) for _ in range(rng.randint(2, 7))]
        seqs: list[tuple[EngineSequence, tuple[str, str]]] = []
        while coming or not all(seq.is_ended for seq, _ in seqs):
            if coming and rng.random() < 0.4:
                key = coming.pop()
                seqs.append((new_sequence(llm, *key, rng.randint(1, 8), client=rng.choice("ab")), key))
                llm.loop.submit(seqs[-1][0])
            if seqs and rng.random() < 0.06:
                rng.choice([llm.loop.cancel, llm.loop.close])(rng.choice(seqs)[0])
            llm.loop.step()
            llm.loop.check()
        for seq, key in seqs:
            assert seq.finish_reason in ("length", "cancelled"), seed
            assert_equal(seq, alone[key])
            llm.loop.close(seq)
        llm.loop.check()
        assert llm.loop.pages.kv.pages.num_used <= 999 // 16


def _plans_of_the_catalogue() -> list[str]:
    plans = ["dense"]
    for name in catalogue():
        for phase in method_class(name).phases:
            knobs = KNOBS.get(name, "")
            budget = "" if method_class(name)().traits.unbounded else f":{SMALL}"
            if not method_class(name)().traits.selects and budget:
                budget = ":budget=40:dense_layers=none"
            plans.append(f"{phase}={name}{knobs}{budget}")
    return plans + [f"retrieval_attention:{SMALL}:{knobs}" for knobs in BLOCKS]


@pytest.mark.parametrize("plan", _plans_of_the_catalogue())
def test_reuse_changes_no_bit(plan: str, llama: Path) -> None:
    text = text_of(4 * GRID + 30)
    first = new_llm(llama)
    alone = run(first, new_sequence(first, text, plan))
    llm = new_llm(llama)
    new_loop(llm, keep_tokens=10_000)
    other = run(llm, new_sequence(llm, text[: 2 * GRID + 9] + "!" * GRID, plan))  # two chunks in common
    again, once_more = (run(llm, new_sequence(llm, text, plan)) for _ in range(2))
    for seq in (again, once_more):
        assert_equal(seq, alone)
    assert other.num_reused == 0
    reason = parse_plan(plan).not_shared
    assert (again.num_reused, once_more.num_reused) == ((0, 0) if reason else (2 * GRID, 4 * GRID))
    assert again.no_reuse == (reason or "")


def test_clients_with_other_salts_share_nothing(llama: Path) -> None:
    llm = new_llm(llama)
    new_loop(llm, keep_tokens=10_000)
    one, other = (run(llm, new_sequence(llm, text_of(200), "dense", salt=salt)) for salt in ("", "another client's"))
    assert_equal(other, one)
    assert other.num_reused == 0


def test_pages_that_another_plan_has_read_get_the_summaries_that_they_lack(llama: Path) -> None:
    text, plans = text_of(4 * GRID + 30), PLANS[:4]
    alone = [run(llm := new_llm(llama), new_sequence(llm, text, plan)) for plan in plans]
    llm = new_llm(llama)
    new_loop(llm, keep_tokens=10_000)
    for plan, expected in [*zip(plans, alone), *zip(plans, alone)]:
        seq = run(llm, new_sequence(llm, text, plan))
        assert_equal(seq, expected)
    assert seq.num_reused == 4 * GRID
    dense_prompt = run(llm, new_sequence(llm, text, f"prefill=quoka:{SMALL},decode=sketch:{SMALL}"))
    assert dense_prompt.num_reused == 0, "keys of another prefill rule are others"


def test_plans_that_share_nothing_say_why(llama: Path) -> None:
    llm = new_llm(llama)
    for plan, reason in [
        (f"both=h2o:{SMALL}:evict=true", "h2o drops tokens for good"),
        (f"snapkv:{SMALL}", "snapkv"),
        (
            f"retrieval_attention:{SMALL}",
            "retrieval_attention learns from the queries of the whole prompt; with block=",
        ),
        (f"quest:{SMALL}:page_size=8", "its pages have 8 tokens, and those that are shared 16"),
    ]:
        assert reason in llm.generate(text_of(100), plan=plan, max_new_tokens=2).no_reuse
    assert llm.generate(text_of(100), plan=f"sketch:{SMALL}", max_new_tokens=2).no_reuse == ""


@pytest.mark.parametrize("placement", ["split", "offload", "host", "host:kv_dtype=int8", "device:kv_dtype=int8"])
def test_sequences_wherever_their_keys_are(placement: str, llama: Path) -> None:
    llm, plan = new_llm(llama, placement=placement, keep_tokens=10_000), f"sketch:{SMALL}"
    alone = [
        run(other := new_llm(llama, placement=placement), new_sequence(other, text_of(n), plan)) for n in (300, 170)
    ]
    seqs = [new_sequence(llm, text_of(n), plan) for n in (300, 170)]
    run(llm, *seqs)
    for seq, expected in zip([*seqs, run(llm, new_sequence(llm, text_of(300), plan))], [*alone, alone[0]]):
        assert_equal(seq, expected)
        assert ("host memory" in seq.no_reuse) == (placement in ("split", "offload"))


def _failing(victim: EngineSequence, layer: int, length: int, error: BaseException) -> Callable[..., Tensor]:
    attend = SparseLayer.attend_new

    def fail(self: SparseLayer, *args: Any) -> Tensor:
        output = attend(self, *args)  # what was stored has to be taken back
        cache = victim.cache
        if cache is not None and self.run is cache.run and self.layer == layer and self.columns >= length:
            raise error
        return output

    return fail


def _failing_native(victim: EngineSequence, length: int, error: BaseException) -> Callable[..., None]:
    begin = NativeSequence.begin

    def fail(self: NativeSequence, *args: Any) -> None:
        if victim.cache is not None and self.run is victim.cache.run and self.start + 1 >= length:
            raise error
        begin(self, *args)

    return fail


@pytest.mark.parametrize("plan", PLANS[:3])
@pytest.mark.parametrize("tokens", [-40, 3])
def test_who_raises_ends_alone(plan: str, tokens: int, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text_of(length) for length in (150, 170, 130)]
    alone = [run(llm := new_llm(llama), new_sequence(llm, text, plan)) for text in texts]
    llm = new_llm(llama)
    seqs = [new_sequence(llm, text, plan) for text in texts]
    length = len(seqs[1].request.ids) + tokens  # in the prompt, or in the answer
    broken = ValueError("a broken method")
    monkeypatch.setattr(SparseLayer, "attend_new", _failing(seqs[1], 1, length, broken))
    monkeypatch.setattr(NativeSequence, "begin", _failing_native(seqs[1], length, broken))
    run(llm, *seqs)
    assert (seqs[1].finish_reason, str(seqs[1].error)) == ("error", "a broken method")
    assert len(seqs[1].output.tokens) == max(tokens, 0)
    for index in (0, 2):
        assert_equal(seqs[index], alone[index])
    assert llm.loop.pages.kv.pages.num_used == 0


def test_an_error_reaches_the_one_who_asked(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm(llama)
    llm.generate("a", max_new_tokens=1)  # attaches to the model
    monkeypatch.setattr(SparseLayer, "attend_new", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([text_of(100), text_of(120)], max_new_tokens=3)
    monkeypatch.undo()
    assert llm.loop.seqs == []
    assert llm.generate(text_of(100), max_new_tokens=3).token_ids


def test_a_chunk_without_memory_is_read_once_old_prompts_are_gone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, plan = text_of(300), f"sketch:{SMALL}"
    alone = run(llm := new_llm(llama), new_sequence(llm, text, plan))
    llm = new_llm(llama)
    new_loop(llm, keep_tokens=10_000)
    run(llm, new_sequence(llm, text_of(400)[::-1], plan))
    assert len(llm.loop.pages.tree) == 6
    prefill, failures = llm.feed, [torch.OutOfMemoryError("no memory")]

    def short_of_memory(cache: Any, ids: Sequence[int], *args: Any, **options: Any) -> Any:
        logits = prefill(cache, ids, *args, **options)
        if failures and cache.get_seq_length() > 2 * GRID:
            raise failures.pop()
        return logits

    monkeypatch.setattr(llm, "feed", short_of_memory)
    assert_equal(run(llm, new_sequence(llm, text, plan)), alone)
    assert not failures
    llm = new_llm(llama)
    monkeypatch.setattr(llm, "feed", lambda *args, **options: (_ for _ in ()).throw(MemoryError("none at all")))
    seq = run(llm, new_sequence(llm, text, plan))
    assert (seq.finish_reason, str(seq.error)) == ("error", "none at all")


def test_a_request_for_which_there_will_never_be_memory_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = new_llm(llama)
    monkeypatch.setattr(Executor, "room", lambda executor, kv: 20)
    small, large = new_sequence(llm, text_of(100), "dense"), new_sequence(llm, text_of(500), "dense")
    run(llm, large, small)
    assert small.finish_reason == "length"
    assert isinstance(large.error, InputError)
    assert "501 tokens" in str(large.error)
    assert "memory for 320" in str(large.error)


@pytest.mark.parametrize("plan", [f"sketch:{SMALL}", f"both=h2o:{SMALL}:evict=true"])
def test_a_sequence_ends_at_its_deadline(plan: str, llama: Path) -> None:
    llm = new_llm(llama)
    now = [0.0]
    llm.loop.clock = lambda: now[0]
    text, seqs = text_of(300), []
    for deadline in (1.0, 4.0, 20.0):  # while it waits, while it is read, while it decodes
        seqs.append(new_sequence(llm, text, plan, 50, deadline=deadline))
        llm.loop.submit(seqs[-1])
    now[0] = 1.0
    finish(llm, seqs, lambda: now.__setitem__(0, now[0] + 1))
    assert [seq.finish_reason for seq in seqs] == ["deadline"] * 3
    assert seqs[0].num_cached == 0 < seqs[1].num_cached < len(seqs[1].request.ids)
    assert 0 < len(seqs[2].output.tokens) < 50


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_prompts_of_one_call_share_what_they_begin_with(max_new_tokens: int, llama: Path) -> None:
    llm, text = new_llm(llama), text_of(200)
    answers = llm.generate([text, text + " And?", text + " Now?"], max_new_tokens=max_new_tokens)
    assert [answer.new_prompt_tokens for answer in answers] == [201, *[206 - 3 * GRID] * 2]
    assert llm.loop.pages.kv.pages.num_used == 0, "nothing stays when the answers are there"


@torch.inference_mode()
def test_log_probabilities_are_those_of_the_model(llama: Path) -> None:
    llm = new_llm(llama)
    answer = llm.generate(text_of(100), max_new_tokens=3, logprobs=2)
    ids = llm.tokenizer(text_of(100))["input_ids"]
    logits = llm.model(torch.tensor([[*ids, *answer.token_ids[:2]]])).logits[0, -3:].double().log_softmax(-1)
    for token, each, expected in zip(answer.token_ids, answer.logprobs, logits):
        assert each.token == token == each.top[0][0]
        torch.testing.assert_close(each.logprob, float(expected[token]), rtol=0, atol=1e-4)
        assert [token for token, _ in each.top] == expected.topk(2).indices.tolist()
    with refused("invalid_value: logprobs=21"):
        llm.generate("a", logprobs=21)
    with refused("conflict"):
        LLM(llama, path="eager").generate(text_of(100), logprobs=0, max_new_tokens=2)


def test_a_timeout_ends_an_answer_as_it_is(llama: Path) -> None:
    llm = new_llm(llama)
    llm.load()
    answer = llm.generate(text_of(3500), timeout_s=0.01)  # while it is read
    assert (answer.finish_reason, answer.text, answer.token_ids) == ("deadline", "", [])
    assert answer.ttft_s > 0
    transcript = Transcript(Request([1], 9, stops=("z",), deadline=5.0), llm.tokenizer)
    for time, done in ((4.9, False), (5.0, True)):
        transcript.take(30, time)
        assert transcript.done == done
    assert (transcript.finish_reason, len(transcript.new_ids)) == ("deadline", 2)
    for wrong in (0, -1):
        with refused(f"invalid_value: timeout_s={wrong}"):
            new_llm(llama).generate("a", timeout_s=wrong)


def test_samples_of_one_prompt_have_seeds_of_their_own(llama: Path) -> None:
    llm, sampling = new_llm(llama), Sampling(temperature=1.0, seed=7)
    samples = llm.generate(text_of(200), n=3, sampling=sampling, max_new_tokens=5)
    expected = [llm.generate(text_of(200), sampling=sampling.nth(number), max_new_tokens=5) for number in range(3)]
    assert len({tuple(each.token_ids) for each in expected}) == 3
    assert [each.token_ids for each in samples] == [each.token_ids for each in expected]
    assert [each.new_prompt_tokens for each in samples] == [201, 201 - 3 * GRID, 201 - 3 * GRID]
    with refused("conflict: n=3"):
        llm.generate("a", n=3)
    with refused("conflict"):
        llm.generate(["a", "b"], n=3, sampling=sampling)
    with refused("invalid_value: n=0"):
        llm.generate("a", n=0, sampling=sampling)


def test_prompts_stay_for_later_calls_where_they_are_to_be_kept(llama: Path) -> None:
    llm = new_llm(llama, keep_tokens=4 * GRID)
    first = llm.generate(text_of(300), max_new_tokens=4)
    again = llm.generate(text_of(300), max_new_tokens=4)
    assert again.token_ids == first.token_ids
    assert (first.new_prompt_tokens, again.new_prompt_tokens) == (301, 301 - 4 * GRID)
    llm.generate(text_of(400)[::-1], max_new_tokens=4)
    assert len(llm.loop.pages.tree) == 4, "no more than that"
    with refused("invalid_value: keep_tokens=-1"):
        new_llm(llama, keep_tokens=-1)


@pytest.mark.parametrize("path", ["auto", "composed"])
@pytest.mark.parametrize(("family", "dtype"), [("Llama", "float32"), ("Qwen2", "float32"), ("Llama", "float16")])
def test_decoding_together_changes_no_bit(
    path: str, family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, texts = write_model(tmp_path, family), [text_of(n) for n in (90, 170, 130)]
    llm = LLM(directory, "dense", path=path, device="cpu", dtype=dtype, chunk_size=GRID)
    alone = [run(llm, new_sequence(llm, text, PLANS[1], 64)) for text in texts]
    seqs, groups = [new_sequence(llm, text, PLANS[1], 64) for text in texts], []
    decode = Executor.decode_sequences
    monkeypatch.setattr(
        Executor, "decode_sequences", lambda executor, seqs: groups.append(len(seqs)) or decode(executor, seqs)
    )
    run(llm, *seqs)
    for seq, expected in zip(seqs, alone):
        assert_equal(seq, expected)
    # how many, depends on the time that the others' prompts take beside them
    assert (max(groups) > 1) == (path == "auto" and dtype == "float32")


def let_no_pool_grow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory beside that of the loop's pool."""
    fit, present = LayerPool.fit, next(iter(llm.loop.pages.kv.layers.values())).keys.shape[1]

    def short_of_memory(pool: LayerPool, exactly: bool = False, spare: int = 0) -> None:
        if pool.pages.num_pages > present:
            raise torch.OutOfMemoryError("no memory")
        fit(pool, exactly, spare)

    monkeypatch.setattr(LayerPool, "fit", short_of_memory)


def test_memory_that_was_reserved_in_vain_does_not_fail_the_others(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = new_llm(llama)
    expected = run(other := new_llm(llama), new_sequence(other, text_of(200), PLANS[1], 40))
    running, large = new_sequence(llm, text_of(200), PLANS[1], 40), new_sequence(llm, text_of(900), "dense")
    llm.loop.submit(running)
    while running.state != "decoding":
        llm.loop.step()
    let_no_pool_grow(llm, monkeypatch)
    llm.loop.submit(large)
    finish(llm, [running, large])
    assert str(large.error) == "no memory"
    assert_equal(running, expected)


def test_kept_prompts_make_room_where_there_is_less_memory_than_it_seemed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, text = new_llm(llama, keep_tokens=10_000), text_of(600)
    expected = new_llm(llama).generate(text[::-1], max_new_tokens=8).token_ids
    llm.generate(text, max_new_tokens=8)
    held = llm.generate(text[:300], max_new_tokens=8)
    let_no_pool_grow(llm, monkeypatch)
    assert llm.generate(text[::-1], max_new_tokens=8).token_ids == expected
    llm.loop.check()
    assert llm.generate(text[:300], max_new_tokens=8).token_ids == held.token_ids


def test_text_that_was_held_back_is_streamed_at_a_deadline(llama: Path) -> None:
    tokenizer = new_llm(llama).tokenizer
    transcript = Transcript(Request([1], 9, stops=("zzz",), streamed=True), tokenizer)
    text = "".join(transcript.take(token, 0.0) for token in tokenizer("abz")["input_ids"][1:])
    assert (text, transcript.end("deadline")) == ("ab", "z")
    assert (transcript.end("stop"), transcript.finish_reason) == ("", "deadline")


def test_what_is_shared_is_reserved_once_and_what_was_answered_makes_room(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = new_llm(llama)
    pages = 50  # for one of these prompts, not for two
    monkeypatch.setattr(Executor, "room", lambda executor, kv: pages - llm.loop.pages.kv.pages.num_pages)
    texts = [text_of(600), text_of(610)[::-1], text_of(620)]
    assert [len(answer.token_ids) for answer in llm.generate(texts, max_new_tokens=4)] == [4, 4, 4]
    chat = llm.chat(text_of(560))
    for question in ("Which mill?", "How many sacks?", "Why?"):
        chat.ask(question, max_new_tokens=4)
    with refused("not_enough_memory"):
        llm.generate(text_of(600)[::-1], max_new_tokens=4)
    del chat
    assert llm.generate(text_of(600)[::-1], max_new_tokens=4).token_ids
    assert llm.loop.pages.kv.pages.num_pages <= pages


def test_so_few_tokens_cannot_be_kept(llama: Path) -> None:
    with refused(f"invalid_value: chunk_size={GRID}"):
        new_llm(llama, keep_tokens=30)
