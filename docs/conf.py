"""Builds the site: ``make docs``. Pages are Markdown; what each class and function does comes from its docstring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.logging import getLogger
from sphinx.util.nodes import nested_parse_with_titles

import pyg_sar

project, author, release = "pyg_sar", "pyg_sar authors", pyg_sar.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = "pyg_sar"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["toc.not_included"]  # tables of results, which have no titles and are reached from their README
napoleon_custom_sections = ["Shapes"]
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_member_order = "alphabetical"
autodoc_typehints = "none"  # docstrings say it
python_maximum_signature_line_length = 90
PACKAGE = Path(pyg_sar.__file__).parent


WORDS = {"the", "a", "an", "of", "or", "and", "is", "are", "has", "it", "its", "by", "in", "with", "no", "not"}


def text_of(node: ast.AST) -> str | None:
    """Return a text that stands in the code, with an ellipsis for what varies; None if a node is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(piece) or "…" for piece in node.values)
    if isinstance(node, ast.BinOp) and (sides := [text_of(node.left), text_of(node.right)]) != [None, None]:
        return "".join(side or "…" for side in sides)
    return None


def messages(node: ast.AST, kind: str = "") -> Iterator[str]:
    """Return all messages in the code, and pieces of some that are put together, with the names of their errors."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.keyword) and node.arg in ("help", "description"):
        return  # of the command line, which tells it
    if (text := text_of(node)) is not None:
        words = text.removeprefix("[rank …] ").split()
        if len(words) > (2 if kind else 4) and (kind or WORDS.intersection(words)) and not {"->", "<html"} & {*words}:
            yield f"{kind}{' '.join(words)}"
        return
    raised = node.exc if isinstance(node, ast.Raise) else None
    for child in ast.iter_child_nodes(node):
        if child is raised and isinstance(child, ast.Call) and child.args:
            yield from messages(child.args[0], f"{ast.unparse(child.func).split('.')[-1]}: ")
        else:
            yield from messages(child, kind)


def told() -> dict[Path, list[str]]:
    """Return the error messages of every file of the package that has some."""
    found = {path: list(dict.fromkeys(messages(ast.parse(path.read_text())))) for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: texts for path, texts in found.items() if texts}


class Errors(Directive):
    """Lists the error messages of some files of the package, which are named by patterns."""

    required_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        """Return a list for each file."""
        lines = []
        for pattern in self.arguments[0].split():
            if not (found := sorted(UNLISTED.keys() & set(PACKAGE.glob(pattern)))):
                raise self.error(f"No messages, or listed already: {pattern}")
            for path in found:
                escaped = (re.sub(r"([\\*`_|<>])", r"\\\1", text) for text in UNLISTED.pop(path))
                lines += ["", f"``{path.relative_to(PACKAGE)}``", "", *(f"* {text}" for text in escaped)]
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, "errors"), section)
        return section.children


UNLISTED = told()


def all_listed(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of messages that stand in no section of their page."""
    for path in UNLISTED:
        getLogger(__name__).warning("docs/errors.md has no section with the messages of %s", path.relative_to(PACKAGE))


def name_files(app: Sphinx, tree: nodes.document) -> None:
    """Write text and path where a page links to a file of the repository that is not in the site."""
    docs = Path(app.srcdir)
    page = Path(app.env.doc2path(app.env.docname))
    for node in list(tree.findall(addnodes.pending_xref)):
        target = node["reftarget"].split("#")[0]
        for folder in (page.parent, docs.parent):  # the front page is included
            found = [path for name in (target, f"{target}.md") if (path := (folder / name).resolve()).is_file()]
            if target and found and not found[0].is_relative_to(docs):
                path = nodes.literal(text=str(found[0].relative_to(docs.parent)))
                node.replace_self([*node.children, nodes.Text(" ("), path, nodes.Text(")")])
                break


def setup(app: Sphinx) -> None:
    """Add what is above."""
    app.add_directive("errors", Errors)
    app.connect("doctree-read", name_files)
    app.connect("env-check-consistency", all_listed)
