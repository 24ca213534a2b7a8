"""The laboratory of kvsift: evaluation, benchmarks and studies, and the documentation that is rendered from them."""
