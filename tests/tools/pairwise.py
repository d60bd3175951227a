"""Crosses of which a few cases always run, and the others with `pytest -m slow`.

Every engine meets one objective in all settings (tests/processes/test_engines.py); an objective
meets two engines, a family two others, and so on: each pair of neighbours somewhere.
Where a cell takes milliseconds, `one_of_three` leaves the others out without a mark.
"""

import os
from itertools import product

import pytest

TWO = ("ddp", "fsdp", "zero2", "zero3")  # engines of two processes
RANKS = (0, 4)  # of adapters; 0: all weights


def usual(fast: list, every: list) -> list:
    """Parameters of a test: those of `every` that are not in `fast` are slow."""
    assert set(fast) <= set(every)
    marks = {case: () if case in fast else pytest.mark.slow for case in every}
    return [pytest.param(*case, marks=mark) for case, mark in marks.items()]


def engines_and_ranks(*fast: tuple[str, int]) -> list:
    """Engines of two processes with and without adapters."""
    return usual(fast, list(product(TWO, RANKS)))


def one_of_three(*places: int) -> None:
    """Skip this cell of a cross, given by its places, unless it is of a third that always runs."""
    if sum(places) % 3 and not os.environ.get("SCIFTUNE_SLOW"):
        pytest.skip("slow: SCIFTUNE_SLOW=1 for all cells")
