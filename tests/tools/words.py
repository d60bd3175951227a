"""Measure how well the words of figures are read.

python tests/tools/words.py [FOLDER] [--every N] [--wrong] [--processes N] [--without PATTERN]

FOLDER holds pictures and words.jsonl: a line per picture with `file_name` and `words`, each with
`text`, `size` (of its type, in pixels) and `angle` (degrees). Text taken from SVG has lost its
scripts (10⁻² is 10-2) and the signs of sums, whose limits are there (∑_{i} x is "i x"), so they are
not told apart here; seconds are of a processor.
"""

import argparse
import io
import json
import math
import re
import time
import unicodedata
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from sciftune.data.reading import read_text
from sciftune.data.words import Label, is_number, match_words, text_parts

MATHEMATICS = re.compile(r"10-\d|M[qM]{2,}|i=0j|(hi )?i x|5\.5-?\d?\d|9\d")


def groups(
    word: dict,  # A line's word
) -> list[str]:
    """Return the groups of labels that a word belongs to."""
    text, angle = word["text"], word["angle"] % 360
    slanted = min(abs(angle - right) for right in (0, 90, 180, 270, 360)) > 2
    kinds = {
        "all": True,
        "numbers": is_number(text.replace("−", "-")),
        "words": sum(c.isalpha() for c in text) > 1,
        "single letters": len(text.strip()) == 1 and text.strip().isalpha(),
        "mathematics": bool(MATHEMATICS.fullmatch(text)),
        "slanted": slanted,
        "on end": 88 < angle % 180 < 92,
    }
    return [kind for kind, member in kinds.items() if member]


def without_scripts(text: str) -> str:
    """Return what text of an SVG keeps of a line."""
    plain = unicodedata.normalize("NFKC", text)
    return re.sub("[∑∏_^{}]", " ", plain).strip() if {"∑", "∏"} & set(plain) else plain


def by_place(matched: list, words: list[dict]) -> list:
    """Of labels with one text, give what was found to those that stand nearest to it."""
    out = list(matched)
    for text in dict.fromkeys(word["text"] for word in words):
        group = [i for i, word in enumerate(words) if word["text"] == text]
        found = [matched[i] for i in group if matched[i].state == "found"]
        pairs = sorted(
            (math.dist(word.box[::3], words[i]["box"][::3]), n, i)
            for n, word in enumerate(found)
            for i in group
        )
        places: dict[int, int] = {}
        for _, n, i in pairs:
            if n not in places and i not in places.values():
                places[n] = i
        others = [matched[i] for i in group if matched[i].state != "found"]
        rest = [i for i in group if i not in places.values()]
        for i, word in [*((places[n], found[n]) for n in places), *zip(rest, others, strict=True)]:
            out[i] = word
    return out


def measured(
    task: tuple[Path, list[dict]],  # Picture, its words
) -> tuple:
    """Read one picture: name, seconds, sums, (found, labels) by group, what is not right."""
    file, words = task
    with Image.open(file) as image:
        image.load()
    labels = [Label(w["text"], w["size"]) for w in words]
    began = time.process_time()
    read = read_text(image)
    seconds = time.process_time() - began
    read = [replace(r, text=without_scripts(r.text)) for r in read]
    matched = by_place(match_words(labels, read), words)
    found, total = Counter(), Counter()
    for word, given in zip(matched, words, strict=False):
        for group in groups(given):
            total[group] += 1
            found[group] += word.state == "found"
    wrong = [(w.state, w.text, w.read) for w in matched if w.state not in ("found", "ignored")]
    return file.name, seconds, text_parts(matched), found, total, wrong


FORMULAS = {
    "$10^{-2}$": "10⁻²",
    "$10^{3}$": "10³",
    "$10^{0}$": "10⁰",
    "$10^{12}$": "10¹²",
    "102": "102",
    "45°": "45°",
    "R$^2$ = 0.98": "R² = 0.98",
    "CO$_2$": "CO₂",
    "H$_2$O": "H₂O",
    "m/s$^2$": "m/s²",
    "W m$^{-2}$": "W m⁻²",
    "cm$^{-1}$": "cm⁻¹",
    "3.5×10$^{4}$": "3.5×10⁴",
    "E (kJ mol$^{-1}$)": "E (kJ mol⁻¹)",
    r"$\alpha = 0.3$": "α = 0.3",
    r"$\sigma_1$": "σ₁",
    "Δt (ms)": "Δt (ms)",
    "mW": "mW",
    "MW": "MW",
    "25 °C": "25 °C",
    "μm": "μm",
    "p < 0.05": "p < 0.05",
    "5 Å": "5 Å",
    "$E_0$": "E₀",
}  # as matplotlib draws it, and as it must be read


def drawn():
    """Print how many formulas are read, exponents and indices told apart, by size and angle."""
    for size in (9, 12, 16):
        for angle in (0, 30, -45, 90):
            figure = Figure((9, 9), dpi=100)
            for i, text in enumerate(FORMULAS):
                x, y = 0.03 + 0.2 * (i % 5), 0.9 - 0.19 * (i // 5)
                figure.text(x, y, text, fontsize=size, rotation=angle, rotation_mode="default")
            file = io.BytesIO()
            figure.savefig(file)
            labels = [Label(text) for text in FORMULAS.values()]
            words = match_words(labels, read_text(Image.open(file)))[: len(labels)]
            wrong = ", ".join(f"{w.text}: {w.read or '–'}" for w in words if w.state != "found")
            found = sum(w.state == "found" for w in words) / len(words)
            print(f"{size} points, {angle:3} degrees: {found:.2f} of {len(words)}  {wrong}")


def main():
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, nargs="?", help="none: mathematics, drawn")
    options.add_argument("--every", type=int, default=1, help="every Nth picture only")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--without", default="^$", help="pattern of names that are left out")
    options.add_argument("--wrong", action="store_true", help="list what is not right")
    chosen = options.parse_args()
    if chosen.folder is None:
        return drawn()
    lines = (chosen.folder / "words.jsonl").read_text().splitlines()[:: chosen.every]
    rows = [
        row for row in map(json.loads, lines) if not re.search(chosen.without, row["file_name"])
    ]
    tasks = [(chosen.folder / row["file_name"], row["words"]) for row in rows]
    began = time.perf_counter()
    if chosen.processes > 1:
        with ProcessPoolExecutor(chosen.processes) as pool:
            rows = list(pool.map(measured, tasks))
    else:
        rows = list(map(measured, tasks))
    seconds = (time.perf_counter() - began) / len(rows)
    for name, _, _, _, _, wrong in rows if chosen.wrong else ():
        for state, text, read in wrong:
            print(f"{name:60} {state:8} {text!r:30} {read!r}")
    for score in ("recall", "precision", "cer"):
        above, below = (sum(row[2][score][k] for row in rows) for k in (0, 1))
        print(f"{score:15} {above / max(below, 1):.3f}  ({above:g} of {below:g})")
    for group in dict.fromkeys(g for row in rows for g in row[4]):
        above, below = (sum(row[k][group] for row in rows) for k in (3, 4))
        print(f"{group:15} {above / below:.3f}  ({above} of {below})")
    alone = sum(row[1] for row in rows) / len(rows)
    print(f"{len(rows)} figures; {seconds:.2f} s each, {alone:.2f} s in one process")


if __name__ == "__main__":
    main()
