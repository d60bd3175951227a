"""Densities of the noise level: one record each."""
