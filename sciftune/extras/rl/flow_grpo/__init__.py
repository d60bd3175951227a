"""Policy gradient on the sampler's steps, with a reward (Flow-GRPO)."""
