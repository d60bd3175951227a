"""Predict the memory and the time of a run before a weight is loaded."""
