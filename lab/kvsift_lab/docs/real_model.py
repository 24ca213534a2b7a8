"""Tables of a language model, SmolLM2-135M-Instruct, on ordinary texts: they open docs/quality.md, and the README has a
line of them beside its table of the embedded model."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from kvsift_lab import stored
from kvsift_lab.bench.report import commit_of
from kvsift_lab.docs import quality
from kvsift_lab.docs.quality import RESULTS, Render, evaluated, result_of
from kvsift_lab.eval.tables import budget_for, compared, fidelity_table
from kvsift_lab.numbers import grouped, table
from kvsift_lab.studies.long_answers import long_answers_table

FIDELITY, RULER, TARGET = "real-fidelity", "real-ruler", 0.02  # nats
PLANS = ("sketch", "quest", "oracle_tokens", "streaming_llm")
DECODE = [
    *(f"real-decode-{plan}-h100" for plan in ("sketch-512", "quest-512", "quest-1024", "quest-2048")),
    *(f"real-decode-{plan}-h200" for plan in ("sketch-256", "quest-256")),
]


def mean_divergences(result: dict[str, Any]) -> dict[tuple[int, str], dict[int, float]]:
    """Return the mean KL by budget, for every length of contexts and name of a plan."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for length, samples in compared(result).items():
        sparse = [sample for sample in samples if sample["budget"] is not None]
        for (name, budget), own in grouped(sparse, "name", "budget").items():
            found.setdefault((length, name), {})[budget] = fmean(sample["kl"] for sample in own)
    return found


def tokens_for_target(real: str, embedded: str) -> Render:
    """Return a block: the visible tokens at which plans come as close to dense attention as ``TARGET``, and the MB that
    a step then reads, by the bytes that decode steps of ``DECODE`` counted."""

    def render() -> str:
        ours, theirs = (mean_divergences(result_of(name)) for name in (real, embedded))
        lengths, first = sorted({length for length, _ in ours}), min(length for length, _ in theirs)
        rows = []
        for name in dict.fromkeys(name for _, name in ours):
            cells = [_tokens(ours.get((length, name)), name, length) for length in lengths]
            rows.append([name, *cells, _tokens(theirs.get((first, name)))])
        dense = (f"{length:,} ({_dense_bytes_per_token() * length / 1e6:.0f} MB)" for length in lengths)
        rows.append(["dense", *dense, f"{first:,}"])
        heads = [*(f"{length:,} tokens" for length in lengths), f"embedded model, {first:,} tokens"]
        return table([f"visible tokens for KL {TARGET}", *heads], rows)

    return render


def _tokens(divergences: dict[int, float] | None, name: str = "", length: int = 0) -> str:
    """Return the tokens for the target, and the MB read at a length of the real model."""
    if divergences is None:
        return "-"
    budget, few, many = budget_for(divergences, TARGET), min(divergences), max(divergences)
    if budget is None:
        return f"fewer than {few:,}" if divergences[few] < TARGET else f"more than {many:,}"
    read = bytes_of_step(name, budget, length)
    return f"{budget:,.0f}{f' ({read / 1e6:.0f} MB)' if read else ''}"


def bytes_of_step(plan: str, tokens: float, context: int) -> float | None:
    """Return the bytes of KV cache and index that a decode step of the real model reads; None if none was counted.

    An oracle reads all keys and the selected values. A second bit for each channel of the keys is a 32nd of keys and
    values in 16 bits.
    """
    variants = {name.split("-")[2]: decode_variants(name) for name in DECODE}
    per_token = _dense_bytes_per_token()
    if plan == "oracle_tokens":
        return per_token * (context + tokens) / 2
    method, _, options = plan.partition(":")
    if method not in variants or options not in ("", "bits=2"):
        return None
    sifted = variants[method]["sifted"]
    index = (sifted["kv_bytes"] - per_token * sifted["visible_tokens"]) / variants[method]["dense"]["visible_tokens"]
    return per_token * tokens + (index + (per_token / 32 if options else 0)) * context


def _dense_bytes_per_token() -> float:
    dense = decode_variants(DECODE[0])["dense"]
    return float(dense["kv_bytes"] / dense["visible_tokens"])


def decode_variants(name: str) -> dict[str, dict[str, Any]]:
    """Return the variants of a decode result by their names."""
    return {variant["name"]: variant for variant in stored.load(RESULTS / name)["points"][0]["variants"]}


def decode_steps() -> str:
    """Return what a decode step of the real model takes and reads: a row per plan, beside dense in the same run."""
    rows, made, result = [], dict[str, list[str]](), {}
    for name in DECODE:
        result, variants = stored.load(RESULTS / name), decode_variants(name)
        dense, sifted = (median(variants[own]["tpot_s"]) for own in ("dense", "sifted"))
        times = f"{1e3 * sifted:.2f}", f"{1e3 * dense:.2f}", f"{dense / sifted:.2f}x"
        read = (f"{variants[own]['kv_bytes'] / 1e6:.0f}" for own in ("sifted", "dense"))
        machine = result["machine"].split()[1]
        rows.append([f"`{result['recipe']['plan'].partition(':dense')[0]}`", machine, *times, *read])
        where = f"{result['machine']}, torch {result['versions']['torch']}, commit {commit_of(result)}"
        made.setdefault(where, []).append(f"`results/{name}`")
    heads = ["", "on", "ms per token", "dense", "speed-up", "MB read of KV and index", "dense"]
    context = f"{result['points'][0]['context']:,} tokens, batch 1, medians"
    weights = f"{result['points'][0]['weight_bytes'] / 1e6:.0f} MB of weights are read besides"
    sources = "; ".join(f"{', '.join(names)}: {where}" for where, names in made.items())
    return f"{table(heads, rows)}\n\n{context}; {weights}. {sources}."


