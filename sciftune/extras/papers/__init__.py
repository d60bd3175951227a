"""Figures, captions and words collected from documents."""
