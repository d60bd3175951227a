"""What must hold before any test runs, and what is generated from the notebooks.

    python tests/tools/gate.py sync     bring modules, README.md, pages and the like into step
    python tests/tools/gate.py check    say what is wrong, one line per problem

Each check is a generator of problems: one line that names the file and says what would be right.
"""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from additions import added

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sciftune"
LAYERS = [
    "core",
    "data",
    "models",
    "strategies",
    "planner",
    "training",
    "objectives",
    "extras",
    "lab",
    "project",
]
TORCH_FREE = [  # imported by the kernel that launches, whose forks torch could hang
    "core.*",
    "data.sources",
    "data.streams",
    "data.buckets",
    "data.captions",
    "data.words",
    "data.reading",
    "objectives.*.section",
    "extras.*.*.section",
    "lab.plots",
    "lab.scores",
    "lab.evaluation_plots",
    "lab.report",
    "lab.summary",
    "lab.report_page",
    "lab.live",
    "lab.logs",
    "lab.prepare",
    "strategies.agent",
    "project.bench",
    "lab.distillation",
    "project.contents",
    "project.pages",
    "lab.tables",
    "lab.command",
    "lab.convert",
    "lab.prove",
    *itertools.chain(*added("TORCH_FREE")),
]
FORMATTED = ["nbs", "tests", "scripts"]
LARGEST_NOTEBOOK = 300_000  # bytes
LONGEST_README = 150  # lines
NODES_PER_LINE = 9.0  # syntax nodes a line of code: nbdev has 9.0, fastcore 9.7
LONGEST_FUNCTION = 50  # lines of code
MEDIAN_FUNCTION = 10  # lines of code
LONGEST_LINE = 100  # characters
EXAMPLES = 0.85  # asserting cells per cell that exports a definition, over all notebooks
EXAMPLES_OF_ONE = 0.6  # the same for a notebook with at least `MANY_EXPORTS` such cells
MANY_EXPORTS = 4
PRIVATE_PARTS = (  # modules that may use names which other packages keep to themselves
    "core.compat",
    "models.compat",
    "extras.kernels.adam",  # its class extends flashoptim's
)
PUBLIC_UNDERSCORES = {"_", "_exit", "_replace"}  # os._exit, namedtuple: Python documents them
SHARED_NAMES = {"RECORDS"}  # every plug-in has its own; the registry reads it


def run_python(*arguments: str, cwd: Path) -> None:
    """Run this Python, quietly; raises CalledProcessError when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=cwd, check=True, env=environment, stdout=subprocess.DEVNULL)


def ruff(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run ruff with its output kept."""
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


# What is generated


