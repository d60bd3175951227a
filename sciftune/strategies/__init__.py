"""Spread a run over processes, and store and update its weights."""
