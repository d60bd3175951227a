"""Direct preference optimization from a collection of chosen and rejected images."""
