"""Where rows were made before: see cache.py."""

from cache import make_row, row_to_tensors

__all__ = ["make_row", "row_to_tensors"]
