"""Tiny models on the CPU."""

from engine.fixtures import chatty, directory, eager_pace, gemma, llama, no_weights, on_the_cpu  # noqa: F401
