"""Style sheet of the pages: light or dark like the screen, readable from 400 pixels on, without requests."""

from __future__ import annotations

COLOURS = ("#2f6fb0 #7ab4ea", "#c2570c #f3a25c", "#2e7d4f #74c893", "#8a4fae #c79be4", "#b3323f #f08a92",
           "#0f7f86 #5fcbd1", "#8a6d00 #e0c04c", "#5b5ea6 #a5a8ee", "#a83279 #ee8fc6", "#4d6b1f #a9cc6d")  # fmt: skip
"""Light and dark colours, distinct by hue and by lightness."""


def style_sheet() -> str:
    """Return the style sheet."""
    light, dark = (
        "".join(f"--c{index}:{pair.split()[mode]};" for index, pair in enumerate(COLOURS)) for mode in (0, 1)
    )
    return RULES.replace("LIGHT", light).replace("DARK", dark)


RULES = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1d2430;--soft:#5a6473;--line:#d5dae2;--panel:#f6f7f9;--warn:#fff4dc;
--link:#1c5d9e;--heat0:#eef2f7;--heat1:#1f6fc0;--mark:#d9480f;--seen:#dfe8f3;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#14181f;--ink:#e6eaf0;--soft:#9aa5b5;--line:#333c49;--panel:#1c222b;
--warn:#3a3018;--link:#8cc2f5;--heat0:#1f2630;--heat1:#3f86d8;--mark:#ff8a5c;--seen:#25384f;DARK}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:break-word}
main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:36px 0 8px;border-top:1px solid var(--line);padding-top:20px}
h2.result{font-size:23px}h3{font-size:15px;margin:18px 0 6px}p{margin:6px 0;max-width:100ch}.soft{color:var(--soft)}
a{color:var(--link)}.lead{font-size:19px;line-height:1.4;margin:10px 0}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:10px 0;font-size:14px}
.warnings{background:var(--warn);border-radius:6px;padding:10px 14px 10px 30px;margin:10px 0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--column,350px)),1fr));gap:14px}
.side{display:flex;flex-wrap:wrap;gap:0 28px}.side>*{max-width:100%}
figure{margin:0;background:var(--panel);border-radius:8px;padding:10px;min-width:0}
figcaption{font-size:13px;font-weight:600;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
svg .axis{stroke:var(--line)}svg .level{fill:var(--ink)}
svg .name{fill:var(--ink);paint-order:stroke;stroke:var(--panel);stroke-width:3px}
svg .onfront{font-weight:700}td small{color:var(--soft);display:inline-block;min-width:5ch}
.scroll,.wide{overflow-x:auto}.scroll svg{min-width:640px}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:6px 0 12px;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{width:34px;height:12px;flex:none}
.wide{margin:6px 0 14px}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}
th[scope=row]{font-weight:400;text-align:left;white-space:normal;min-width:13ch;max-width:52ch}
thead th:first-child,.text{text-align:left}td.text{white-space:normal;overflow-wrap:anywhere;min-width:11ch}
.caption{font-size:13px;font-weight:600;margin:12px 0 2px}tr.ref>*{color:var(--soft)}
tr .heat,tr .tint,.tint small{color:var(--ink)}
td.heat{padding:2px 4px;min-width:34px;text-align:center;border:1px solid var(--bg);border-radius:3px;
background:color-mix(in srgb,var(--heat1) var(--v),var(--heat0))}
td.tint{background:color-mix(in srgb,var(--heat1) var(--v),transparent)}
.dot i,.bar i{display:inline-block;position:relative;width:72px;height:14px;margin-left:11px;vertical-align:-2px;
background:linear-gradient(var(--line),var(--line)) 0 50%/100% 1px no-repeat}
.dot i::before{content:"";position:absolute;left:var(--low);right:calc(100% - var(--high));top:6px;height:2px;
background:var(--c0);opacity:.55}
.dot i::after{content:"";position:absolute;left:calc(var(--mean) - 4px);top:3px;width:8px;height:8px;border-radius:4px;
background:var(--c0)}.ref .dot i::before,.ref .dot i::after{background:var(--soft)}
.dot b,.bar b{position:absolute;left:var(--dense);top:-3px;height:20px;
border-left:1px dashed var(--ink)}
.bar i{width:min(40vw,420px);background:none}.bar i::before{content:"";position:absolute;inset:1px auto 1px 0;
width:var(--mean);background:var(--c0);border-radius:2px}.ref .bar i::before{background:var(--soft)}
@media(max-width:600px){tr:has(.bar){display:grid;grid-template-columns:1fr 15ch 9ch}table:has(.bar){width:100%}
.bar{grid-column:1/-1}
.bar i{width:calc(100% - 24px)}}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}
.answer a,.answer span{white-space:pre-wrap}.answer .here{background:color-mix(in srgb,var(--mark) 30%,transparent);
border-radius:3px}.map svg{min-width:900px}.map svg text{font-size:10px}.map a text{fill:var(--link)}
svg .seen{fill:var(--seen)}svg .heat{fill:var(--mark)}svg .oracle{fill:var(--c0)}
.passage{border-left:3px solid var(--line);margin:10px 0;padding:0 0 0 12px;white-space:pre-wrap;overflow-wrap:anywhere}
.passage:target{border-color:var(--mark)}tr:target>*{background:color-mix(in srgb,var(--mark) 20%,transparent)}
mark{color:inherit;border-radius:2px;background:color-mix(in srgb,var(--mark) var(--v),transparent)}
pre{background:var(--panel);border-radius:8px;padding:12px;font-size:12px;white-space:pre-wrap;overflow-wrap:anywhere}
"""
