"""Optimizers: a module each, found by its record."""
