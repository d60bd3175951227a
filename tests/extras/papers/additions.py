"""What the extra adds to tables of tests/; see tests/tools/additions.py."""

import shutil


def _in_theirs(folder, command):
    """Call a command with a page, and a folder with the list of another program as `out`."""
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "metadata.jsonl").write_text('{"file_name": "a.png"}\n')
    (theirs / "page.html").write_text("<p>a page</p>")
    try:
        command(theirs / "page.html", theirs)
    finally:
        shutil.rmtree(theirs)


def _collect(sources, out):
    from sciftune.extras.papers.collect import collect

    collect(sources, out)


def _caption(data, out):
    from sciftune.extras.papers.caption import describe_collection

    describe_collection(str(data), out, "qwenimage")


REFUSED_BY = [  # parameters, sentence, call
    (
        "collect -p sources FOLDER/none -p out FOLDER/out",
        "sources: no file or folder FOLDER/none",
        lambda folder: _collect(folder / "none", folder / "out"),
    ),
    (
        "collect -p sources FOLDER/theirs/page.html -p out FOLDER/theirs",
        "out: FOLDER/theirs holds a metadata.jsonl of others; name another folder",
        lambda folder: _in_theirs(folder, _collect),
    ),
    (
        "caption -p data FOLDER/empty -p out FOLDER/empty/out",
        "lies in data, FOLDER/empty; name another folder",
        lambda folder: _caption(folder / "empty", folder / "empty/out"),
    ),
    (
        "caption -p data FOLDER/theirs -p out FOLDER",
        "lies in FOLDER; name another folder",
        lambda folder: _in_theirs(folder, lambda page, out: _caption(out, out.parent)),
    ),
]

ALONE = """extras/papers/collect._tex_folders extras/papers/tex.folder_files
    extras/papers/collect.without_duplicates.read extras/papers/collect._written"""
