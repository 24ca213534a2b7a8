"""The commands of the laboratory, run as those of the package are."""

from cli.conftest import model, on_the_cpu, refused, run, text
from lab.eval.conftest import forked_workers

__all__ = ["forked_workers", "model", "on_the_cpu", "refused", "run", "text"]
