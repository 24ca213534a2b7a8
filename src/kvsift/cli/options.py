"""Options that several commands share, alone and in groups: a group is a dataclass, and one parameter of a command.

Annotations are evaluated here, once: as text, each command would compile those of its groups again.
Groups are neither compared nor printed; the methods for that would be compiled at every start.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, cleandoc, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.errors import UnusedOption

if TYPE_CHECKING:
    from kvsift.engine.sampling import Sampling

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hugging Face model directory, a GGUF file, or a model's name on huggingface.co, such as Qwen/Qwen3-4B, "
        "or NAME:FILE.gguf for a GGUF file of it. Without it, the embedded model, which only finds planted facts.",
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Hugging Face directory or name, or a GGUF file; without it, the embedded model."),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="System message, for models with a chat template.")]
PlanOption = Annotated[
    str,
    typer.Option(
        "--plan",
        help="How to choose what is read, e.g. quest:budget=1024 (kvsift methods lists all), or a TOML file with a "
        "\\[plan] table; or auto, what kvsift tune found for the model, else the default plan with a guard. The "
        "budget is the most tokens that a head reads for a query, the first 4 (sinks) and the last 64 (window) among "
        "them.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Round linear weights when they are loaded: int4 for GPUs and CPUs, int8 for CPUs, fp8 for recent GPUs, "
        "fp8_head there the head too.",
    ),
]
KVDtypeOption = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        help="int8: keep keys and values in 8 bits, in about half the memory of 16 bits; auto: in --dtype.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail if a sparse plan skipped nothing.")]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
ChunkOption = Annotated[
    int | None,
    typer.Option("--chunk-size", min=1, max=65_536, help="Prompt tokens per forward pass; 8192 on a GPU, else 512."),
]
ProbeOption = Annotated[
    int,
    typer.Option(
        "--probe-every",
        min=0,
        help="Compare every Nth decode step with exact attention, for recovery: the share of it that was on the tokens "
        "that were read; 0: never.",
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        help="Draw from the likeliest tokens that together have this probability, with a temperature above 0.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Seed of the random draws; used when the temperature is above 0.")
]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Answers of dense attention, token by token: the plan drafts them.")
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Answers whose bits do not depend on others; --exact turns it on, and kvsift serve needs it for exact "
        "answers on a GPU.",
    ),
]
StopOption = Annotated[
    str | None,
    typer.Option("--stop", help="End the text at this text, or at the special token of this name; it is left out."),
]
SpecialTokensOption = Annotated[
    bool | None,
    typer.Option(
        "--skip-special-tokens/--keep-special-tokens",
        help="Leave all special tokens out of the text, or none; by default those that begin, end or pad a text.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no table of numbers.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print all numbers, not only the main ones.")]
DenseBelowOption = Annotated[
    str,
    typer.Option(
        "--dense-below",
        help="Decode contexts of fewer tokens densely, as if there were no plan; auto: where that is "
        "measured to be faster.",
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads on the processor; as many as torch uses by default.")
]

PlacementOption = Annotated[
    str,
    typer.Option(
        "--placement",
        help="Where the KV cache is: device; split: host memory, attended there; offload: host memory, attended on the "
        "device; host: host memory, model on the CPU. With settings: offload:device_cache=8192:host_values=int8.",
    ),
]

EMBEDDED_NOTE = (
    "the embedded model only copies planted facts (codes, names, dates) out of a text and is no language model. For "
    "real answers name one, for instance --model Qwen/Qwen3-4B."
)


@dataclass(frozen=True, eq=False, repr=False)
class DeviceOptions:
    """Options of ``LLM`` about the device."""

    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    quantize: QuantizeOption = None
    kv_dtype: KVDtypeOption = "auto"
    chunk_size: ChunkOption = None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of ``LLM``."""
        return asdict(self)


@dataclass(frozen=True, eq=False, repr=False)
class EngineOptions(DeviceOptions):
    """Options of ``LLM`` about the device, decode and the placement."""

    probe_every: ProbeOption = 16
    dense_below: DenseBelowOption = "auto"
    placement: PlacementOption = "device"
    deterministic: DeterministicOption = False

    def keywords(self, exact: bool = False) -> dict[str, Any]:
        """Return the keywords of ``LLM``, which answers exactly if asked to."""
        is_number = self.dense_below.isdecimal()
        dense_below = int(self.dense_below) if is_number else self.dense_below
        return {**asdict(self), "dense_below": dense_below, "deterministic": self.deterministic or exact}


@dataclass(frozen=True, eq=False, repr=False)
class SamplingOptions:
    """Options of ``Sampling``, and how what is sampled becomes an answer."""

    temperature: TemperatureOption = 0.0
    top_p: TopPOption = 1.0
    seed: SeedOption = 0
    exact: ExactOption = False
    skip_special_tokens: SpecialTokensOption = None

    def sampling(self) -> "Sampling":
        """Return the sampling; imports torch."""
        from kvsift.engine.sampling import Sampling

        sampling = Sampling(self.temperature, self.top_p, self.seed)
        if self.top_p < 1 and self.temperature == 0:
            raise UnusedOption(
                f"--top-p {self.top_p} has no effect without --temperature above 0; give one, or leave it out."
            )
        return sampling


@dataclass(frozen=True, eq=False, repr=False)
class PrintOptions:
    """Options about what a command prints."""

    quiet: QuietOption = False
    verbose: VerboseOption = False
    as_json: JsonOption = False


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a group by the options of the group, in its place."""
    given = signature(command, eval_str=True)
    annotations: dict[str, Any] = {name: parameter.annotation for name, parameter in given.parameters.items()}
    groups = {name: group for name, group in annotations.items() if isinstance(group, type) and is_dataclass(group)}
    options: list[Parameter] = []
    for name, parameter in given.parameters.items():
        members = signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        options += [member.replace(kind=Parameter.KEYWORD_ONLY) for member in members]

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    expanded.__signature__ = given.replace(parameters=options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")  # of --help, which would keep the ends of their lines
    expanded.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return expanded


def use_threads(threads: int | None) -> None:
    """Set the number of threads of torch and of the compiled core; None changes nothing."""
    if threads is not None:
        from kvsift.threads import use

        use(threads)
