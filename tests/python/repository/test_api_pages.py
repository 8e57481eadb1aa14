"""docs/api/ has every public name, and docstrings explain each default of None."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "torch_hbmcomm"
MODULES = [PACKAGE, "torch_hbmcomm.memory", "torch_hbmcomm.parameter_server", "torch_hbmcomm.smb"]

DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?: {4}.*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"members: \[(.*)\]")
USED = re.compile(r"\b(?:torch_)?hbmcomm\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)?)")
# The text that says what None means; scripts/site/templates shows it as the default.
MEANING = re.compile(r"\bNone(?:, [^:;.]+)?: \S")
ENTRY = re.compile(r"^(\s+)(\w+): ((?:.*\n?)(?:\1 +.*\n?)*)", re.MULTILINE)
# Classes whose methods have the arguments of another class's methods, as their docstrings say.
ARGUMENTS_AS_IN = {"Batch": "Segment", "LayerDropState": "LowRankState"}

Callable = ast.FunctionDef | ast.ClassDef


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    candidates = [path.with_suffix(".pyi"), path.with_suffix(".py"), path / "__init__.py"]
    return next(candidate for candidate in candidates if candidate.is_file())


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text())


def exported(module: str) -> list[str]:
    """Return the names in the module's `__all__`."""
    for statement in tree_of(module).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    raise AssertionError(f"{module} has no __all__")


def home(module: str, name: str) -> tuple[str, Callable] | None:
    """Return the module that defines a class or function, and its definition. Follows imports."""
    for statement in ast.walk(tree_of(module)):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(PACKAGE):
            for alias in statement.names:
                if (alias.asname or alias.name) == name and statement.module != module:
                    return home(str(statement.module), alias.name)
    for statement in tree_of(module).body:
        if isinstance(statement, Callable) and statement.name == name:
            return module, statement
    return None


def on_pages() -> set[str]:
    """Return the full names that docs/api/ has, with the members of modules."""
    found = set()
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        for name, options in DIRECTIVE.findall(page.read_text() + "\n"):
            found.add(name)
            if (members := MEMBERS.search(options)) is not None:
                found |= {f"{name}.{member}" for member in members[1].split(", ")}
            elif name in MODULES:
                defined = [node.name for node in tree_of(name).body if isinstance(node, Callable)]
                found |= {f"{name}.{member}" for member in [*exported(name), *defined]}
    return found


def has_entry(module: str, name: str, pages: set[str]) -> bool:
    # A page may put the module, the package or a native module before the name.
    places = [module, PACKAGE, f"{PACKAGE}._C", f"{PACKAGE}._smb"]
    return any(f"{place}.{name}" in pages for place in places)


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_name_is_on_an_api_page(module: str) -> None:
    pages = on_pages()
    names = [name for name in exported(module) if name != "__version__"]
    assert [name for name in names if not has_entry(module, name, pages)] == []


def test_names_that_the_guides_use_are_on_an_api_page() -> None:
    pages = on_pages()
    used = {
        name
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for name in USED.findall(page.read_text())
    }
    missing = []
    for name in sorted(used):
        first, _, second = name.partition(".")
        if f"{PACKAGE}.{first}" in MODULES and second:
            module, first = f"{PACKAGE}.{first}", second
        elif first not in exported(PACKAGE):
            continue  # a module, or a name of a log
        else:
            module = PACKAGE
        if not has_entry(module, first, pages):
            missing.append(name)
    assert used
    assert missing == []


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the parameters whose default is None."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return [argument.arg for argument, default in pairs if is_none(default)]


def is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def explained(docstring: str) -> set[str]:
    """Return the entries of a docstring's `Args:` that say what None means."""
    _, _, arguments = docstring.partition("Args:\n")
    entries = ENTRY.findall(arguments)
    return {name for _, name, text in entries if MEANING.search(" ".join(text.split()))}


def public_callables() -> Iterator[tuple[str, Callable]]:
    found = {}
    for module in MODULES:
        for name in exported(module):
            if (defined := home(module, name)) is not None:
                found[defined[0], name] = defined[1]
    found[f"{PACKAGE}._C", "Options"] = next(
        node
        for node in tree_of(f"{PACKAGE}._C").body
        if isinstance(node, ast.ClassDef) and node.name == "Options"
    )
    for (module, name), node in found.items():
        yield f"{module}.{name}", node


def inherited_fields(node: ast.ClassDef) -> list[ast.stmt]:
    """Return the body of EncoderConfig for its subclasses, which document its fields."""
    if "EncoderConfig" not in map(ast.unparse, node.bases):
        return []
    defined = home(f"{PACKAGE}.error_feedback.config", "EncoderConfig")
    assert defined is not None
    return defined[1].body


def unexplained(node: Callable) -> Iterator[str]:
    """Yield the parameters and fields whose default of None the docstring does not explain."""
    own = ast.get_docstring(node, clean=False) or ""
    if isinstance(node, ast.FunctionDef):
        yield from (name for name in parameters(node) if name not in explained(own))
        return
    for child in [*node.body, *inherited_fields(node)]:
        if isinstance(child, ast.AnnAssign) and is_none(child.value):
            name = ast.unparse(child.target)
            if name not in explained(own):
                yield name
        elif isinstance(child, ast.FunctionDef) and child.name == "__init__":
            yield from (name for name in parameters(child) if name not in explained(own))
        # NAME_async() has the arguments of NAME(), which explains them.
        elif isinstance(child, ast.FunctionDef) and not re.match("_|.*_async$", child.name):
            yield from (f"{child.name}: {name}" for name in unexplained(child))


def test_defaults_of_none_are_explained() -> None:
    checked = dict(public_callables())
    names = {name.rpartition(".")[2] for name in checked}
    assert {"Batch", "LowRankState", "Options", "connect"} <= names
    assert [
        f"{name}: {parameter}"
        for name, node in checked.items()
        if node.name not in ARGUMENTS_AS_IN
        for parameter in unexplained(node)
    ] == []


FUNCTION = '''
def f(a=None, b=None, *, c=None):
    """Do it.

    Args:
        a: one;
            None: two
        b: None
    """
'''


def test_an_unexplained_default_is_reported() -> None:
    [node] = ast.parse(FUNCTION).body
    assert isinstance(node, ast.FunctionDef)
    assert list(unexplained(node)) == ["b", "c"]
