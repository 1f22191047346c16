"""Hooks of MkDocs: the site has the repository's pages, and the files that they link to, under the same paths."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)\)")
"""A link to a file or folder of the repository, without an anchor."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that git has, and what they link to."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [name for name in listed.splitlines() if not name.startswith(("docs/", ".github/", "paper.md"))]
    linked = {path for name in pages for path in _linked(ROOT / name)}
    for name in sorted({*pages, *linked}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the strategies to the API reference, and remove links to folders, of which the site has no page."""
    if page.file.src_uri != "reference.md":
        folder = (ROOT / page.file.src_uri).parent
        return LINK.sub(lambda link: link[1] if (folder / link[2]).is_dir() else link[0], markdown)
    methods = json.loads((ROOT / "fedhet" / "methods" / "names.json").read_text(encoding="utf-8"))
    return "\n\n".join([markdown, *(_strategy(name, method) for name, method in methods.items())])


def _linked(page: Path) -> set[str]:
    """Return the files of the repository, other than pages, that a page links to."""
    targets = (page.parent / link for _, link in LINK.findall(page.read_text(encoding="utf-8")))
    files = (target.resolve() for target in targets if target.is_file() and target.suffix != ".md")
    return {path.relative_to(ROOT).as_posix() for path in files}


def _strategy(name: str, method: dict[str, Any]) -> str:
    """Return the section of a strategy, with its own keys as arguments."""
    path = method["class"].removeprefix("fedhet.").replace(":", ".")
    rows = [f"| `{_argument(key)}` | `{default!r}` | {_cell(about)} |" for key, default, _, about in method["keys"]]
    table = ["| argument | default | meaning |", "| --- | --- | --- |", *rows] if rows else []
    name_of_class = f"fedhet.{path.rpartition('.')[2]}"
    options = f"    options: {{ heading: {name_of_class}, toc_label: {name_of_class}, show_signature: false }}"
    return "\n".join([f"::: {path}", options, "", f"The method `{name}`.", "", *table])


def _argument(key: str) -> str:
    return key.rpartition(".")[2].replace("-", "_")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
