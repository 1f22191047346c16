"""Build the API reference from the docstrings.

python .ci/reference.py FOLDER    # then open FOLDER/index.html
"""

import pkgutil
import sys
from pathlib import Path

import pdoc
import pdoc.render

import fedhet

LEFT_OUT = ("fedhet.__main__", "fedhet.cli")


def build(folder: Path) -> None:
    """Write a page for the package, each room, and each method's two sides."""
    public = {name: getattr(fedhet, name) for name in dir(fedhet) if not name.startswith("_")}
    vars(fedhet).update(public)  # pdoc does not ask a module's __getattr__
    fedhet.__all__ = [*public]
    rooms = [module.name for module in pkgutil.iter_modules([str(Path(fedhet.__file__).parent)], "fedhet.")]
    modules = [name for name in rooms if name not in LEFT_OUT]
    pdoc.render.configure(docformat="google")
    pdoc.pdoc("fedhet", *modules, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
