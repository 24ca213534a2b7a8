"""What every part of the page is made of: escaping, tables, sections, and the style of it all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

COLOURS = ("#2f6fb0 #7ab4ea", "#c2570c #f3a25c", "#2e7d4f #74c893", "#8a4fae #c79be4", "#b3323f #f08a92",
           "#0f7f86 #5fcbd1", "#8a6d00 #e0c04c", "#5b5ea6 #a5a8ee", "#a83279 #ee8fc6", "#4d6b1f #a9cc6d")  # fmt: skip
"""Light and dark, told apart by hue and by lightness."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1d2430;--soft:#5a6473;--line:#d5dae2;--panel:#f6f7f9;--warn:#fff4dc;
--heat0:#eef2f7;--heat1:#1f5fa8;--heatink:#fff;%s}
@media (prefers-color-scheme:dark){:root{--bg:#14181f;--ink:#e6eaf0;--soft:#9aa5b5;--line:#333c49;--panel:#1c222b;
--warn:#3a3018;--heat0:#232b36;--heat1:#8cc2f5;--heatink:#10151c;%s}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}h1{font-size:26px;margin:0 0 4px}
h2{font-size:20px;margin:40px 0 8px;border-top:1px solid var(--line);padding-top:20px}
h2.result{font-size:23px}h3{font-size:15px;margin:18px 0 6px}p{margin:6px 0;max-width:80ch}.soft{color:var(--soft)}
.warnings{background:var(--warn);border-radius:6px;padding:10px 14px 10px 30px;margin:10px 0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%%,350px),1fr));gap:14px}
.maps{display:flex;flex-wrap:wrap;gap:14px}figure{margin:0;background:var(--panel);border-radius:8px;padding:10px}
figcaption{font-size:13px;font-weight:600;overflow-wrap:anywhere}.maps figure{max-width:100%%}
svg{display:block;width:100%%;height:auto}.maps svg{width:auto;max-width:100%%}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}svg .axis{stroke:var(--line)}
svg .level{paint-order:stroke;stroke:var(--panel);stroke-width:3px;fill:var(--ink)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:6px 0 12px;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{width:34px;height:12px;flex:none}
.wide{overflow-x:auto;margin:6px 0 14px}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}
caption{text-align:left;font-weight:600;padding:6px 0}tr.ref td{color:var(--soft)}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}
pre{background:var(--panel);border-radius:8px;padding:12px;overflow-x:auto;font-size:12px}
"""


def escaped(text: Any) -> str:
    """Text for HTML."""
    return escape(str(text))


def document(title: str, body: str) -> str:
    """A whole page."""
    light, dark = (
        "".join(f"--c{index}:{pair.split()[mode]};" for index, pair in enumerate(COLOURS)) for mode in (0, 1)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE % (light, dark)}</style></head>"
        f"<body><main><h1>{escaped(title)}</h1>"
        "<p class=soft>Intervals are 95 %; questions that share a context count as fewer. "
        "Visible tokens are counted from selections, not taken from the budget.</p>"
        f"{body}</main></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A part of the page."""
    return f"<section><h2>{escaped(title)}</h2>{body}</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", soft: Iterable[int] = ()) -> str:
    """A table; ``soft`` are the numbers of rows that are references."""
    dimmed = set(soft)
    cells = "".join(
        f"<tr{' class=ref' if index in dimmed else ''}>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>"
        for index, row in enumerate(rows)
    )
    titles = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    named = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<div class=wide><table>{named}<thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>"


def details(title: str, body: str, is_open: bool = False) -> str:
    """A part that is folded away at first."""
    return f"<details{' open' if is_open else ''}><summary>{escaped(title)}</summary>{body}</details>"


def figure(title: str, drawing: str) -> str:
    """A drawing under its name."""
    return f"<figure><figcaption>{escaped(title)}</figcaption>{drawing}</figure>"
