"""What several objectives share: noise levels, batches, denoising, pairs."""
