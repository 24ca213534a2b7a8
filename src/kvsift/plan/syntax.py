"""The syntax of plans, as text and as tables:

    quest:budget=1024                                     command line, TOML, Python string
    prefill=streaming_llm:budget=4096,decode=quest:budget=2048:page_size=32
    {decode = {method = "quest", budget = 2048}}          TOML table, Python dict
    Plan(decode=Rule(Quest(), Budget(tokens=2048)))       Python objects: a Plan, a Rule, or a method

A bare method applies to decode if it can, else to prefill; a phase that is not named is dense. ``both=`` names the two
phases at once: both=streaming_llm:budget=4096. The word auto alone is the plan that kvsift tune found for a model; see
``plan.tuned_plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvsift.errors import Conflict, InputError, InvalidValue, MissingInput, UnusedOption, unknown
from kvsift.methods import catalogue, checks, method_class
from kvsift.methods.base import Method, Phase
from kvsift.plan.budget import Budget
from kvsift.plan.plan import PHASES, Plan, Rule

NAMED: dict[str, tuple[Phase, ...]] = {"prefill": ("prefill",), "decode": ("decode",), "both": PHASES}
BUDGET_KEYS = {"budget": "tokens"} | {field.name: field.name for field in fields(Budget) if field.name != "tokens"}

SIZES = {"tokens", "ratio", "mass"}
AUTO = "auto"
ALONE = (
    "auto stands alone, for the whole plan that kvsift tune found for a model: it has no options, and is no rule of a "
    "phase and no method of a table. Give plan='auto', or name a method."
)
PlanSpec = str | Mapping[str, Any] | Plan | Rule | Method | None


def parse_plan(spec: PlanSpec) -> Plan:
    """A plan from any of its spellings (see the module).

    A method gets the budget that it has by default; a method or a rule applies as a bare method does.

    Raises:
        InputError: for an unknown method, key or value; nothing is ignored.
    """
    if spec is None:
        return Plan()
    if isinstance(spec, Plan):
        return spec
    if isinstance(spec, Rule | Method):
        return _plan_of(_rule_of_object(spec))
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    if not isinstance(spec, str) or not spec.strip():
        _refuse_class(spec)
        raise InvalidValue(
            f"a plan is text such as 'quest:budget=1024', a table, a Plan, a Rule or a Method; got {spec!r}."
        )
    if is_auto(spec):
        raise MissingInput(
            "plan='auto' is the plan that kvsift tune found for a model, and here is no model. Give it to LLM, "
            "kvsift.sparse, a server or a command, or name a method such as quest:budget=1024."
        )
    heads = [part.partition("=")[0].strip() for part in spec.split(",")]
    if len(heads) == 1 and heads[0] not in NAMED and "=" not in spec.partition(":")[0]:
        return _plan_of(_parse_rule(spec.strip()))
    rules: dict[str, Rule | None] = {}
    for part in spec.split(","):
        phase, _, rule = part.partition("=")
        phase = phase.strip()
        if phase not in NAMED and (corrected := _with_colons(spec)) != spec:
            raise InvalidValue(
                f"{spec!r} has a comma before an option: commas separate phases, and colons the options of a method. "
                f"Did you mean {corrected!r}?"
            )
        phases = _phases(phase, rules, spec)
        if not rule.strip():
            raise InvalidValue(f"{phase}= is empty in {spec!r}; write for instance {phase}=dense.")
        rules |= dict.fromkeys(phases, _parse_rule(rule.strip()))
    return Plan(**rules)


def is_auto(spec: object) -> bool:
    """Whether a plan is the one that was tuned for the model, which is known only with a model."""
    return isinstance(spec, str) and spec.strip() == AUTO


def is_refused(spec: PlanSpec) -> bool:
    """Whether a plan makes no sense, whatever it is to run on."""
    try:
        parse_plan(spec)
    except InputError:
        return True
    return False


def parse_unless_auto(spec: PlanSpec) -> Plan | str:
    """As ``parse_plan``, and auto as it is: for whoever refuses bad plans before there is a model."""
    return AUTO if is_auto(spec) else parse_plan(spec)


def make_rule(method: str, settings: Mapping[str, Any]) -> Rule:
    """A rule from a method's name and its settings, the method's and the budget's in one mapping.

    Raises:
        InputError: for a name or key that does not exist (with the nearest one that does), or a bad value.
    """
    if not isinstance(method, str):
        raise InvalidValue(
            f"method={method!r} must be the name of a method; see kvsift methods. A Method object stands in a Rule, "
            "such as Rule(method, Budget(tokens=1024))."
        )
    if method == AUTO:
        raise Conflict(ALONE)
    cls = method_class(method)
    if settings and not fields(cls) and cls().traits.unbounded:
        raise UnusedOption(f"{method} sees everything and takes no settings; leave out {', '.join(settings)}.")
    names, settings = [f.name for f in fields(cls)], {k: checks.python_number(v) for k, v in settings.items()}
    for key in settings:
        if key not in names and key not in BUDGET_KEYS:
            raise unknown(f"key of {method}", key, [*names, *BUDGET_KEYS])
    chosen = _new_method(cls, {key: value for key, value in settings.items() if key in names})
    budget = {BUDGET_KEYS[key]: value for key, value in settings.items() if key in BUDGET_KEYS}
    if "dense_layers" in budget and isinstance(budget["dense_layers"], int):
        budget["dense_layers"] = (budget["dense_layers"],)
    defaults = chosen.budget_defaults
    if budget.keys() & SIZES:  # one that is given replaces one that is not, whatever its unit
        defaults = {name: value for name, value in defaults.items() if name not in SIZES}
    return Rule(chosen, Budget(**{**defaults, **budget}))


def _rule_of_object(spec: Rule | Method) -> Rule:
    """The rule, or that of a method with its own default budget."""
    return spec if isinstance(spec, Rule) else Rule(spec, Budget(**spec.budget_defaults))


def _refuse_class(spec: object) -> None:
    if isinstance(spec, type) and issubclass(spec, Method):
        raise InvalidValue(f"{spec.__name__} is a class of methods, and a plan takes an object: {spec.__name__}().")


def _new_method(cls: type[Method], settings: Mapping[str, Any]) -> Method:
    """A method with these knobs, refused by its own checks first, then by the declared types."""
    try:
        method = cls(**settings)
    except InputError:
        raise
    except Exception:  # it may have computed with text
        checks.of_declared_types(cls, settings)
        raise
    checks.of_declared_types(cls, settings)
    return method


def _with_colons(spec: str) -> str:
    """The plan with a colon before what is a knob of the method before it, where a comma was."""
    corrected, keys = "", set[str]()
    for part in spec.split(","):
        if part.partition("=")[0].strip() in keys:
            corrected += ":" + part.strip()
            continue
        corrected += "," + part if corrected else part
        method = part.partition(":")[0].rpartition("=")[2].strip()
        if method in catalogue():
            keys = {*BUDGET_KEYS, *(f.name for f in fields(method_class(method)))}
    return corrected


def _plan_of(rule: Rule) -> Plan:
    if rule.method.traits.unbounded:
        return Plan()
    return Plan(**{rule.bare_phase: rule})


def _from_mapping(table: Mapping[str, Any]) -> Plan:
    if "method" in table:
        return _plan_of(make_rule(table["method"], {k: v for k, v in table.items() if k != "method"}))
    rules: dict[str, Rule | None] = {}
    for key, value in table.items():
        rules |= dict.fromkeys(_phases(str(key), rules, table), _rule_of(value))
    return Plan(**rules)


def _phases(name: str, given: Mapping[str, Rule | None], spec: object) -> tuple[Phase, ...]:
    """The phases that a name stands for, none of which has a rule yet."""
    if name == AUTO:
        raise Conflict(ALONE)
    if name not in NAMED:
        error = unknown("phase", name.partition(":")[0], NAMED)
        if isinstance(spec, Mapping):
            raise error
        raise InvalidValue(
            f"{error}. Commas separate phases and colons the settings of a method: quest:budget=1024, or "
            "prefill=quoka:budget=1024,decode=quest:budget=1024"
        )
    if twice := given.keys() & NAMED[name]:
        raise InvalidValue(f"{min(twice)} is given twice in {spec!r}.")
    return NAMED[name]


def _rule_of(value: Any) -> Rule | None:
    if value is None:
        return None
    if isinstance(value, Rule | Method):
        return _rule_of_object(value)
    if isinstance(value, str):
        return _parse_rule(value)
    if isinstance(value, Mapping) and "method" in value:
        return make_rule(value["method"], {k: v for k, v in value.items() if k != "method"})
    _refuse_class(value)
    raise InvalidValue(f"a phase is given as text, a table with the key 'method', a Rule or a Method; got {value!r}.")


def _parse_rule(text: str) -> Rule:
    name, *pairs = text.split(":")
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals or not key or not value:
            raise InvalidValue(f"{pair!r} in {text!r} must be key=value, for instance budget=1024.")
        if key in settings:
            raise InvalidValue(f"{key} is given twice in {text!r}.")
        settings[key] = _read(key, value)
    return make_rule(name.strip(), settings)


def read_layers(text: str) -> tuple[int, ...]:
    """Layers such as 0+1, or none.

    Raises:
        InputError: for anything else.
    """
    if text == "none":
        return ()
    if not all(layer.isdecimal() for layer in text.split("+")):
        raise InvalidValue(f"dense_layers={text} must be layer numbers such as 0+1, or none.")
    return tuple(int(layer) for layer in text.split("+"))


def _read(key: str, text: str) -> Any:
    """A value as it is written in a plan: whole number, decimal, true or false, layers such as 0+1 or none, a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if key == "dense_layers":
        return read_layers(text)
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
