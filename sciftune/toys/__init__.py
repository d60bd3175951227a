"""Data and models small enough for a CPU: drawn figures and charts, edits, dialogues."""
