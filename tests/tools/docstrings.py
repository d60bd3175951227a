"""Parameter comments of the exported modules as parts of their docstrings.

A notebook documents a parameter by the comment on its line. `help()` and editors show docstrings
only, so the comments are written there, too, as "Args:", "Returns:" and "Attributes:", when the
modules are generated. `hand_written` is the way back: a docstring without these parts.
"""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

WIDTH = 100  # characters of a line
PARTS = re.compile(r"\n+ *(?:Args|Returns|Attributes):\n")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def comment_text(comment: str) -> str:
    """What a comment says to a reader: without a linter's directive and the reason of this."""
    return re.sub(r"^noqa: [A-Z]+\d+ ?(?:\(.*)?", "", comment.lstrip("# ").strip())


@dataclass
class Source:
    """A module with its comments."""

    text: str

    def __post_init__(self):
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        found = (token for token in tokens if token.type == tokenize.COMMENT)
        self.comments = {token.start[0]: comment_text(token.string) for token in found}
        self.tree = ast.parse(self.text)

    def said(self, first: int, end: int) -> str:
        """The comments of the lines from `first`, before `end`."""
        lines = (self.comments.get(number, "") for number in range(first, end))
        return " ".join(line for line in lines if line)

    def parameters(self, function: ast.FunctionDef) -> dict[str, str]:
        """Parameter -> its comment."""
        given = function.args
        every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        every = sorted((one for one in every if one), key=lambda one: one.lineno)
        after = function.returns.lineno if function.returns else self._body(function)
        ends = [*(one.lineno for one in every), after][1:]
        stars = {given.vararg: "*", given.kwarg: "**"}
        said = {
            stars.get(one, "") + one.arg: self.said(one.lineno, end)
            for one, end in zip(every, ends, strict=True)
            if one.lineno > function.lineno
        }
        return {name: words for name, words in said.items() if words}

    def result(self, function: ast.FunctionDef) -> str:
        """The comment of what is returned."""
        if not function.returns:
            return ""
        return self.said(function.returns.lineno, self._body(function))

    def fields(self, record: ast.ClassDef) -> dict[str, str]:
        """Annotated field -> its comment."""
        found = (node for node in record.body if isinstance(node, ast.AnnAssign))
        said = {
            node.target.id: self.said(node.lineno, node.end_lineno + 1)
            for node in found
            if not node.target.id.startswith("_")
        }
        return {name: words for name, words in said.items() if words}

    def _body(self, function: ast.FunctionDef) -> int:
        """Where its body begins."""
        return function.body[0].lineno


def definitions(tree: ast.Module) -> Iterator[ast.AST]:
    """Public functions and classes, and the public methods of these."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            inner = node.body if isinstance(node, ast.ClassDef) else []
            methods = (one for one in inner if isinstance(one, FUNCTIONS))
            yield from (one for one in methods if not re.match(r"_[^_]", one.name))


def parts_of(source: Source, node: ast.AST) -> dict[str, dict[str, str] | str]:
    """The parts that the docstring of `node` lacks."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        arguments = source.parameters(made[0]) if made and not ast.get_docstring(made[0]) else {}
        return dict(Args=arguments, Attributes=source.fields(node))
    return dict(Args=source.parameters(node), Returns=source.result(node))


def written(parts: dict[str, dict[str, str] | str], indent: int) -> str:
    """The parts as text; '' where nothing is said."""
    lines = []
    for title, said in parts.items():
        if not said:
            continue
        entries = [f"{k}: {v}" for k, v in said.items()] if isinstance(said, dict) else [said]
        lines += ["", " " * indent + f"{title}:"]
        for entry in entries:
            first, rest = " " * (indent + 4), " " * (indent + 8)
            lines += textwrap.wrap(
                entry,
                WIDTH,
                initial_indent=first,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def documented(text: str) -> str:
    """A module with the comments of its parameters in its docstrings."""
    source = Source(text)
    lines = text.split("\n")
    nodes = [node for node in definitions(source.tree) if ast.get_docstring(node)]
    for node in sorted(nodes, key=lambda one: -one.lineno):  # from the end: numbers stay right
        doc = node.body[0]
        added = written(parts_of(source, node), doc.col_offset)
        if not added or PARTS.search(doc.value.value):
            continue
        last = lines[doc.end_lineno - 1]
        assert last.endswith('"""'), f"line {doc.end_lineno}: a docstring ends with its line"
        raw = lines[doc.lineno - 1].lstrip().startswith("r")
        added = added if raw else added.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        closing = [" " * doc.col_offset + '"""']
        lines[doc.end_lineno - 1 : doc.end_lineno] = [
            *([last[:-3].rstrip()] if last[:-3].strip() else []),
            *added.split("\n"),
            *closing,
        ]
    return "\n".join(lines)


def hand_written(text: str) -> str:
    """A module without the parts that `documented` adds."""
    lines = text.split("\n")
    nodes = [
        one for one in ast.walk(ast.parse(text)) if isinstance(one, (*FUNCTIONS, ast.ClassDef))
    ]
    for node in sorted(nodes, key=lambda one: -one.lineno):
        doc = node.body[0]
        found = ast.get_docstring(node, clean=False)
        if found and (part := PARTS.search(found)):
            first = doc.lineno + found[: part.start()].count("\n")
            several = first > doc.lineno
            lines[first : doc.end_lineno] = [" " * doc.col_offset + '"""'] if several else []
            lines[first - 1] += "" if several else '"""'
    return "\n".join(lines)
