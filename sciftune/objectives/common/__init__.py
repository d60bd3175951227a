"""Shared parts of objectives: noise levels, batches, denoising, pairs."""
