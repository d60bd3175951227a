"""Formulas as MathML, which browsers draw without a script."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **kw) -> str:
    """Replace every formula of a page; one that cannot be read ends the build."""

    def drawn(match: re.Match) -> str:
        display = "inline" if match[1] == "span" else "block"
        return convert(html.unescape(match[2]).strip(), display=display)

    return FORMULA.sub(drawn, content)
