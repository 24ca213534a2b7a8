"""kvsift bench: speed beside the floor that memory sets. Every bench of the table runs through one loop."""

from __future__ import annotations

from inspect import Parameter, Signature, getdoc
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.printing import plain
from kvsift.errors import InvalidValue, WrongFile
from kvsift_lab.bench import BENCHES, load
from kvsift_lab.bench.recipe import BenchRecipe
from kvsift_lab.cli.dump import dump

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--output",
        help="Write the result here, rewritten at every point: a folder (summary and raw samples), or one X.json.",
    ),
]


class BenchCommands(TyperGroup):
    """The commands of bench: those of the table, and dump and chart. A bench is imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted([*BENCHES, *super().list_commands(ctx)])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return bench_command(cmd_name) if cmd_name in BENCHES else super().get_command(ctx, cmd_name)


bench = typer.Typer(cls=BenchCommands, help="Measure speed beside the floor that memory sets.", no_args_is_help=True)
bench.command("dump")(dump)


def bench_command(name: str) -> Any:
    """Return the command of a bench: its options, then --out and --json."""
    recipe: type[BenchRecipe] = load(BENCHES[name])

    def command(output: Path | None, as_json: bool, **given: Any) -> None:
        measure(recipe, given, output, as_json)

    annotations = {
        name: (Annotated[spec.kind, typer.Option(spec.flag, min=spec.minimum, help=spec.help)], spec.default)
        for name, spec in recipe.options().items()
    } | {"output": (OutputOption, None), "as_json": (o.JsonOption, False)}
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in annotations.items()
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command(name, help=(getdoc(recipe) or "").partition("\n")[0])(command)
    return get_command(app)


def measure(kind: type[BenchRecipe], given: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Measure point by point: print and keep each, then print and draw what follows from all."""
    from kvsift_lab import stored

    if output is not None and stored.is_folder(output):
        stored.check(output)
    else:
        files.require_writable(output, "--out")
    recipe = kind.from_options(given)
    chart = getattr(recipe, "chart_path", None)
    chart_path = Path(chart) if chart else None
    files.require_writable(chart_path, "--chart")
    o.use_threads(getattr(recipe, "threads", None))
    from kvsift_lab.bench.machine import opening
    from kvsift_lab.stored import document

    def say(text: str) -> None:
        if text and not as_json:
            print(plain(text), flush=True)

    bench = recipe.bench()
    result: dict[str, Any] = {**bench.head(), "points": []}
    say(opening(result))
    for point in bench.run():
        result["points"].append(point)
        say(bench.text(point, result))
        if output is not None and stored.is_folder(output):
            with files.writing(output):
                stored.save(output, result)
        elif output is not None:
            files.write_whole(output, document(result) + "\n")
    if chart_path is not None:
        files.write_whole(chart_path, bench.chart(result))
    say(bench.closing(result))
    if as_json:
        print(document(result))


@bench.command("chart")
def chart(
    result: Annotated[Path, typer.Argument(help="What kvsift bench attention --out wrote.")],
    output: Annotated[Path, typer.Option("--out", "--output", help="Draw here: .svg, or .png.")],
) -> None:
    """Draw attention over context length: microseconds with floors, and speed-up."""
    from kvsift_lab.bench.chart import attention_chart
    from kvsift_lab.stored import load as load_result

    files.require_writable(output, "--out")
    if output.suffix not in (".svg", ".png"):
        raise InvalidValue(f"--out {output}: charts are drawn as .svg or .png.")
    measured = load_result(result)
    if not isinstance(measured, dict) or measured.get("kind") != "attention":
        raise WrongFile(f"the result {result} is not a result of kvsift bench attention.")
    files.write_whole(output, attention_chart(measured, output.suffix.removeprefix(".")))
