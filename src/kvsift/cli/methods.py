"""kvsift methods: the methods of a plan."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.printing import plain
from kvsift.errors import InputError, InvalidMethod

if TYPE_CHECKING:
    from kvsift.methods import Entry
    from kvsift.methods.base import Method
    from kvsift.plan.budget import Budget
    from kvsift.types import LayerShape

NAME_WIDTH = 21
LEAST_TEXT_WIDTH, NARROW_INDENT = 30, 2  # of texts beside names; of those below them, where there is no room for that


def methods(
    name: Annotated[str | None, typer.Argument(help="One method in detail; by default, a list of all methods.")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """List every method with its phases (prefill, in which a prompt is read; decode, in which an answer is generated)
    and its options, which a plan spells after its name (quest:budget=1024:page_size=32), or describe one in detail.
    """
    if as_json:
        print(json.dumps(method_rows() if name is None else method_row(name), indent=2))
    elif name is None:
        _print_list(method_rows())
    else:
        _print_one(method_row(name))


def method_rows() -> list[dict[str, Any]]:
    """Return the catalogue with the description of each method at its defaults. A method of an installed package that
    cannot be loaded is skipped with a warning on stderr."""
    from kvsift.methods import catalogue

    rows = []
    for name, entry in catalogue().items():
        try:
            rows.append(method_row(name))
        except InputError as error:
            if not entry.package:
                raise
            print(f"kvsift: WARNING: {plain(str(error))} It is skipped.", file=sys.stderr)
    return rows


def method_row(name: str) -> dict[str, Any]:
    """Return the description of one method.

    Raises:
        InputError: for an unknown method, or one of an installed package that cannot be used.
    """
    from kvsift.methods import catalogue, method_class

    cls = method_class(name)
    entry = catalogue()[name]
    try:
        return _row(name, entry, cls())
    except Exception as error:
        if not entry.package:
            raise
        raise InvalidMethod(
            f"the method {name!r} of the installed package {entry.package} cannot be described: "
            f"{type(error).__name__}: {error}."
        ) from error


def _row(name: str, entry: Entry, method: Method) -> dict[str, Any]:
    knobs = {f.name: f.default for f in fields(method)}
    keeps = "all" if method.traits.keeps_all else "hides"
    return {
        "name": name,
        "summary": entry.summary,
        "phases": list(method.phases),
        "granularity": method.traits.granularity,
        "keeps": f"{keeps}; evict=true frees" if "evict" in knobs else keeps,
        "state_bytes_per_token": method.state_bytes_per_token(_example_layer()),
        "knobs": knobs,
        "meanings": {knob: text for knob, text in _meanings(type(method)).items() if knob in knobs},
        "budget": _budget_of(name, method),
        "source": method.source or entry.package,
    }


def _budget_of(name: str, method: Method) -> dict[str, Any]:
    """Return the keys of the budget that a method accepts, with its defaults."""
    from kvsift.plan.budget import Budget
    from kvsift.plan.syntax import is_refused

    if method.traits.unbounded:
        return {}
    tried = {"window": 96, "mass": 0.9, "head_budgets": "adaptive", "min_recovery": 0.9}
    defaults = budget_knobs(Budget(**method.budget_defaults))
    return {k: v for k, v in defaults.items() if k not in tried or not is_refused({"method": name, k: tried[k]})}


def budget_knobs(budget: Budget | None = None) -> dict[str, Any]:
    """Return the keys of every budget with their defaults, in the syntax of plans."""
    from kvsift.plan.budget import Budget
    from kvsift.plan.syntax import BUDGET_KEYS

    budget = budget or Budget()
    values = {key: getattr(budget, name) for key, name in BUDGET_KEYS.items()}
    return {k: "+".join(map(str, v)) or "none" if isinstance(v, tuple) else v for k, v in values.items()}


def own_budget(row: dict[str, Any]) -> list[str]:
    """Return the defaults of a method's budget that differ from the common ones, in the syntax of plans."""
    common = budget_knobs()
    return spelled({key: value for key, value in row["budget"].items() if value not in (None, common[key])})


