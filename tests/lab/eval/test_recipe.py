"""Recipes: checked before anything runs, complete with what every result is held against."""

from dataclasses import replace
from pathlib import Path

import pytest
from kvsift_lab.eval.contexts import Contexts
from kvsift_lab.eval.recipe import EvalRecipe, Job
from kvsift_lab.eval.results import document_of
from lab.eval.samples import RECIPE, recipe_of
from refusals import refused

from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.plan.syntax import parse_plan

ROOT = Path(__file__).parents[3]
SHIPPED = [path for path in sorted((ROOT / "lab" / "recipes").glob("*.toml")) if not path.name.startswith("probe")]


def test_a_recipe_is_read_as_it_is_written(tmp_path: Path) -> None:
    assert recipe_of(tmp_path) == EvalRecipe(
        tasks=("passkey", "key_value"),
        lengths=(700,),
        questions_per_task=2,
        questions_per_context=2,
        plans=("dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"),
        budgets=(64, 256),
        settings=":sinks=4:dense_layers=none",
        setup="question_decoded",
        references=False,
        seed=5,
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_recipes_that_ship_can_be_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "build" / "real-texts" / "evaluated").mkdir(parents=True)  # of ``eval.real_texts``
    (tmp_path / "lab").symlink_to(ROOT / "lab")  # recipes name files from the root of the repository
    monkeypatch.chdir(tmp_path)
    loaded = EvalRecipe.load(path)
    assert loaded.rows
    assert loaded.jobs or loaded.files


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seed = 5", "sed = 5"), "unknown_name: of the recipe recipe.toml 'sed'; did you mean 'seed'?"),
        (("lengths = [700]", ""), "invalid_value"),
        ((RECIPE, "seed = 5"), "missing_input: questions_per_task, questions_per_context, plans"),
        (("seed = 5", "length = 5"), "conflict: recipe.toml"),
        (
            (RECIPE, RECIPE[: RECIPE.index("plans")] + "plans = []"),
            "missing_input: the recipe recipe.toml has no plans",
        ),
        (("passkey", "paskey"), "invalid_value: 'paskey'; did you mean 'passkey'?"),
        (('["passkey", "key_value"]', '"passkey"'), "invalid_value: it should be a valid list"),
        (('["passkey", "key_value"]', "[]"), "invalid_value"),
        (("[700]", "700"), "invalid_value: it should be a valid list"),
        (("[700]", "[-1]"), "invalid_value: it should be greater than or equal to 1"),
        (("[64, 256]", "256"), "invalid_value: it should be a valid list"),
        (("[64, 256]", '["64"]'), "invalid_value: it should be a valid integer"),
        (("[64, 256]", "[64, 32]"), "invalid_value: budget=32"),
        (('"dense"', '"denes"'), "invalid_value: 'denes'; did you mean 'dense'?"),
        (('"dense"', '"quest:budget={bugdet}"'), "invalid_value: budget='{bugdet}'"),
        ((":sinks=4", ":sink=4"), "invalid_value: of quest 'sink'; did you mean 'sinks'?"),
        (
            ("questions_per_task = 2", "questions_per_task = 0"),
            "invalid_value: it should be greater than or equal to 1",
        ),
        (("seed = 5", "seed = true"), "invalid_value: it should be a valid integer"),
        (("seed = 5", "setup = 'sparse_prefil'"), "invalid_value: 'sparse_prefil'; did you mean 'sparse_prefill'?"),
        (("seed = 5", "setup = 'sparse_prefill'"), "invalid_value"),
        (("references = false", "references = 1"), "invalid_value: it should be a valid boolean"),
        (("seed = 5", "model = 5"), "invalid_value: it should be a valid string"),
        (("seed = 5", "seed = "), "unreadable_file: recipe.toml"),
        (("seed = 5", "[[files]]\nkind = 'longbench'"), "missing_input: files.0.path"),
        (("seed = 5", "files = 5"), "invalid_value: it should be a valid list"),
        (("seed = 5", "[[files]]\nkind = 'squad'\npath = '.'\nlimi = 2"), "unknown_name: did you mean 'limit'?"),
        (("seed = 5", "[[files]]\nkind = 'longbenc'\npath = '.'"), "invalid_value: did you mean 'longbench'?"),
        (("seed = 5", "[[files]]\nkind = 'longbench'\npath = 'no'"), "invalid_value"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with refused(says):
        recipe_of(tmp_path, change)


def test_budgets_that_stand_in_every_plan_need_not_be_given_again(tmp_path: Path) -> None:
    templates = '"dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"'
    quest = '"quest:budget=64:window=16", "quest:budget=256:window=16"'
    plans = (templates, f'"dense", {quest}, "streaming_llm:budget=256"')
    recipe = recipe_of(tmp_path, plans, ("budgets = [64, 256]", ""))
    whole = recipe_of(tmp_path)
    assert recipe.columns == whole.columns == (64, 256)
    rest = tuple(row for row in whole.rows if not row.plan.startswith("streaming_llm:budget=64"))
    assert recipe.rows == rest, "rows and names as with {budget}"
    assert document_of(recipe)["budgets"] == [64, 256]
    lacking = (templates, '"dense", "quest"')
    with refused("invalid_value: quest"):
        recipe_of(tmp_path, lacking, ("budgets = [64, 256]", ""))


def test_a_plan_that_selects_in_prefill_is_not_set_up_with_a_dense_prompt(tmp_path: Path) -> None:
    prefill = ('"streaming_llm:budget={budget}"', '"prefill=quoka:budget={budget}:window=16"')
    with refused("invalid_value"):
        recipe_of(tmp_path, prefill, ("seed", "setup='whole_prompt'\nseed"))


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with refused("unreadable_file"):
        EvalRecipe.load(tmp_path / "no.toml")


def test_a_row_per_plan_and_budget_with_the_common_settings(tmp_path: Path) -> None:
    settings = ":sinks=4:dense_layers=none"
    assert [(row.plan, row.budget, row.name, row.role) for row in recipe_of(tmp_path).rows] == [
        ("dense", None, "dense", "ceiling"),
        (f"quest:budget=64:window=16{settings}", 64, "quest", "plan"),
        (f"quest:budget=256:window=16{settings}", 256, "quest", "plan"),
        (f"streaming_llm:budget=64{settings}", 64, "streaming_llm", "floor"),
        (f"streaming_llm:budget=256{settings}", 256, "streaming_llm", "floor"),
    ]


def test_a_plan_keeps_its_own_settings_and_streaming_takes_no_window(tmp_path: Path) -> None:
    loaded = recipe_of(tmp_path, (":sinks=4:dense_layers=none", ":sinks=4:window=32"))
    plans = [row.plan for row in loaded.rows if row.budget == 64]
    assert plans == ["quest:budget=64:window=16:sinks=4", "streaming_llm:budget=64:sinks=4"]


def test_floor_and_ceiling_are_added_where_they_lack(tmp_path: Path) -> None:
    plans = '"dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"'
    alone = recipe_of(tmp_path, ("references = false\n", ""), (plans, '"quest:budget={budget}:window=16"'))
    added = {row.name: row for row in alone.rows if row.role != "plan"}
    assert added.keys() == {"dense", "oracle_tokens", "streaming_llm", "random"}
    for name in ("oracle_tokens", "random"):  # they show what quest shows in any case
        budget = parse_plan(added[name].plan).decode.budget
        assert (budget.sinks, budget.window, budget.dense_layers) == (4, 16, ())
    with_two = recipe_of(tmp_path, ("references = false\n", ""))
    assert [row.name for row in with_two.rows[-4:]] == ["oracle_tokens"] * 2 + ["random"] * 2
    assert sum(row.name == "dense" for row in with_two.rows) == 1


def test_references_select_in_the_phase_that_the_recipe_is_about(tmp_path: Path) -> None:
    plans = '"dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"'
    changes = ("references = false\n", ""), (plans, '"prefill=quoka:budget={budget}:window=16"')
    rows = recipe_of(tmp_path, *changes, ("seed", "setup='sparse_prefill'\nseed")).rows
    assert {row.phase for row in rows if row.name != "dense"} == {"prefill"}
    assert all(parse_plan(row.plan).decode is None for row in rows)
    changes = ("references = false\n", ""), (plans, '"both=keydiff:budget={budget}:window=16:evict=true"')
    for setup, phase in (("sparse_prefill", "prefill"), ("question_decoded", "decode")):
        rows = recipe_of(tmp_path, *changes, ("seed", f"setup='{setup}'\nseed")).rows
        assert {row.phase for row in rows if row.name != "dense"} == {phase}


def test_contexts_are_made_until_there_are_enough_questions_first_ones_first(tmp_path: Path) -> None:
    many = recipe_of(tmp_path, ("[700]", "[100_000, 50_000]"), ("per_task = 2", "per_task = 3"))
    assert many.jobs == tuple(
        Job(task, length, seed)
        for seed, tasks in ((5, ("passkey", "key_value")), (6, ("passkey", "key_value")), (7, ("passkey",)))
        for length in (100_000, 50_000)
        for task in tasks
    )


def test_questions_of_published_formats_can_be_put_into_our_own(tmp_path: Path) -> None:
    tokenizer, loaded = ModelDirectory.check(None).tokenizer(), recipe_of(tmp_path)
    asked = {}
    for framed in (False, True):
        recipe = replace(loaded, tasks=("niah_single_1",), lengths=(1024,), framed=framed)
        contexts = Contexts(recipe, tokenizer)
        asked[framed] = contexts.sample(contexts.jobs()[0]).questions[0]
    assert not asked[False].is_framed
    assert asked[True].tail.endswith("Answer:")
    assert (asked[True].references, asked[True].scorer) == (asked[False].references, asked[False].scorer)
