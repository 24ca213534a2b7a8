"""kvsift bench split: decoding with KV in host memory, by index."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.errors import InputError, unknown
from kvsift_lab.bench import recipe as r

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
        from kvsift.models.transformers_random import SHAPES
        from kvsift.plan.placement import Placement

        Placement("split", host_values=self.host_values)
        if self.layers is not None and not self.layers > 0:
            raise InputError(f"layers={self.layers} must be 1 or more.")
        if self.shape not in SHAPES:
            raise unknown("shape", self.shape, SHAPES)
        r.require_some(self.contexts, names="context")
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("kind", kind, KINDS)
        if not 0 < self.scanned < 1:
            raise InputError(f"scanned={self.scanned} must be a share of the keys, between 0 and 1.")

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
