"""Parts that can be taken away: each folder holds its records, modules and presets."""
