"""The page at /: what is served, and where."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CSP = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
LINKS = "/v1/models", "/health", "/metrics", "/openapi.json"


def page(model: str, plans: Sequence[str]) -> str:
    """Return the HTML for a model, which is empty while it is loaded, and its plans, the default first."""
    named = f"The model is <b>{escape(model)}</b>." if model else "The model is being loaded."
    plan_list = "".join(f"<li><code>{escape(plan)}</code></li>" for plan in plans)
    links = "".join(f'<li><a href="{link}">{link}</a></li>' for link in LINKS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvsift</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark"></head>'
        f"<body><h1>kvsift</h1><p>{named} Clients of OpenAI's API use the base URL <code>/v1</code>: "
        "<code>POST /v1/chat/completions</code> and <code>POST /v1/completions</code>.</p>"
        f"<h2>Plans</h2><ul>{plan_list}</ul><h2>Routes</h2><ul>{links}</ul></body></html>"
    )
