"""Learning from preferences and rewards: Diffusion-DPO, DPO of own pairs, Flow-GRPO."""
