"""Model families, one module each, with the layers and kernels that they share."""
