"""Plans: how they are spelt, what they refuse and how they say it."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from kvsift.errors import InputError
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.methods import catalogue, method_class
from kvsift.methods.base import Phase
from kvsift.methods.critiprefill import CritiPrefill
from kvsift.methods.dense import Dense
from kvsift.methods.infllm import InfLLM
from kvsift.methods.oracle import OraclePages, OracleTokens
from kvsift.methods.pages import SummaryMethod
from kvsift.methods.quest import Quest
from kvsift.methods.quoka import QuoKA
from kvsift.methods.random import Random
from kvsift.methods.sample_attention import SampleAttention
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan

QUEST = Plan(decode=Rule(Quest(), Budget(tokens=1024)))


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        (None, Plan()),
        ("dense", Plan()),
        ("quest", QUEST),
        ("quest:budget=1024", QUEST),
        (" quest : budget = 1024 ", QUEST),
        ("decode=quest", QUEST),
        ("decode=quest:budget=1024,prefill=dense", Plan(prefill=Rule(Dense()), decode=Rule(Quest()))),
        ({"method": "quest", "budget": 1024}, QUEST),
        ({"decode": {"method": "quest"}}, QUEST),
        ({"decode": "quest:budget=1024", "prefill": None}, QUEST),
        ({"decode": Rule(Quest())}, QUEST),
        ({"decode": Quest()}, QUEST),
        (Rule(Quest()), QUEST),
        (Quest(), QUEST),
        (CritiPrefill(), parse_plan("critiprefill")),  # of prefill, with a budget of its own
        (InfLLM(), parse_plan("infllm")),
        (Dense(), Plan()),
        (QUEST, QUEST),
        ("both=streaming_llm:budget=64", Plan(*2 * [Rule(StreamingLLM(), Budget(tokens=64))])),
        ({"both": {"method": "oracle_tokens"}}, Plan(Rule(OracleTokens()), Rule(OracleTokens()))),
        ("both=dense", Plan(Rule(Dense()), Rule(Dense()))),
        ("quest:ratio=0.1", Plan(decode=Rule(Quest(), Budget(ratio=0.1)))),
        ("quest:mass=0.9:budget=2048", Plan(decode=Rule(Quest(), Budget(mass=0.9, tokens=2048)))),
        ("quest:page_size=32:score_by=mean_std", Plan(decode=Rule(Quest(page_size=32, score_by="mean_std")))),
        ("quest:prefilter=4", Plan(decode=Rule(Quest(prefilter=4)))),
        ("quest:score_by=minmax_fp8", Plan(decode=Rule(Quest(score_by="minmax_fp8")))),
        ("quest:dense_layers=none", Plan(decode=Rule(Quest(), Budget(dense_layers=())))),
        ("quest:dense_layers=3", Plan(decode=Rule(Quest(), Budget(dense_layers=(3,))))),
        ("quest:dense_layers=0+1+27", Plan(decode=Rule(Quest(), Budget(dense_layers=(0, 1, 27))))),
        ({"method": "quest", "dense_layers": 3}, Plan(decode=Rule(Quest(), Budget(dense_layers=(3,))))),
        ({"method": "quest", "dense_layers": [0, 3]}, Plan(decode=Rule(Quest(), Budget(dense_layers=(0, 3))))),
        ("quest:compat=paper", Plan(decode=Rule(Quest(compat="paper"), Budget(sinks=0, window=0)))),
        ("quest:compat=code", Plan(decode=Rule(Quest(compat="code"), Budget(sinks=0, window=1)))),
        ("quest:compat=code:window=16", Plan(decode=Rule(Quest(compat="code"), Budget(sinks=0, window=16)))),
        (
            "prefill=quoka:budget=1024:chunk=512,decode=quest:budget=1024",
            Plan(Rule(QuoKA(chunk=512), Budget(tokens=1024)), Rule(Quest())),
        ),
        ("prefill=quoka:chunk=4096:prefilter=8", Plan(prefill=Rule(QuoKA(chunk=4096, prefilter=8)))),
        ("critiprefill", Plan(prefill=Rule(CritiPrefill(), Budget(dense_layers=(0,))))),
        (
            "critiprefill:fusion=false:dense_layers=none",
            Plan(prefill=Rule(CritiPrefill(fusion=False), Budget(dense_layers=()))),
        ),
        ({"method": "critiprefill", "fusion": True}, Plan(prefill=Rule(CritiPrefill(), Budget(dense_layers=(0,))))),
        ("sample_attention:compat=paper", Plan(prefill=Rule(SampleAttention(compat="paper"), Budget(mass=0.95)))),
        (
            "sample_attention:compat=paper:budget=512",
            Plan(prefill=Rule(SampleAttention(compat="paper"), Budget(tokens=512))),
        ),
        (
            "prefill=streaming_llm:budget=4096,decode=quest",
            Plan(prefill=Rule(StreamingLLM(), Budget(tokens=4096)), decode=Rule(Quest())),
        ),
    ],
    ids=str,
)
def test_a_plan_reads_the_same_in_every_spelling(spec: Any, plan: Plan) -> None:
    assert parse_plan(spec) == plan


@dataclass(frozen=True)
class PrefillOnly(OracleTokens):
    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)


def test_a_bare_method_goes_to_decode_if_it_can_and_to_prefill_if_not() -> None:
    assert parse_plan("oracle_tokens").prefill is None
    rule = Rule(PrefillOnly())
    assert parse_plan(rule) == Plan(prefill=rule)


@pytest.mark.parametrize(
    "spec",
    [
        {"method": 5},
        {"method": "quest", "dense_layers": 1.5},
        {"method": "quest", "dense_layers": None},
        {"method": "quest", "score_by": 5},
        {"method": "quest", "heads": ["kv"]},
        "quest:dense_layers=²",  # a digit that is no number
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused_like_any_other(spec: Any) -> None:
    with pytest.raises(InputError):
        parse_plan(spec)


def test_a_budget_that_can_never_select_in_prefill_is_refused() -> None:
    """What the others of a segment see of it comes on top of the budget; sinks and window of the first do not."""
    with refused("invalid_value: window=64"):
        parse_plan("prefill=oracle_tokens:budget=68:sinks=4:window=64")
    assert parse_plan("prefill=oracle_tokens:budget=69:sinks=4:window=64").prefill is not None


@dataclass(frozen=True)
class PagesInPrefill(SummaryMethod):
    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")


def test_two_sizes_of_summarised_pages_are_refused() -> None:
    prefill = Rule(PagesInPrefill(page_size=32))
    with refused("unsupported_plan"):
        Plan(prefill=prefill, decode=Rule(Quest()))
    assert Plan(prefill=prefill, decode=Rule(Quest(page_size=32))).page_size == 32
    assert Plan(prefill=Rule(OraclePages(page_size=8)), decode=Rule(Quest())).page_size == 16  # oracles keep none


PIECES = ["quest", "dense", "decode", "prefill", "budget", "mass", "dense_layers", "compat", "paper", "window", "none"]
PIECES += ["=", ":", ",", "+", " ", "1024", "0.5", "0+1", "-3", "nan", "0"]


@settings(max_examples=300)
@given(text=st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_a_plan_or_is_refused(text: str) -> None:
    try:
        plan = parse_plan(text)
    except InputError:
        return
    assert parse_plan(str(plan)) == plan


@st.composite
def rules(draw: st.DrawFn, phase: Phase) -> Rule:
    knobs: dict[str, st.SearchStrategy[Any]] = {
        "heads": st.sampled_from(["auto", "query", "kv"]),
        "page_size": st.just(16),
        "score_by": st.sampled_from(list(SUMMARIES)),
        "compat": st.sampled_from([None, "paper", "code"]),
        "prefilter": st.sampled_from([0, 1, 2.5]),
        "block_pages": st.sampled_from([2, 16]),
        "chunk": st.integers(16, 4096),
        "segment": st.integers(16, 4096),
        "block": st.sampled_from([16, 32, 64]),
        "mode": st.sampled_from(["shared", "paired_sorted", "max_of_mean_exact"]),
        "score": st.sampled_from(["cosine", "dot"]),
        "reduce": st.sampled_from(["max", "mean"]),
        "estimator": st.sampled_from(["code", "paper", "bound"]),
        "fusion": st.booleans(),
        "scaled": st.booleans(),
        "weight_current": st.floats(0, 1),
        **dict.fromkeys(["queries", "channels", "rank", "correction"], st.integers(1, 99)),
        "seed": st.integers(0, 2**40),
        "index": st.sampled_from(["auto", "flat"]),  # the others need what may not be installed, or a beam
        "per": st.sampled_from(["kv_head", "query_head"]),
        "samples": st.integers(2, 9999),
        "degree": st.integers(4, 64),
        "beam": st.none(),
        "audit": st.integers(0, 999),
        "representatives": st.integers(1, 16),
        "local": st.integers(4096, 9999),
        "positions": st.just("absolute"),
        **dict.fromkeys(["mean_value", "second_copy", "full_choice", "rest"], st.booleans()),
        **dict.fromkeys(["recent_fraction", "partial"], st.floats(0, 1)),
        "alpha": st.floats(0.1, 9),
        "anchors": st.none(),
        "calibration": st.none(),
        "axes": st.just("after_rope"),
        "evict": st.just(phase == "decode"),
        "recent": st.floats(0, 1),
        "kernel": st.sampled_from([1, 5, 7]),
        "pooling": st.sampled_from(["avg", "max"]),
        "bits": st.integers(1, 2),
        "tables": st.integers(2, 99),
        **dict.fromkeys(["parts", "iterations"], st.integers(1, 9)),
    }
    able = [name for name in catalogue() if phase in method_class(name).phases]
    name = draw(st.sampled_from(able))
    cls = method_class(name)
    chosen = {field.name: draw(knobs[field.name]) for field in fields(cls) if draw(st.booleans())}
    if "positions" in chosen:
        chosen["positions"] = draw(st.sampled_from(["absolute", "cache" if name == "streaming_llm" else "remapped"]))
    if name == "infllm":
        chosen |= {"chunk": draw(st.sampled_from([128, 512])), "compat": draw(st.sampled_from(["code", "paper"]))}
    if name == "h2o":
        chosen |= {"mode": draw(st.sampled_from(["online", "oneshot", *(["decode_only"] * (phase == "decode"))]))}
    if name == "snapkv":
        chosen |= {"heads": "kv" if chosen.get("evict") else draw(st.sampled_from(["query", "kv"]))}
    if name == "retrieval_attention":
        chosen |= {
            "heads": draw(st.sampled_from(["query", "kv"])),
            "compat": None,
            "block": draw(st.sampled_from([0, 64])) if chosen.get("index", "auto") in ("auto", "graph") else 0,
        }
    if chosen.get("compat") and name != "infllm":
        only = {"sample_attention": "paper", "infinigen": "code"}
        chosen = {"compat": only.get(name, chosen["compat"])}
    if chosen.get("prefilter") and issubclass(cls, SummaryMethod):
        chosen["score_by"] = draw(st.sampled_from(["minmax", "minmax_fp8"]))
    if not chosen.get("prefilter"):
        chosen.pop("block_pages", None)
    if not chosen.get("fusion", True):
        chosen.pop("weight_current", None)
    method = cls(**chosen)
    if method.traits.unbounded:
        return Rule(method)
    sizes = [{"tokens": draw(st.integers(2000, 2**31))}, {"ratio": draw(st.floats(1e-9, 1))}]
    if method.traits.estimates_mass and phase == "decode":
        sizes += [{"mass": draw(st.floats(1e-9, 1))}, {"mass": 0.9, "tokens": 2000}, {"mass": 0.9, "ratio": 0.5}]
    budget = draw(st.sampled_from(sizes)) | {
        "min_context": draw(st.integers(0, 9999)),
        "dense_layers": tuple(draw(st.lists(st.integers(0, 99), max_size=4))),
        "sinks": draw(st.integers(0, 99)),
    }
    if "mass" not in budget:
        shares = method.traits.compares_heads and not method.evict
        budget["layer_budgets"] = draw(st.sampled_from(["equal", "pyramid"]))
        budget["head_budgets"] = draw(st.sampled_from(["equal", "adaptive"] if shares else ["equal"]))
    if phase == "decode" and not method.evict and (method.traits.keeps_all or not method.traits.selects):
        budget["min_recovery"] = draw(st.one_of(st.none(), st.floats(1e-9, 1)))
    if method.traits.selects:
        budget["window"] = draw(st.integers(phase == "prefill", 999))
    return Rule(method, Budget(**budget))


@settings(max_examples=150)
@given(data=st.data())
def test_a_plan_is_what_it_prints(data: st.DataObject) -> None:
    prefill = data.draw(st.one_of(st.none(), rules("prefill")))
    decode = data.draw(st.one_of(st.none(), rules("decode")))
    plan = Plan(prefill, decode)
    assert parse_plan(str(plan)) == plan
    for rule in plan.rules:
        phase = "decode" if rule is plan.decode else "prefill"
        assert parse_plan({phase: str(rule)}).rule(phase) == rule  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "dense"),
        (QUEST, "quest:budget=1024"),
        (Plan(decode=Rule(Random(seed=3), Budget(ratio=0.1))), "random:ratio=0.1:seed=3"),
        (Plan(prefill=Rule(StreamingLLM())), "prefill=streaming_llm:budget=1024"),
        (Plan(prefill=Rule(CritiPrefill())), "critiprefill:budget=1024:dense_layers=0+1"),
        (
            Plan(Rule(StreamingLLM(), Budget(tokens=4096)), Rule(Quest(compat="code"), Budget(sinks=0, window=1))),
            "prefill=streaming_llm:budget=4096,decode=quest:budget=1024:heads=query:compat=code",
        ),
        (Plan(*2 * [Rule(StreamingLLM(), Budget(tokens=64))]), "both=streaming_llm:budget=64"),
        (Plan(decode=Rule(Quest(), Budget(dense_layers=(), min_context=9))),
         "quest:budget=1024:dense_layers=none:min_context=9"),
    ],
    ids=str,
)  # fmt: skip
def test_plans_print_what_differs_from_the_defaults(plan: Plan, text: str) -> None:
    assert str(plan) == text


def test_layers_that_a_model_lacks_are_refused_with_the_number_that_it_has() -> None:
    with refused("invalid_value: dense_layers=99 names no layer of the model: it has 30, counted from 0. Give 29 or"):
        parse_plan("quest:dense_layers=99").check_layers(range(30))
    for spec in ("quest:dense_layers=29", "quest:dense_layers=none", "magicpig", "dense"):
        parse_plan(spec).check_layers(range(30))


def test_a_kind_of_summary_that_is_not_known_is_refused() -> None:
    class Misspelt(SummaryMethod):
        summaries: ClassVar[tuple[str, ...]] = ("mean_sdt",)

    with refused("unknown_name: in Misspelt.summaries 'mean_sdt'; did you mean 'mean_std'?"):
        Rule(Misspelt())


def test_a_plan_knows_what_it_needs() -> None:
    assert QUEST.page_size == 16
    assert QUEST.summaries == ("minmax",)
    both = Plan(Rule(PagesInPrefill(score_by="log_mass")), Rule(Quest()))
    assert both.summaries == ("log_mass", "minmax")
    assert Plan(Rule(PagesInPrefill()), Rule(Quest())).summaries == ("minmax",)
    assert Plan(decode=Rule(OraclePages(page_size=8))).page_size == 8
    assert Plan(decode=Rule(OracleTokens())).page_size is None  # any will do
