"""Costs of strategies: memory, transfers and waits of a step, a notebook for each."""
