"""Noise prediction (Stable Diffusion, DDPM)."""
