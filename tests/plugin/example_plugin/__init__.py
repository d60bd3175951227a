"""An objective and a strategy for sciftune that are no part of its package."""
