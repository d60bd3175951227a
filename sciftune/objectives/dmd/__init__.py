"""Distribution matching distillation (DMD2) to one or a few steps."""
