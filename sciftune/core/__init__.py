"""Recipes, presets, plans and run folders: what every other package uses. Imports no torch."""
