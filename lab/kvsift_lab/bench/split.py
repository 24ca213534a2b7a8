"""kvsift bench split: decoding with KV in host memory, by index; recipe and report."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from kvsift.errors import InvalidValue
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench import report
from kvsift_lab.bench.report import Point, Variant, ms

KINDS = ("flat", "flat_int8", "graph", "ivf", "quest", "offload", "sketch", "sketch_device", "dense")
CAPTURED = {"sketch": "offload", "sketch_device": "device"}  # kinds whose steps are captured: placement
KINDS_HELP = (
    "Indexes: flat, flat_int8, graph, ivf (needs faiss); quest: pages scored and attended by the host; offload: the "
    "same pages, copied to the device and attended by it, composed; sketch: captured steps that read KV over the bus; "
    "sketch_device: the same with KV on the device; dense: KV on the device, composed."
)


@dataclass(frozen=True)
class SplitRecipe(r.BenchRecipe):
    """Decoding of a model with random weights whose KV is in host memory, all but what is always visible."""

    measured_by = "kvsift_lab.bench.split_measure:SplitBench"

    contexts: tuple[int, ...] = r.contexts("128K,512K")
    kinds: tuple[str, ...] = r.option(",".join(KINDS), KINDS_HELP, parse=r.names)
    shape: str = r.shape()
    top: int = r.option(100, "Keys per query head that an index finds.", minimum=1)
    scanned: float = r.option(0.02, "Share of the keys that a search of the graph scores.")
    budget: int = r.option(128, "Tokens that a head sees by sketches.", minimum=70)
    tokens: int = r.option(8, "Timed, of each kind.", minimum=1)
    layers: int | None = r.option(
        None, "Of the model, where all of them are too many for the host.", kind=int | None, minimum=1
    )
    host_values: str = r.option("model", "model: in the model's dtype; int8: packed, a scale per token and head.")
    device: str = r.device()
    threads: int | None = r.threads()

    def __post_init__(self) -> None:
        from kvsift.plan.placement import Placement
        from kvsift_lab.bench.random_models import SHAPES

        Placement("split", host_values=self.host_values)
        r.require_known("shape", [self.shape], SHAPES)
        r.require_some(self.contexts, names="context")
        r.require_known("kind", self.kinds, KINDS)
        if not 0 < self.scanned < 1:
            raise InvalidValue(f"scanned={self.scanned} must be a share of the keys, between 0 and 1.")

    def plan(self, kind: str) -> str:
        """Return the plan of a kind."""
        if kind == "dense":
            return "dense"
        if kind in CAPTURED:
            return f"sketch:budget={self.budget}:dense_layers=none"
        if kind in ("quest", "offload"):
            return "quest:budget=1024:dense_layers=none"
        index = "flat" if kind in ("graph", "ivf") else kind  # the shared index replaces it
        return f"retrieval_attention:index={index}:audit=0:budget={640 + self.top}:dense_layers=none"


def point_text(point: Point) -> str:
    """Render all kinds of a context: times per token, and what of KV is on the device; then what captured steps take.

    Busy times of host and device have no columns where they were not measured, nor has the device cache without hits.
    """

    def cells(variant: Variant) -> dict[str, str]:
        row = {
            "ms per token": ms(median(variant["samples_s"]), ".1f"),
            "KV on the device": _gib(variant["kv_bytes_on_device"]),
        }
        if "both_s" in variant:
            row |= {f"{who} ms": ms(variant[f"{who}_s"], ".1f") for who in ("host", "device")}
            row["both at once ms"] = ms(variant["both_s"])
        if variant["device_cache_hits"] is not None:
            row["selected tokens on the device"] = f"{variant['device_cache_hits']:.0%}"
        return row

    captured = [variant for variant in point.get("variants", []) if "decode_bytes" in variant]
    text = report.point_text(f"{point['context']:,} tokens", point, cells)
    return "\n".join([text, *map(captured_text, captured)])


def captured_text(variant: Variant) -> str:
    """Render what the bus carried, and the device's memory."""
    text = f"{variant['name']}: device memory besides weights {_gib(variant['decode_bytes'])} decoding, "
    text += f"{_gib(variant['peak_bytes'])} with a chunk of {variant['chunk_tokens']:,} prompt tokens "
    text += f"({variant['chunk_s']:.2f} s)"
    if "gather_rate" in variant:
        text += (
            f"; bus {variant['bus_bytes'] / 2**20:.1f} MiB per token, at least {ms(variant['bus_floor_s'])} ms "
            f"(gathers {variant['gather_rate'] / 1e9:.1f}, copies {variant['copy_rate'] / 1e9:.1f} GB/s)"
        )
    if "same_tokens" in variant:
        text += f"; {'the same' if variant['same_tokens'] else 'OTHER'} tokens as on the device"
    return text


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
