"""Indexes over the keys of one layer of one sequence: search for the keys of the largest inner products."""
