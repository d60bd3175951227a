"""Weightings of the loss over noise levels: one record each."""
