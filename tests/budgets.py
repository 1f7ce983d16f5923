"""The code budgets: lines per file and function, and the size of each package; and the documents' links.

`make check` runs it."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40
PRODUCT = ("frontend", "workers", "baton", "operations")
PACKAGES = (*PRODUCT, "tools")
TABULAR: frozenset[str] = frozenset()  # exempt from the cap on lines, by name


def over_budget(path: Path) -> list[str]:
    """`file:line: problem` for each exceeded budget."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = []
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES and str(path) not in TABULAR:
        found.append(f"{path}:1: {num_lines} lines, at most {MAX_FILE_LINES}")
    if ast.get_docstring(tree) is None:
        found.append(f"{path}:1: the module docstring is missing")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
                )
    return found


def broken_links(path: Path) -> list[str]:
    """`file: link` for each relative link of a Markdown file that leads nowhere."""
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    return [f"{path}: {link} does not exist" for link in links if not (path.parent / link).exists()]


def sizes(names: list[str]) -> str:
    """Lines of Python by package, product packages added up."""
    lines: Counter[str] = Counter()
    for name in names:
        path = Path(name)
        if path.exists():
            lines[path.parts[0]] += path.read_text(encoding="utf-8").count("\n")
    product = {package: lines[package] for package in PRODUCT}
    parts = " + ".join(f"{package} {count:,}" for package, count in product.items())
    return f"lines: {parts} = {sum(product.values()):,}; tests {lines['tests']:,}"


def main() -> int:
    """Exit status: 1 if any budget is exceeded."""
    listed, documents = (
        subprocess.run(["git", "ls-files", kind], capture_output=True, text=True, check=True).stdout
        for kind in ("*.py", "*.md")
    )
    files = [Path(name) for name in listed.split() if name.split("/")[0] in PACKAGES]
    found = [line for path in files if path.exists() for line in over_budget(path)]
    found += [line for name in documents.split() for line in broken_links(Path(name))]
    sys.stdout.write("".join(line + "\n" for line in found))
    sys.stdout.write(sizes(listed.split()) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
