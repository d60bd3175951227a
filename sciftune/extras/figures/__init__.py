"""Drawn figures, charts, edits and dialogues, small trained models, and their scores."""
