"""Groups of options that several commands share: each is a dataclass, and one parameter of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, cleandoc, signature
from typing import TYPE_CHECKING, Any

from kvsift.cli import options as o

if TYPE_CHECKING:
    from kvsift.engine.sampling import Sampling


@dataclass(frozen=True)
class DeviceOptions:
    """Options of ``LLM`` about the device."""

    device: o.DeviceOption = "auto"
    dtype: o.DtypeOption = "auto"
    chunk_size: o.ChunkOption = None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of ``LLM``."""
        return asdict(self)


@dataclass(frozen=True)
class EngineOptions(DeviceOptions):
    """Options of ``LLM`` about the device, decode and the placement."""

    probe_every: o.ProbeOption = 16
    dense_below: o.DenseBelowOption = "auto"
    placement: o.PlacementOption = "device"
    deterministic: o.DeterministicOption = False

    def keywords(self, exact: bool = False) -> dict[str, Any]:
        """Return the keywords of ``LLM``, which answers exactly if asked to."""
        is_number = self.dense_below.isdecimal()
        dense_below = int(self.dense_below) if is_number else self.dense_below
        return {**asdict(self), "dense_below": dense_below, "deterministic": self.deterministic or exact}


@dataclass(frozen=True)
class SamplingOptions:
    """Options of ``Sampling``, and how what is sampled becomes an answer."""

    temperature: o.TemperatureOption = 0.0
    top_p: o.TopPOption = 1.0
    seed: o.SeedOption = 0
    exact: o.ExactOption = False
    skip_special_tokens: o.SpecialTokensOption = None

    def sampling(self) -> Sampling:
        """Return the sampling; imports torch."""
        from kvsift.engine.sampling import Sampling

        return Sampling(self.temperature, self.top_p, self.seed)


@dataclass(frozen=True)
class PrintOptions:
    """Options about what a command prints."""

    quiet: o.QuietOption = False
    verbose: o.VerboseOption = False
    as_json: o.JsonOption = False


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a group by the options of the group, in its place."""
    parameters = signature(command, eval_str=True).parameters
    annotations: dict[str, Any] = {name: parameter.annotation for name, parameter in parameters.items()}
    groups = {name: group for name, group in annotations.items() if isinstance(group, type) and is_dataclass(group)}
    options: list[Parameter] = []
    for name, parameter in parameters.items():
        members = signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        options += [member.replace(kind=Parameter.KEYWORD_ONLY) for member in members]

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    expanded.__signature__ = signature(command).replace(parameters=options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")  # of --help, which would keep the ends of their lines
    expanded.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return expanded
