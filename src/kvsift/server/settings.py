"""Settings of the server, as the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from kvsift.errors import MissingInput, UnreadableFile
from kvsift.server.api_errors import ApiError

PlanText = str | Mapping[str, Any]
KEY_VARIABLE = "KVSIFT_API_KEY"
AUTO = "auto"  # plan.syntax has it, and imports torch


@dataclass(frozen=True)
class ServerSettings:
    """What a server was started with.

    Attributes:
        model: keywords of ``kvsift.LLM`` besides the plan and the decode path.
        plan: plan of requests that name none.
        plans: further plans that requests may name.
        threads: the engine's threads on the processor; None: as many as torch uses.
        keep_tokens: size of the prefix cache, in tokens of answered prompts.
        reserve_tokens: tokens to allocate memory and capture steps for before the first request, where steps are
            captured; None: as many as requests may need at once, or as fit; 0: none.
        host, port: the address; port 0 is any free one.
        keys: API keys, one of which every request must carry; none: no key is asked for.
        names: names of the model for clients, the first one in answers; none: the name of its folder.
        hosts: further names under which clients may address the server.
        origins: origins of web pages that may use the server from a browser.
        max_waiting: requests that may wait for the engine; further ones are refused.
        drain_s: seconds that answers in progress have after SIGTERM.
        documents: folder that keeps documents between starts; None: they end with the server.
        tool_parser: format in which the model calls tools (``tool_calls``); None: that of its chat template.
        is_strict: refuse requests with unknown fields; else those without effect are ignored.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    plan: PlanText = "sketch:budget=1024"
    plans: Sequence[PlanText] = ()
    threads: int | None = None
    keep_tokens: int = 32_768
    reserve_tokens: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Sequence[str] = ()
    names: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    max_waiting: int = 256
    drain_s: float = 30.0
    documents: Path | None = None
    tool_parser: str | None = None
    is_strict: bool = False

    @property
    def salts(self) -> list[str]:
        """Salts of the documents that are served: one for each API key, "" without any key."""
        return [salt_of(key.encode()) for key in self.keys] or [""]

    def engine(self) -> dict[str, Any]:
        """Return what the engine process needs, ready for JSON."""
        return {
            "model": dict(self.model),
            "plans": [self.plan, *self.plans, "dense"],
            "threads": self.threads,
            "keep_tokens": self.keep_tokens,
            "reserve_tokens": self.reserve_tokens,
        }


class PlanList:
    """The plans that requests may name: those that the server was started with, and dense. A plan ``auto`` is listed as
    what it stands for. The plan of a request is compared as text and never parsed, so it opens no file.

    Args:
        given: plans that the server was started with; the first is that of requests without one.
        resolved: the same plans as the engine writes them.
    """

    def __init__(self, given: Sequence[PlanText], resolved: Sequence[str]) -> None:
        spellings = [spelling(text) if isinstance(text, str) else "" for text in given]
        pairs = [*enumerate(spellings), *((i, spelling(text)) for i, text in enumerate(resolved))]
        self._indices = {text: index for index, text in reversed(pairs) if text}
        both = zip(given, resolved, strict=True)
        names = (text if isinstance(text, str) and text.strip() != AUTO else name for text, name in both)
        self.names = list(dict.fromkeys(names))

    def index(self, plan: str | None) -> int:
        """Return the place of a plan; None is the first.

        Raises:
            ApiError: 400 for any other plan, with the list.
        """
        if plan is None:
            return 0
        if (index := self._indices.get(spelling(plan))) is None:
            text = f"the plan {plan!r} is not one of this server's: {'; '.join(self.names)}."
            raise ApiError(400, text, "plan_not_allowed", "sparsity")
        return index


def spelling(plan: str) -> str:
    """Return a plan without white space, its rules and their options in order."""
    rules = ("".join(rule.split()).split(":") for rule in plan.split(","))
    return ",".join(sorted(":".join([head, *sorted(options)]) for head, *options in rules))


def salt_of(key: bytes) -> str:
    """Return the name of an API key, from which it cannot be found."""
    return blake2b(key, digest_size=16).hexdigest()


def read_keys(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """Return the API keys of a file, one per line besides comments (#), and of the environment.

    Raises:
        InputError: if the file cannot be read or holds none.
    """
    keys = [environment[KEY_VARIABLE].strip()] if environment.get(KEY_VARIABLE, "").strip() else []
    if file is None:
        return keys
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"the file of API keys {file} cannot be read: {error}.") from None
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise MissingInput(
            f"the file of API keys {file} has no key; give one per line. Lines that begin with # are none."
        )
    return keys + found


def check_exposure(host: str, keys: Sequence[str], is_open: bool) -> None:
    """Refuse an address that other machines reach without an API key (``InputError``), unless that is asked for."""
    address = address_of(host)
    is_loopback = host == "localhost" if address is None else address.is_loopback
    if not keys and not is_open and not is_loopback:
        raise MissingInput(
            f"--host {host} lets other machines in, and there is no API key. Set {KEY_VARIABLE}, give --api-key-file, "
            "or, in a network where everybody may use the model, --open."
        )


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a host is written as; None if it has a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None
