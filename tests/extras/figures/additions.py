"""What drawn figures add to tables of tests/; see tests/tools/additions.py."""


def reader(file):
    """Open the folder of a chart reader."""
    from sciftune.extras.figures.reader import load_reader

    return load_reader(file.parent)


EDITS = dict(data="edits", reference_images=1, model="klein", edits="recolor")
REFUSED = [  # topic, sentence, parameters
    ("Recipe", "figures: must be below 2147483648", dict(figures=10**20)),
    ("Recipe", "figures: needs data='figures' or data='edits'", dict(data="/my", figures=20)),
    (
        "Recipe",
        "validation_images: 0 leaves no image",
        dict(keep_best="follows", validation_images=0),
    ),
    ("Packages and names", "figures_kinds: 'lines'; kinds of", dict(figures_kinds="lines")),
    ("Packages and names", "styles of charts: light", dict(figures_side=96, figures_style="x")),
    ("Packages and names", "edits: 'recolor': expected", EDITS),
    ("Packages and names", "draws its own", dict(data="/nowhere_either")),
]
ALONE = "extras/figures/shards._draw_shards"  # reads what a process that it started has written
RENAMERS = {"extras/figures/shards.py": "a folder with a name drawn at random"}
TEXT_FILES = {"reader.json": reader}
USED_LATER = ["sciftune.extras.figures.edits"]
TORCH_FREE = ["extras.figures.shards", "extras.figures.colours", "extras.figures.section"]
