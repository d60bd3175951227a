"""Flow matching: the denoiser predicts noise minus image."""
