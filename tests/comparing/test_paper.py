"""The files of a comparison for a paper: LaTeX tables, figures, and the page; and that they are written again."""

import itertools
import re
import shutil
import subprocess
from io import StringIO

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from rich.console import Console
from synthetic_runs import write_run

from fedhet.comparing import Comparison, publish, read_comparison
from fedhet.comparing.measures import measure, verdict
from fedhet.comparing.runs import Execution
from fedhet.comparing.settings import ComparedRun
from fedhet.comparing.tables import in_latex, notes_below, separate_tables
from fedhet.errors import FedhetError
from fedhet.results.figures import look

ODD = "x_1@+"
ARCHITECTURE = r'50% of {a} & b\c~^#$ <"|>'
LETTERS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"{\char34}": '"',
    r"$\pm$": "±",
}
WRITTEN = ["comparison" + end for end in (".csv", ".html", ".json", ".md", ".pdf", ".png", ".svg", ".tex")]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    runs = []
    for name, seed in itertools.product(("local", "fedavg", ODD), range(3)):
        settings = {"method": name, "clients": 3, "unseen-clients": 0}
        models = [ARCHITECTURE] if name == ODD else ["cnn"]
        place = write_run(
            folder / f"{name}-seed{seed}",
            clients=3,
            rounds=2,
            settings=settings,
            seed=seed,
            architectures=models,
            personal="received" if name == "fedavg" else "trained",
            has_global=name == "fedavg",
        )
        runs.append(ComparedRun(name, seed, place, equalised=name == "fedavg"))
    failed = {f"{ODD}-seed2": "client 2 has 5% & more"}
    results = measure(runs, failed)
    said, notes = verdict(results, results[0]), notes_below(results, results[0])
    made = Comparison(folder, results, results[0], failed, f"local, fedavg, {ODD} on digits", said, notes)
    publish(made, runs, Execution(print, 1, Console(file=StringIO())))
    return made


def environments(text):
    """The content of each tabular, after checking that braces and environments are closed in order."""
    opened = []
    for mark, name in re.findall(r"\\(begin|end)\{(.*?)\}", text):
        if mark == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    plain = re.sub(r"%.*", "", text.replace(r"\%", ""))
    depth = np.cumsum([(letter == "{") - (letter == "}") for letter in re.sub(r"\\[{}]", "", plain)])
    assert depth.min() == depth[-1] == 0
    assert plain.replace(r"\$", "").count("$") % 2 == 0
    return re.findall(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}(.*?)\\end\{tabular\}", text, re.DOTALL)


def read(cell):
    """The text that LaTeX prints for a cell."""
    for letters, letter in LETTERS.items():
        cell = cell.replace(letters, letter)
    cell = re.sub(r"(?<!\\)\$([-<>|])(?<!\\)\$", r"\1", cell)
    return "-" if cell.strip() == "--" else re.sub(r"\\([&%$#_{}])", r"\1", cell).strip()


def test_tables_for_latex(done):
    text = (done.folder / "comparison.tex").read_text(encoding="utf-8")
    assert all(f"% {note}\n" in text for note in done.notes[1:]), "they explain intervals, p and costs"
    tables = environments(text)
    expected = separate_tables(done.results, done.baseline)
    assert len(tables) == len(expected) == 3
    for (columns, content), lines in zip(tables, expected, strict=True):
        assert re.findall(r"\\(\w+rule)", content) == ["toprule", "midrule", "bottomrule"]
        rows = [
            [read(cell) for cell in re.split(r"(?<!\\)&", row)]
            for row in re.sub(r"\\\w+rule", "", content).split(r"\\" + "\n")[:-1]
        ]
        shown = [column for column in zip(*lines, strict=True) if {*column[1:]} != {"-"}]
        assert rows == [list(row) for row in zip(*shown, strict=True)]
        assert {len(row) for row in rows} == {len(columns)}
    assert in_latex("-0.050 [-0.1, +0.2] a-1") == "$-$0.050 [$-$0.1, +0.2] a-1"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_latex_compiles_the_tables(done, tmp_path):
    shutil.copy(done.folder / "comparison.tex", tmp_path)
    shutil.copy(done.folder / "comparison.pdf", tmp_path / "figure.pdf")
    commands = ["documentclass{article}", "usepackage{booktabs,graphicx}", "begin{document}", "input{comparison}"]
    commands += ["includegraphics{figure}", "end{document}"]
    (tmp_path / "paper.tex").write_text("".join(f"\\{command}\n" for command in commands))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "booktabs.sty' not found" in result.stdout:
        pytest.skip("booktabs is not installed")
    assert result.returncode == 0, result.stdout[-2000:]


def test_files_are_written_again_from_the_folder(done):
    before = {path.name: path.read_bytes() for path in sorted(done.folder.glob("comparison.*"))}
    assert [*before] == WRITTEN
    for name in {*WRITTEN} - {"comparison.json"}:
        (done.folder / name).unlink()
    again = read_comparison(done.folder)
    again.write()
    assert {path.name: path.read_bytes() for path in sorted(done.folder.glob("comparison.*"))} == before
    assert (again.verdict, again.failure, again.baseline.variant) == (done.verdict, done.failure, "local")


@pytest.mark.parametrize("place", ["../elsewhere", "/"])
def test_a_comparison_names_no_run_outside(done, tmp_path, place):
    text = (done.folder / "comparison.json").read_text()
    (tmp_path / "comparison.json").write_text(text.replace('"local-seed0"', f'"{place}"'))
    with pytest.raises(FedhetError, match="names a run outside of its folder"):
        read_comparison(tmp_path)


def test_the_page_begins_with_verdict_and_failures(done):
    page = (done.folder / "comparison.html").read_text(encoding="utf-8")
    block = page[page.index('<div class="top">') : page.index('<div class="figures"')]
    assert "Fewer than 3 seeds" in block or "training alone" in block
    assert "client 2 has 5% &amp; more" in block
    details = re.findall(r"<details><summary>Notes \((\d+)\)</summary>(.*?)</details>", page, re.DOTALL)
    assert [int(number) for number, _ in details] == [len(done.notes)] == [details[0][1].count("<p ")]


def test_a_figure_of_some_methods(done):
    figure = done.plot(["fedavg", "local"], width=3.3, height=2)
    assert figure.get_figwidth() == 3.3
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["fedavg", "local"]
    # fedavg has round 0, and local does not.
    assert [[*line.get_xdata()] for line in figure.axes[0].lines] == [[1, 2], [1, 2]]
    assert [*done.plot(["fedavg"]).axes[0].lines[0].get_xdata()] == [0, 1, 2]
    with pytest.raises(FedhetError, match="fedmd: not in this comparison; choose from local, fedavg, x_1@"):
        done.plot(["fedmd"])


# Machado et al. (IEEE TVCG 2009): linear RGB as seen with normal vision, protanopia and deuteranopia.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


def lab(colour, vision):
    """A colour in CIE L*a*b* (D65), where equal distances look alike; 2.3 is just noticeable."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in to_xyz @ seen / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_twelve_lines_look_different(vision):
    for one, other in itertools.combinations(map(look, range(12)), 2):
        distance = np.linalg.norm(lab(one["color"], vision) - lab(other["color"], vision))
        assert distance > 20 or (vision != "normal" and one["linestyle"] != other["linestyle"])
    assert len({str(look(position)) for position in range(48)}) == 48
