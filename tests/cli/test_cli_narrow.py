"""Tables of plans on terminals of any width: nothing is cut off."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from kvsift.cli.numbers_table import header, print_fitted, side_by_side

PLANS = ["dense", "quest:budget=2048", "sketch:budget=1024:dense_layers=none", "snapkv:budget=128", "tova:budget=64"]
LABELS = ["TTFT (document cached)", "visible tokens (sparse layers)"]
CELL = "51.7 %, 2 of 5 layers dense"


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("width", [32, 40, 80, 81, 120, 300])
def test_every_plan_and_label_is_there_whole(width: int, count: int) -> None:
    console = Console(width=width, record=True, highlight=False)
    groups = list(side_by_side(PLANS[:count], width))
    assert [plan for group in groups for plan in group] == PLANS[:count]
    for group in groups:
        table = Table("", *(header(plan) for plan in group))
        for label in LABELS:
            table.add_row(label, *[CELL] * len(group))
        print_fitted(console, table)
        lines = console.export_text(clear=True).splitlines()
        assert len({len(line) for line in lines}) == 1, "all edges are there"
        assert len(lines[0]) <= width
        columns = zip(*(line.strip("┃│").replace("│", "┃").split("┃") for line in lines if line[0] in "┃│"))
        labels, *plans = ("".join(part.strip() for part in column) for column in columns)
        assert labels.replace(" ", "") == "".join(LABELS).replace(" ", "")
        assert [plan.replace(" ", "") for plan in plans] == [plan + 2 * CELL.replace(" ", "") for plan in group]
