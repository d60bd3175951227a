"""The trainer: steps, checkpoints, validation, export, and the rows that it writes."""
