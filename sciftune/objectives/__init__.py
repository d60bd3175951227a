"""What is learnt, one package each: loss, data, recipe section and task."""
