"""Direct preference optimization from pictures that the model draws and a reward ranks."""
