"""Indexes over the keys of one layer of one sequence: which keys have the largest inner product with a query."""