def spelled(knobs: dict[str, Any]) -> list[str]:
    """Return knobs in the syntax of plans; a knob that is off by default has no value."""
    return [
        key if value is None else f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in knobs.items()
    ]


def state_note() -> str:
    """Return the meaning of ``state_bytes_per_token``."""
    shape = _example_layer()
    kv_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim
    return (
        f"State: bytes per token and layer besides keys and values, which take {kv_bytes:,} in a layer of "
        f"{shape.num_query_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim} numbers in 16 bits."
    )


def budget_note(knobs: str) -> str:
    """Return a note on the budget of every method; ``knobs`` are its keys with their defaults."""
    return (
        f"An option without a value is off by default. Every method except dense also accepts {knobs}; other defaults "
        'of a method follow "budget:", and a compat mode may set its own. A method refuses keys that do not apply: '
        "window if it selects nothing, mass and head_budgets=adaptive if its scores do not estimate attention, "
        "min_recovery if it drops tokens or selects in prefill alone."
    )


def _example_layer() -> LayerShape:
    from kvsift.types import LayerShape

    return LayerShape(layer=2, num_query_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)


def _meanings(cls: type) -> dict[str, str]:
    """Return the texts of attributes in the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, attributes = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        names: list[str] = []
        for line in attributes.splitlines():
            if line and not line.startswith(" "):
                break  # the next section
            head = re.match(r"    (\w+(?:, \w+)*): *(.*)", line)
            if head:
                names = head[1].split(", ")
            for name in names:
                texts[name] = head[2] if head else f"{texts[name]} {line.strip()}".strip()
    code = re.compile(r" \(``[a-z_.]+``\)")  # references to code
    return {name: code.sub("", text).replace("``tokens``", "budget").replace("``", "") for name, text in texts.items()}


def _print_list(rows: list[dict[str, Any]]) -> None:
    """Print the list, wrapped between words, on a terminal and in a pipe."""
    for row in rows:
        own = own_budget(row)
        texts = [row["summary"], ", ".join(row["phases"]), " ".join(spelled(row["knobs"]))]
        texts += [f"budget: {' '.join(own)}"] if own else []
        _print_beside(row["name"], texts)
    print()
    _print_beside("", [budget_note(" ".join(spelled(budget_knobs()))), "kvsift methods NAME explains each option."], 0)


def _print_one(row: dict[str, Any]) -> None:
    from kvsift.plan.budget import Budget
    from kvsift.plan.syntax import make_rule

    facts = {
        row["name"]: row["summary"],
        "plan": str(make_rule(row["name"], {})),
        "phases": ", ".join(row["phases"]),
        "selects": f"{row['granularity']}s",
        "keeps": row["keeps"].replace("hides", "hides dropped tokens for good"),
        "state": f"{row['state_bytes_per_token']:,.0f} {state_note().removeprefix('State: ')}",
        "source": row["source"] or "kvsift",
    }
    for name, text in facts.items():
        _print_beside(name, [text])
    meanings = _meanings(Budget)
    _print_knobs("Options of the method", row["knobs"], row["meanings"])
    _print_knobs("Options of the budget", row["budget"], {**meanings, "budget": meanings["tokens"]})


def _print_knobs(title: str, knobs: dict[str, Any], meanings: dict[str, str]) -> None:
    if knobs:
        print(f"\n{title}")
    for knob, text in zip(knobs, spelled(knobs)):
        _print_beside(text, [meanings.get(knob, "")])


def _print_beside(name: str, texts: list[str], indent: int = NAME_WIDTH) -> None:
    """Print a name with texts beside it, each on its own lines, or below a long name."""
    columns = get_terminal_size().columns
    if columns < indent + LEAST_TEXT_WIDTH:
        indent = NARROW_INDENT
    width = max(columns, indent + LEAST_TEXT_WIDTH)
    wrapper = TextWrapper(
        width, subsequent_indent=" " * indent, initial_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    lines = [line for text in texts for line in wrapper.wrap(plain(text))] or [""]
    if len(name) < indent:
        lines[0] = f"{name:<{indent}}{lines[0][indent:]}".rstrip()
    elif name:
        lines.insert(0, name)
    print("\n".join(lines))
