"""A vLLM plugin: plans inside vLLM's own attention backends. Nothing outside this package imports vllm."""
