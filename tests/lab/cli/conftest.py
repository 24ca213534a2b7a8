"""The commands of the laboratory, run as those of the package are."""

from cli.conftest import model, on_the_cpu, refused, run, text

__all__ = ["model", "on_the_cpu", "refused", "run", "text"]
