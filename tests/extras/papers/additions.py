"""What the extra adds to tables of tests/; see tests/tools/additions.py."""

ALONE = """extras/papers/collect._tex_folders extras/papers/tex.folder_files
    extras/papers/collect.without_duplicates.read extras/papers/collect._written"""
