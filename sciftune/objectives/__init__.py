"""Objectives, one package each: loss, data, recipe section and task."""
