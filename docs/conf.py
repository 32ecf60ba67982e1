"""Builds the site: ``make docs``. Pages are Markdown; what each class and function does comes from its docstring."""

import ast
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles

import pyg_sar

project, author, release = "pyg_sar", "pyg_sar authors", pyg_sar.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = "pyg_sar"
myst_heading_anchors = 3
# Links to files of the repository outside of this folder: a test follows all links of the sources. And tables of
# results, which have no titles and are reached from their README.
suppress_warnings = ["myst.xref_missing", "toc.not_included"]
napoleon_custom_sections = ["Shapes"]
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_member_order = "alphabetical"
autodoc_typehints = "none"  # docstrings say it
python_maximum_signature_line_length = 90
PACKAGE = Path(pyg_sar.__file__).parent


def messages(path: Path) -> list[str]:
    """Return the errors that a file raises with a text of its own, in order; what varies is an ellipsis."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            pieces = text.values if isinstance(text, ast.JoinedStr) else [text]
            told = "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "…" for p in pieces)
            if len(told) > 20:
                found.append(f"{ast.unparse(node.exc.func)}: {' '.join(told.removeprefix('[rank …] ').split())}")
    return found


class Errors(Directive):
    """Lists every error message of the package, by file."""

    def run(self) -> list[nodes.Node]:
        """Return a list for each file."""
        lines = []
        for path in sorted(PACKAGE.rglob("*.py")):
            if told := messages(path):
                escaped = (re.sub(r"([\\*`_|<>])", r"\\\1", text) for text in told)
                lines += ["", f"``{path.relative_to(PACKAGE)}``", "", *(f"* {text}" for text in escaped)]
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, "errors"), section)
        return section.children


def setup(app: Sphinx) -> None:
    """Add what is above."""
    app.add_directive("errors", Errors)
