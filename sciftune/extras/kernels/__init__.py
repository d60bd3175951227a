"""Triton kernels and custom operations that make a step faster; without them torch runs it."""