def write_readme(root: Path) -> None:
    """README.md from the prose of index.ipynb."""
    parts = ["<!-- Generated from nbs/index.ipynb by scripts/readme. -->"]
    for cell in json.loads((root / "nbs/index.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(links_from_root("".join(cell["source"])))
    (root / "README.md").write_text("\n\n".join(part.strip() for part in parts) + "\n")


def links_from_root(text: str) -> str:
    """`text` of nbs/index.ipynb with its relative links as seen from the folder above."""

    def moved(match: re.Match) -> str:
        target = match[1]
        if target.startswith(("http", "#", "/")):
            return match[0]
        return f"]({os.path.normpath(os.path.join('nbs', target))})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def sync(root: Path) -> None:
    """Write everything that is generated from the notebooks of `root`."""
    ruff("format", "--quiet", *FORMATTED, cwd=root)
    run_python("-c", "from nbdev.clean import nbdev_clean; nbdev_clean()", cwd=root)
    run_python("-c", "from nbdev.doclinks import nbdev_export; nbdev_export()", cwd=root)
    write_readme(root)
    package_notebooks(root)
    pages = "from pathlib import Path; from sciftune.project.pages import write_pages"
    run_python("-c", f"{pages}; write_pages(Path.cwd())", cwd=root)


def is_command(notebook: Path) -> bool:
    """Return whether users run a notebook by name: papermill can give it parameters."""
    cells = json.loads(notebook.read_text())["cells"]
    return any("parameters" in cell["metadata"].get("tags", []) for cell in cells)


def package_notebooks(root: Path) -> None:
    """Copy the notebooks that are run by name beside the modules that they use."""
    wanted = {}
    for path in filter(is_command, (root / "nbs").glob("*.ipynb")):
        package = "project" if "sciftune.project" in path.read_text() else "lab"
        wanted[root / "sciftune" / package / path.name] = path
    for path in filter(is_command, (root / "nbs/extras").glob("*/*.ipynb")):
        wanted[root / "sciftune/extras" / path.parent.name / path.name] = path
    for copy in (root / "sciftune").rglob("*.ipynb"):
        if copy not in wanted:
            copy.unlink()
    for copy, path in wanted.items():
        shutil.copy(path, copy)


def known_files(root: Path) -> list[str]:
    """Files of the work tree that git knows or would take."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.split("\0") if name and (root / name).is_file())


def contents(root: Path) -> dict[str, bytes]:
    """Path -> bytes of every file below `root` but compiled modules."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts and ".ruff_cache" not in path.parts
    }


def out_of_step() -> Iterator[str]:
    """Files that `sync` would change, tried on a copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in known_files(ROOT):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        before = contents(copy)
        sync(copy)
        after = contents(copy)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} is out of step with its notebook: run scripts/readme and commit"


# Modules


@dataclass
class Module:
    """A generated module: its path below the package, and its syntax."""

    path: Path

    def __post_init__(self):
        self.name = str(self.path.relative_to(PACKAGE))
        self.layer = self.path.relative_to(PACKAGE).parts[0]
        self.text = self.path.read_text()
        self.tree = ast.parse(self.text)

    def exported(self) -> list[str]:
        """The names of `__all__`."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return ast.literal_eval(node.value)
        return []

    def written_by_nbdev(self) -> set[int]:
        """Return the numbers of the lines that nbdev writes: the title and `__all__`."""
        names = (n for n in self.tree.body if isinstance(n, ast.Assign))
        names = (n for n in names if ast.unparse(n.targets[0]) == "__all__")
        return {1}.union(*(range(n.lineno, n.end_lineno + 1) for n in names))

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def lines(self) -> list[str]:
        """Lines of code: neither blank nor a comment alone."""
        code = (line for line in self.text.splitlines() if line.strip())
        return [line for line in code if not line.lstrip().startswith("#")]

    def imported_names(self) -> Iterator[str]:
        """Absolute names of what it imports, at any depth of its code."""
        package = ["sciftune", *self.path.relative_to(PACKAGE).parts[:-1]]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def imported_layers(self) -> set[str]:
        """Layers of the package that it imports from."""
        own = (name for name in self.imported_names() if name.startswith("sciftune."))
        return {name.split(".")[1] for name in own} & set(LAYERS)


@cache  # parsing all takes two seconds
def modules() -> list[Module]:
    """All modules that are generated from notebooks."""
    left_out = ("__init__.py", "_modidx.py")
    paths = (path for path in PACKAGE.rglob("*.py") if path.name not in left_out)
    return [Module(path) for path in sorted(paths)]


def wrong_layers() -> Iterator[str]:
    """Imports from a layer that is not below."""
    for module in modules():
        for other in sorted(module.imported_layers() - {module.layer, "extras"}):
            if LAYERS.index(other) >= LAYERS.index(module.layer):
                said = f"sciftune/{module.name} imports from the layer {other}"
                yield f"{said}, which is not below {module.layer}"


def named_extras() -> Iterator[str]:
    """Imports of an extra from outside its folder: it could not be taken away."""
    for module in modules():
        name = module.name.removesuffix(".py").replace("/", ".")
        parts = (other.split(".") for other in module.imported_names())
        extras = {part[2] for part in parts if part[:2] == ["sciftune", "extras"]}
        for extra in sorted(extras):
            if not name.startswith(f"extras.{extra}."):
                yield f"sciftune/{module.name} imports extras/{extra}: ask for a record"


def imports_by_module(known: list[Module]) -> dict[str, set[str]]:
    """Return module -> modules that it imports, for types alone, too."""
    named = {m.name.removesuffix(".py").replace("/", "."): m for m in known}
    graph = {name: set() for name in named}
    for name, module in named.items():
        for other in module.imported_names():
            target = other.removeprefix("sciftune.")
            target = target if target in graph else target.rpartition(".")[0]
            if target in graph:
                graph[name].add(target)
    return {name: others - {name} for name, others in graph.items()}


def circular_imports() -> Iterator[str]:
    """Modules that import each other."""
    try:
        TopologicalSorter(imports_by_module(modules())).prepare()
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        yield f"{circle} is a circle of imports: put what they share in a module of its own"


def is_private(name: str) -> bool:
    """Return whether a name, or a part of a dotted one, is meant for its own package alone."""
    parts = (part for part in name.split(".") if not part.startswith("__"))
    return any(part.startswith("_") and part not in PUBLIC_UNDERSCORES for part in parts)


def names_that_modules_make(known: list[Module]) -> set[str]:
    """Return the names of functions, classes, variables and attributes of own objects."""
    names = set()
    for node in (node for module in known for node in ast.walk(module.tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names


def names_in_use(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of attributes, of the texts of getattr, and of imports from outside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            texts = (getattr(argument, "value", None) for argument in node.args[1:2])
            yield from ((node.lineno, text) for text in texts if isinstance(text, str))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in names if not name.startswith("sciftune."))


def private_parts() -> Iterator[str]:
    """Uses of names that other packages keep to themselves: each may break with any upgrade.

    A private name that some module here makes counts as our own, whatever it is asked of.
    """
    known = modules()
    own = names_that_modules_make(known)
    for module in known:
        name = module.name.removesuffix(".py").replace("/", ".")
        if name in PRIVATE_PARTS:
            continue
        for line, used in names_in_use(module.tree):
            if is_private(used) and used not in own:
                where = f"sciftune/{module.name}:{line} uses {used}, private to another package"
                yield f"{where}: do it in models.compat or core.compat, and say why"


def orphans() -> Iterator[str]:
    """Modules that no notebook makes."""
    for module in modules():
        source = re.search(r"File to edit: (\S+?)\.$", module.text, re.M)
        if not source:
            yield f"sciftune/{module.name} is not generated from a notebook"
        elif not (module.path.parent / source[1]).resolve().exists():
            gone = f"its notebook {source[1]} is gone"
            yield f"sciftune/{module.name}: {gone}; delete the module"


def ambiguous_names() -> Iterator[str]:
    """Exported names that mean two things."""
    places = defaultdict(list)
    for module in modules():
        for name in module.exported():
            places[name].append(module.name)
    for name, found in sorted(places.items()):
        if len(found) > 1 and name not in SHARED_NAMES:
            yield f"the name {name} is exported by {' and '.join(found)}: one name, one meaning"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the lines of a function that are neither blank, a comment nor its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    left_out = range(docstring.lineno, docstring.end_lineno + 1) if docstring else ()
    numbers = range(function.lineno, function.end_lineno + 1)
    code = (lines[number - 1].strip() for number in numbers if number not in left_out)
    return sum(1 for line in code if line and not line.startswith("#"))


def unplain_docstrings() -> Iterator[str]:
    """Yield docstrings of kinds that ruff accepts and readers do not understand at once."""
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            text, place = ast.get_docstring(node) or "", f"sciftune/{module.name}:{node.lineno}"
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if text and any(m.endswith("property") for m in marks) and text[:7] != "Return ":
                yield f"{place} {node.name}: the docstring of a property begins with 'Return'"
            if found := re.search(r"^ *(\*{0,2}\w+: [oO]f|Of|What|Whether) .*$", text, re.M):
                yield f"{place} {node.name}: begin with a noun or a verb: '{found[0].strip()}'"


def dense() -> Iterator[str]:
    """Code that is too dense or functions that are too long."""
    nodes = lines = 0
    lengths = []
    for module in modules():
        nodes += sum(1 for _ in ast.walk(module.tree))
        lines += len(module.lines())
        every = module.text.splitlines()
        for number, line in enumerate(every, 1):
            if len(line) > LONGEST_LINE and number not in module.written_by_nbdev():
                yield f"sciftune/{module.name}:{number} has {len(line)} characters"
        for function in module.functions():
            lengths.append(code_lines(function, every))
            if lengths[-1] > LONGEST_FUNCTION:
                yield f"sciftune/{module.name}: {function.name} has {lengths[-1]} lines of code"
    median = sorted(lengths)[len(lengths) // 2]
    if median > MEDIAN_FUNCTION:
        yield f"the median function has {median} lines, more than {MEDIAN_FUNCTION}"
    if nodes / lines > NODES_PER_LINE:
        yield f"{nodes / lines:.2f} syntax nodes a line, more than {NODES_PER_LINE}"


def heavy() -> Iterator[str]:
    """Modules that must not import torch, and do."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""
    names = [
        "sciftune." + module.name.removesuffix(".py").replace("/", ".")
        for module in modules()
        if any(module.path.match("sciftune/" + p.replace(".", "/") + ".py") for p in TORCH_FREE)
    ]
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        yield done.stderr.strip().splitlines()[-1]


# Notebooks


def notebooks() -> list[Path]:
    """All notebooks."""
    paths = (ROOT / "nbs").rglob("*.ipynb")
    return sorted(path for path in paths if ".ipynb_checkpoints" not in path.parts)


def code_cells(notebook: dict) -> list[dict]:
    """Its code cells."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def bad_notebooks() -> Iterator[str]:
    """Notebooks that would grow the repository, differ from run to run, or not run."""
    for path in notebooks():
        name = path.relative_to(ROOT)
        notebook = json.loads(path.read_text())
        outputs = json.dumps([cell["outputs"] for cell in code_cells(notebook)])
        if path.stat().st_size > LARGEST_NOTEBOOK:
            yield f"{name} has {path.stat().st_size} bytes, more than {LARGEST_NOTEBOOK}"
        if "name" not in notebook["metadata"].get("kernelspec", {}):
            yield f"{name} has lost its kernelspec; papermill needs it"
        if "image/svg+xml" in outputs:
            yield f"{name} has an SVG output, which differs from run to run"
        if found := re.search(r"/(?:tmp|home|root)/\w+", outputs):
            yield f"{name} has a path of one machine in an output: {found[0]}"


def long_readme() -> Iterator[str]:
    """README.md is what a reader sees first."""
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > LONGEST_README:
        yield f"README.md has {lines} lines, more than {LONGEST_README}: docs/guides has room"


def doubled_numbers() -> Iterator[str]:
    """Notebooks of one folder with the same number: their reading order would be undefined."""
    by_number = defaultdict(list)
    for path in notebooks():
        number = re.match(r"\d+_", path.name)
        if number:
            by_number[path.parent, number[0]].append(path)
    for paths in by_number.values():
        if len(paths) > 1:
            yield f"{paths[0].relative_to(ROOT)} has the number of {paths[1].name}: renumber one"


def launch_notebook() -> Iterator[str]:
    """The notebook that papermill gives its parameters to."""
    cells = json.loads((ROOT / "nbs/launch.ipynb").read_text())["cells"]
    if sum("parameters" in cell["metadata"].get("tags", []) for cell in cells) != 1:
        yield "nbs/launch.ipynb needs exactly one cell tagged parameters"
    if not any(cell.get("outputs") for cell in cells):
        yield "nbs/launch.ipynb has lost its outputs, a real run of its defaults: restore them"


def notebooks_to_run() -> Iterator[str]:
    """Notebooks that begin with annotated values: each is a command of its name."""
    for path in sorted((ROOT / "nbs").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        if code and re.match(r"\w+: \w+ = ", code[0]) and not is_command(path):
            yield f"nbs/{path.name}: its first code cell needs the tag 'parameters'"


def noisy_outputs() -> Iterator[str]:
    """Stored outputs are for readers: warnings of libraries name the paths of one machine."""
    for path in notebooks():
        for cell in code_cells(json.loads(path.read_text())):
            if any(output.get("name") == "stderr" for output in cell["outputs"]):
                yield f"{path.relative_to(ROOT)} stores an output of stderr: remove it"
                break


def count_examples(path: Path) -> tuple[int, int]:
    """(cells that export a definition, cells that assert) of a notebook."""
    asserts = re.compile(r"\bassert\b|\btest_|with_raises|raises\(|ExceptionExpected")
    exports = re.compile(r"^#\| export", re.M)
    sources = ["".join(cell["source"]) for cell in code_cells(json.loads(path.read_text()))]
    exported = [source for source in sources if exports.search(source)]
    defined = [
        source for source in exported if re.search(r"^(?:async )?(?:def|class) ", source, re.M)
    ]
    shown = [s for s in sources if not exports.search(s) and asserts.search(s)]
    return len(defined), len(shown)


def few_examples() -> Iterator[str]:
    """Notebooks that define much and show little."""
    exported = shown = 0
    for path in notebooks():
        defines, asserts = count_examples(path)
        if not defines:
            continue
        exported += defines
        shown += asserts
        if defines >= MANY_EXPORTS and asserts < EXAMPLES_OF_ONE * defines:
            said = f"{asserts} asserting cells for {defines} that export a definition"
            yield f"{path.relative_to(ROOT)} has {said}; at least {EXAMPLES_OF_ONE} for each"
    if shown < EXAMPLES * exported:
        yield f"{shown} asserting cells for {exported} that export, fewer than {EXAMPLES} for each"


def is_gone_extra(target: str) -> bool:
    """Return whether a link leads into an extra that was taken away as a whole."""
    extra = re.search(r"(?:^|/)extras/(\w+)/", target)
    return bool(extra) and not (ROOT / "nbs/extras" / extra[1]).exists()


def broken_links() -> Iterator[str]:
    """Links of notebooks and pages to files that are not there."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts = {page: page.read_text() for page in pages}
    for path in notebooks():
        cells = json.loads(path.read_text())["cells"]
        prose = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
        texts[path] = "\n".join("".join(source) for source in prose)
    for path, text in texts.items():
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
            there = target.startswith(("http", "mailto:")) or (path.parent / target).exists()
            there = there or is_gone_extra(target)
            if not there and re.search(r"\.(?:ipynb|md|png|py|yaml|cff)$", target):
                yield f"{path.relative_to(ROOT)} links to {target}, which is not there"


# Formatter and linter


def unformatted() -> Iterator[str]:
    """Files that the formatter would change."""
    for line in ruff("format", "--check", *FORMATTED).stdout.splitlines():
        if line.startswith("Would reformat: "):
            yield f"{line.removeprefix('Would reformat: ')} is not formatted: ruff format"


def linted() -> Iterator[str]:
    """What the linter finds."""
    done = ruff("check", "--output-format", "concise", *FORMATTED)
    yield from (line for line in done.stdout.splitlines() if re.match(r"\S+:(?:cell )?\d", line))
    if done.returncode > 1:
        yield f"ruff: {done.stderr.strip()}"


def names_of_modules() -> Iterator[str]:
    """Names that a module lacks or does not use.

    In the notebook, where all cells share their names, neither shows.
    """
    how = ["--isolated", "--select", "F", "--output-format", "concise"]
    for line in ruff("check", *how, "sciftune").stdout.splitlines():
        if "F821" in line:
            yield f"{line}: import it in a cell that is exported"
        elif re.match(r"\S+:\d", line):
            yield f"{line}: import it in a cell that is not exported"


def mistyped() -> Iterator[str]:
    """Yield what the type checker finds in the modules."""
    command = [sys.executable, "-m", "pyrefly", "check", "--output-format", "min-text"]
    command += ["--python-interpreter-path", sys.executable]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in checked.stdout.splitlines() if line.lstrip().startswith("ERROR")]
    yield from errors
    if checked.returncode and not errors:
        yield f"pyrefly: {(checked.stderr or checked.stdout).strip()[-300:]}"


CHECKS = [
    orphans,
    wrong_layers,
    named_extras,
    circular_imports,
    private_parts,
    bad_notebooks,
    long_readme,
    doubled_numbers,
    launch_notebook,
    notebooks_to_run,
    noisy_outputs,
    heavy,
    unformatted,
    linted,
    names_of_modules,
    mistyped,
    unplain_docstrings,
    dense,
    few_examples,
    ambiguous_names,
    broken_links,
    out_of_step,
]


def check() -> int:
    """Print every problem; 1 when there is one."""
    problems = [problem for one in CHECKS for problem in one()]
    for problem in problems:
        print(f"gate: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main(arguments: list[str]) -> int | str:
    """The exit code, or a line that says how this is called."""
    if arguments == ["check"]:
        return check()
    if arguments == ["sync"]:
        return sync(ROOT)
    return "usage: gate.py sync | check"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
