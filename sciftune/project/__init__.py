"""Measure and publish this project; no part of the wheel."""
