"""Charts by matplotlib, as SVG inside of a page. Their colours are those of page.css, which follow light and dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from math import log2
from typing import Any, NamedTuple

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal
from matplotlib.transforms import ScaledTranslation

from kvsift_lab.eval.page.parts import rendered

NUM_COLOURS = 10  # of page.css
PIXELS = 72  # per inch, as in an SVG of matplotlib
NAMES = ("ink", "soft", "line", "panel", "link", "mark", "seen", *(f"c{number}" for number in range(NUM_COLOURS)))
COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(NAMES, 1)}  # stand-ins of variables of page.css
INK, SOFT, LINE = (COLOURS[name] for name in ("ink", "soft", "line"))
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "kvsift", "figure.dpi": PIXELS, "font.size": 11,
    "figure.facecolor": "none", "axes.facecolor": "none", "text.color": INK, "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.bottom": False, "ytick.left": False,
    "axes.grid": True, "grid.color": LINE, "grid.alpha": 0.6, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
}  # fmt: skip
SIZE = 380, 250  # pixels of a line chart
SHIFT = 3.2  # pixels between marks of series at the same x
MARKS = "osD^"
IN_PLACE = [Normal()]  # draws each mark where it is: a reference to an id would be shared by the charts of a page


class ChartPoint(NamedTuple):
    """One value with its interval, which is the value itself if there is none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A line. ``style`` is an index of colour and mark; lines of references are dotted."""

    name: str
    points: Sequence[ChartPoint]
    style: int
    is_reference: bool = False

    @property
    def colour(self) -> str:
        return COLOURS[f"c{self.style % NUM_COLOURS}"]

    @property
    def look(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": ":" if self.is_reference else "-"}

    @property
    def mark(self) -> dict[str, Any]:
        return {"marker": MARKS[self.style % len(MARKS)], "facecolors": self.colour, "edgecolors": COLOURS["panel"]}


class Level(NamedTuple):
    """A horizontal level."""

    name: str
    y: float


def settings() -> Any:
    """Return a context in which figures of pages are drawn and saved."""
    return rc_context(SETTINGS)


def figure_of(width: float, height: float) -> Figure:
    """Return a figure of so many pixels, in the settings of pages."""
    return Figure(figsize=(width / PIXELS, height / PIXELS), layout="constrained")


def mark(axis: Axes, x: float, y: float, size: float, hint: str = "", **look: Any) -> None:
    """Draw a mark of so many square pixels, which shows a hint where the pointer is."""
    axis.scatter(x, y, size, path_effects=IN_PLACE, gid=f"hint {hint}", zorder=3, **look)


def inline(figure: Figure, title: str = "", description: str = "") -> Markup:
    """Return a figure for a page, with its title and description for screen readers, to whom one without is nothing.

    A ``mark`` shows its hint, and an artist whose ``url`` has words after the address shows them.
    """
    text = StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue().partition("<svg")[2]
    svg = re.sub(r' width="[^"]*"| height="[^"]*"| xmlns\S*="[^"]*"| version="[^"]*"', "", svg, count=5)
    svg = re.sub(r"<defs>.*?</defs>|<!--.*?-->|\n\s*| font-family: [^;]*;", "", svg, flags=re.DOTALL)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r'<g id="hint ([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<a xlink:href="(\S+?)(?: ([^"]*))?" target="_blank">', _link, svg)
    svg = re.sub(r' id="[^"]*"| clip-path="[^"]*"', "", svg)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    attributes, _, content = svg.partition(">")
    if not title:
        return Markup(f'<svg{attributes} aria-hidden="true">{content}')
    about = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return Markup(f'<svg{attributes} role="img">{about}{content}')


def _link(match: re.Match[str]) -> str:
    return f'<a href="{match[1]}" tabindex="-1">' + (f"<title>{match[2]}</title>" if match[2] else "")


def line_chart(
    title: str, x_title: str, y_title: str, series: Sequence[Series], levels: Sequence[Level] = ()
) -> Markup:
    """Return lines over a logarithmic x axis, with intervals and a y axis from 0 to 1; the description lists every
    number."""
    numbers, xs = [], [point.x for curve in series for point in curve.points] or [1.0]
    ticks = [2**power for power in range(round(log2(min(xs))), round(log2(max(xs))) + 1)]
    low, high = min(xs + ticks), max(xs + ticks)
    margin = (high / low) ** 0.08 if low < high else 1.4
    with settings():
        figure = figure_of(*SIZE)
        axis = figure.subplots()
        for index, curve in enumerate(series):
            offset = ScaledTranslation(SHIFT * (index - (len(series) - 1) / 2) / PIXELS, 0, figure.dpi_scale_trans)
            shifted: dict[str, Any] = {"transform": axis.transData + offset}
            points, texts = sorted(curve.points), []
            axis.plot([p.x for p in points], [p.y for p in points], linewidth=2, **curve.look, **shifted)
            for p in points:
                texts.append(f"{p.y:.2f} ({p.low:.2f} to {p.high:.2f}) at {p.x:,.0f}")
                axis.vlines(p.x, p.low, p.high, curve.colour, linewidth=1.5, alpha=0.6, **shifted)
                mark(axis, p.x, p.y, 34, f"{curve.name}: {texts[-1]}", **curve.mark, **shifted)
            numbers.append(f"{curve.name}: {', '.join(texts)}")
        for number, level in enumerate(sorted(levels, key=lambda level: -level.y)):
            axis.axhline(level.y, color=SOFT, linestyle=":", linewidth=1)
            side = "top" if number % 2 else "bottom"
            beside: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": side}
            axis.annotate(level.name, (1, level.y), xycoords=("axes fraction", "data"), annotation_clip=False, **beside)
            numbers.append(f"{level.name}: {level.y:.2f}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set(xlabel=x_title, ylabel=y_title, xlim=(low / margin, high * margin), ylim=(0, 1))
        axis.set_yticks((0, 0.25, 0.5, 0.75, 1))
        return inline(figure, title, "; ".join(numbers))


def legend(series: Sequence[Series]) -> Markup:
    """Return the names of series beside their lines, shared by several charts."""
    keys = []
    with settings():
        for curve in series:
            figure = figure_of(34, 12)
            axis = figure.subplots(subplot_kw={"frame_on": False, "xlim": (0, 1), "ylim": (-1, 1)})
            axis.set_axis_off()
            axis.plot((0, 1), (0, 0), linewidth=2, **curve.look)
            mark(axis, 0.5, 0, 34, **curve.mark)
            keys.append((curve.name, inline(figure)))
    return rendered("legend.html", keys=keys)