def answers(name: str) -> Render:
    """Return a block: what a token of an answer takes under plans, some of them about as close to dense attention as
    ``TARGET``."""

    def render() -> str:
        result = stored.load(RESULTS / name)
        times = {point["plan"]: median(point["tpot_s"]) for point in result["points"]}
        rows = [
            [f"`{plan.partition(':dense')[0]}`", f"{1e3 * seconds:.3g}", f"{times['dense'] / seconds:.2f}x"]
            for plan, seconds in times.items()
        ]
        first = result["points"][0]
        about = f"After {first['prompt_tokens']:,} tokens, medians of {len(first['tpot_s'])}"
        source = f"`results/{name}`: {result['machine']}, commit {commit_of(result)}"
        return f"{table(['', 'ms per token', 'speed-up'], rows)}\n\n{about}. {source}."

    return render


def long_answers() -> str:
    """Return where long answers of the real model part from dense ones, and the plans that were not measured."""
    name = "real-long-answers-h200"
    result = stored.load(RESULTS / name)
    measured = {point["plan"] for point in result["points"]}
    planned = [*result["recipe"]["plans"], f"{result['recipe']['exact']}, exact=True"]
    left = ", ".join(f"`{plan}`" for plan in planned if plan not in measured)
    missing = f" Not measured for lack of time: {left}." if left else ""
    return (
        f"{long_answers_table(result)}\n\n`results/{name}`: {result['machine']}, commit {commit_of(result)}.{missing}"
    )


def readme_results() -> str:
    """Return the README's table of the real model, and that of the embedded one."""
    return f"{readme_table()}\n\n{evaluated(quality.RESULT, quality.readme_table, quality.EXACT_MATCH)()}"


def readme_table() -> str:
    """Return how close plans are to dense attention on the real model, what they find, and what they cost."""
    result, length, budgets = result_of(FIDELITY), 4096, (128, quality.README_BUDGET)
    samples = [sample for sample in compared(result)[length] if sample["budget"] in budgets]
    found, num_tokens = _found(budgets)
    rows = [["dense", *["0"] * 2, *["100 %"] * 2, *[f"{found['dense', None]:.0f} %"] * 2]]
    for name in PLANS:
        own = grouped((sample for sample in samples if sample["name"] == name), "budget")
        divergences = [f"{fmean(sample['kl'] for sample in own[budget]):.3f}" for budget in budgets]
        same = [f"{100 * fmean(sample['agreement'] for sample in own[budget]):.0f} %" for budget in budgets]
        rows.append([name, *divergences, *same, *(f"{found[name, budget]:.0f} %" for budget in budgets)])
    times = []
    for name in DECODE[:2]:
        seconds = {own: median(variant["tpot_s"]) for own, variant in decode_variants(name).items()}
        ratio = seconds["dense"] / seconds["sifted"]
        times.append(f"`{name.split('-')[2]}` {1e3 * seconds['sifted']:.2f} ms ({ratio:.2f}x)")
    number, last = len({sample["seed"] for sample in samples}), DECODE[0]
    heads = [f"{what}, {budget}" for what in ("KL to dense", "same token", "RULER") for budget in budgets]
    return (
        f"{table(['SmolLM2-135M, budget', *heads], rows)}\n\n"
        f"**A language model**, SmolLM2-135M-Instruct, on {number} texts of {length:,} tokens, no layer dense: KL to "
        f"dense attention in nats and how often the likeliest token is the same, and RULER's numbers found in "
        f"{num_tokens:,} tokens. It is too small and its contexts too short for a speed-up on a GPU: a token after "
        f"{stored.load(RESULTS / last)['points'][0]['context']:,} takes {' and '.join(times)} on an H100. "
        f"`results/{FIDELITY}`, `results/{RULER}`, `results/{last}`."
    )


def _found(budgets: tuple[int, ...]) -> tuple[dict[tuple[str, int | None], float], int]:
    """How much of RULER's tasks plans solve, in percent, of those that dense attention solves; and in how many
    tokens."""
    result = result_of(RULER)
    names = {row["plan"]: row["name"] for row in result["rows"]}
    scores: dict[tuple[str, int | None], list[float]] = {}
    for sample in result["samples"]:
        scores.setdefault((names[sample["plan"]], sample["budget"]), []).append(100 * sample["score"])
    [length] = {sample["length"] for sample in result["samples"]}
    return {key: fmean(values) for key, values in scores.items()}, length


BLOCKS: dict[str, dict[str, Render]] = {
    "README.md": {"results": readme_results},
    "docs/quality.md": {
        "real-fidelity": evaluated(FIDELITY, fidelity_table, quality.DIVERGENCE),
        "real-tokens": tokens_for_target(FIDELITY, "fidelity"),
        "real-decode": decode_steps,
        "real-answers": answers("real-answers-h200"),
        "real-tuned": evaluated("real-tuned", fidelity_table, quality.DIVERGENCE),
        "real-long-answers": long_answers,
        "real-ruler": quality.grid(["real-ruler"], quality.by_task),
        "real-ruler-dense": quality.tasks_by_plan("real-ruler-dense"),
        "real-methods": evaluated("real-methods", fidelity_table, quality.DIVERGENCE),
        "real-dense-layers": evaluated("real-dense-layers", fidelity_table, quality.DIVERGENCE),
    },
    "results/real-answers-cpu/README.md": {"real-answers-cpu": answers("real-answers-cpu")},
}
