import csv
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

import fedhet
from fedhet.engines.running import RunResult
from fedhet.results.figures import WIDTH, run_figures
from fedhet.results.history import read_run
from fedhet.results.report import compare_folders, write_report
from fedhet.results.terminal import closing_table
from fedhet.testing import run
from fedhet.utils.text import console

VOID = {"meta", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes, texts, table rows, ids and links, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.ids, self.links, self.words, self.figures = [], [], [], [], [], []
        self.tags, self.attributes = set(), set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.attributes |= attributes.keys()
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [v for k, v in attributes.items() if k in ("src", "href", "xlink:href")]
        if tag == "figure":
            self.figures.append(attributes["id"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def report_of(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    assert not list(folder.rglob(".*")), "something half written was left behind"
    text = path.read_text(encoding="utf-8")
    return Page(text), text


def test_content_of_a_report(make_run):
    hostile = "reply refused: <script>alert(1)</script> & layer 'fc' is not finite"
    failures = {n: [{"client": "7", "reason": hostile}, {"client": "10", "reason": hostile}] for n in (2, 3)}
    failures[4] = [{"client": "0", "reason": "no reply within 60 s"}]
    folder = make_run(clients=20, rounds=8, failures=failures, settings={"fedhenn.eta0": 0.01})
    page, text = report_of(folder)
    assert page.figures == ["accuracy", "clients", "losses"]
    summary = json.loads((folder / "summary.json").read_text())
    for part in (
        "fedhenn on digits",
        "Completed: 8 of 8 rounds, seed 0, engine local.",
        f"{summary['personal_accuracy']['weighted']:.3f}",
        "after local training; as received, after the last aggregation, "
        f"{summary['received_accuracy']['weighted']:.3f}",
        "cnn-3-3 (4)",
    ):
        assert part in page.text
    assert ["fedhenn.eta0", "0.01"] in page.rows
    assert "torch 2.15.0" in page.text
    assert [hostile, "4", "2, 3", "7, 10"] in page.rows
    assert ["no reply within 60 s", "1", "4", "0"] in page.rows
    assert "<script" not in text
    assert [row[:2] for row in page.rows if row[0] == "all"] == [["all", "20"]]


def test_reports_are_self_contained(make_run):
    page, text = report_of(make_run())
    assert all(link.startswith(("#", "data:")) for link in page.links)
    # The only addresses are the names of XML namespaces, which nobody fetches.
    assert set(re.findall(r"https?://[^\"\s]+", text)) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    references = {*re.findall(r"url\(#([^)]+)\)", text), *(link[1:] for link in page.links if link.startswith("#"))}
    assert references
    assert references <= set(page.ids)
    assert "prefers-color-scheme: dark" in text
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg)
        assert "var(--ink, #23272f)" in svg
        assert "#000000" not in svg


def test_reports_repeat_to_the_byte(make_run):
    folder = make_run()
    files = [
        folder / "report.html",
        *(folder / "figures" / f"{name}.png" for name in ("accuracy", "clients", "losses")),
    ]
    write_report(folder)
    first = [file.read_bytes() for file in files]
    write_report(folder)
    assert [file.read_bytes() for file in files] == first
    assert all(image.startswith(b"\x89PNG") for image in first[1:])


WARDS = [f"ward-{number}-of-the-university-hospital-of-somewhere" for number in range(3)]


@pytest.mark.parametrize(
    ("clients", "names"),
    [(30, ["torchvision/mobilenet_v3_small", *WARDS]), (10, [f"Sequential-{12010 + number}" for number in range(10)])],
)
def test_text_is_inside_figures(make_run, clients, names):
    folder = make_run(clients=clients, rounds=3, architectures=names)
    for figure in run_figures(read_run(folder)).values():
        figure.draw_without_rendering()
        assert figure.bbox.width == figure.dpi * WIDTH
        box = figure.get_tightbbox()  # in inches, of all that is drawn
        assert -0.01 < box.x0 < box.x1 < WIDTH + 0.01
        assert -0.01 < box.y0 < box.y1 < figure.get_figheight() + 0.01
        assert all(text.get_fontsize() >= 7 for text in figure.findobj(Text))
        for axes in figure.axes:
            assert axes.get_window_extent().height > 0.1 * figure.bbox.height
            if legend := axes.get_legend():
                assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(
    ("options", "figures", "said"),
    [
        ({"rounds": 1, "clients": 1}, ["accuracy", "clients", "losses"], "Completed: 1 of 1 rounds"),
        (
            {"status": "failed"},
            ["accuracy", "clients", "losses"],
            "This run failed: 3 of 10 clients replied, 5 are needed 6 of 6 rounds",
        ),
        ({"status": None, "evaluate_every": 9}, [], "No client was evaluated."),
        ({"rounds": 0, "status": None}, [], "Unfinished: 0 rounds"),
        ({"architectures": [""], "common": True}, ["accuracy", "clients", "losses"], "undisclosed (10)"),
    ],
)
def test_reports_of_incomplete_runs(make_run, options, figures, said):
    folder = make_run(**options)
    page, _ = report_of(folder)
    assert page.figures == figures
    assert sorted(file.stem for file in folder.glob("figures/*.png")) == sorted(page.figures)
    assert said in page.text


def test_report_of_settings_only(make_run):
    folder = make_run()
    for name in ("history.jsonl", "clients.csv", "summary.json"):
        (folder / name).unlink()
    page, _ = report_of(folder)
    assert page.figures == []
    assert "Unfinished" in page.text


ODD = (
    *("$^$", "$x$", "\x1b[31m", "a\x00b", "\u202egnp", "\ud800", "_", "|"),
    *('=HYPERLINK("http://x")', "[red]no[/]", "[/red]", ":smile:", "<script>alert(1)</script>", 'x" onload="alert(1)'),
)
"""Names that mean something to matplotlib, a terminal, a spreadsheet, rich or HTML."""


@pytest.fixture
def odd_run(make_run):
    """A run whose clients and architectures have odd names, and so everything else that is text."""

    def odd(value):
        if isinstance(value, dict):
            return {key: odd(each) for key, each in value.items()}
        if isinstance(value, list):
            return [odd(each) for each in value]
        return ODD[int(value)] if isinstance(value, str) and value.isdecimal() else value

    names = [str(number) for number in range(len(ODD))]
    settings = {"dataset": "<script>$^$\x1b"}
    folder = make_run(clients=len(ODD), rounds=2, architectures=names, settings=settings)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    rows[1]["failures"] = [{"client": text, "reason": f"it said {text}"} for text in ODD]
    (folder / "history.jsonl").write_text("".join(json.dumps(odd(row)) + "\n" for row in rows))
    with (folder / "clients.csv").open(newline="") as file:
        heading, *records = csv.reader(file)
    with (folder / "clients.csv").open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        named = ([number, ODD[int(client)], ODD[int(model)], *rest] for number, client, model, *rest in records)
        csv.writer(file).writerows([heading, *named])
    summary = json.loads((folder / "summary.json").read_text())
    texts = {
        "engine": "\x1b]0;$^$",
        "metric": "$^$\u202e",
        "status": "[/red]\x1b",
        "error": "<script>",
        "method": "$^$",
    }
    (folder / "summary.json").write_text(json.dumps(summary | texts | {"devices": list(ODD)}))
    return folder


def test_a_notebook_shows_a_run(odd_run):
    done = RunResult(odd_run, {})
    assert "<svg" in done._repr_html_()
    assert "<svg" in done.plot()._repr_svg_()


def test_odd_text_stays_text(odd_run, tmp_path):
    page, both = write_report(odd_run), compare_folders([odd_run], tmp_path / "both.html")
    notebook = f"<!DOCTYPE html>{RunResult(odd_run, {})._repr_html_()}"
    for text in (page.read_text(encoding="utf-8"), both.read_text(encoding="utf-8"), notebook):
        assert all(char.isprintable() or char == "\n" for char in text)
        found = Page(text)
        assert "script" not in found.tags
        assert not [name for name in found.attributes if name.startswith("on")]
    page = Page(page.read_text(encoding="utf-8"))
    assert {"accuracy", "clients", "losses"} == {*page.figures}
    for name in ("$^$", "$x$", r"\x1b[31m", r"a\x00b", r"\u202egnp", "[/red]", "<script>alert(1)</script>"):
        words = "".join(page.text.split())  # long names are drawn in several lines
        assert f"{name}(1)" in words, "the figure of the clients by architecture"
    out = io.StringIO()
    terminal = console(file=out, force_terminal=True, width=400, color_system=None)
    terminal.print(closing_table(odd_run))
    assert all(name in out.getvalue() for name in ("$^$", r"\x1b[31m", "[red]no[/]", ":smile:", r"[/RED]\X1B"))
    assert "\u202e" not in out.getvalue()
    assert "\x00" not in out.getvalue()


def test_the_card_of_the_models(tmp_path):
    done = run(tmp_path / "run", {"method": "fedavg", "clients": 2, "rounds": 1, "samples-per-client": 20})
    write_report(done.folder)
    card = (done.folder / "models.md").read_text(encoding="utf-8")
    assert f"\n| global | {done.summary['global_accuracy']['weighted']:.3f} |" in card
    assert "- method: fedavg\n" in card
    assert 'fedhet.load_model("run", "NAME")' in card


@pytest.mark.parametrize(("rounds", "said", "early"), [(3, "2", False), (2, "2 of 3", True)])
def test_the_round_of_the_closing_epochs_counts(make_run, rounds, said, early):
    """With `closing-epochs`, the configured rounds have one more; `patience` ends training after the first."""
    folder = make_run(rounds=rounds)
    settings = (folder / "config.toml").read_text().replace(f"rounds = {rounds}", "rounds = 2\nclosing-epochs = 1")
    (folder / "config.toml").write_text(settings)
    (folder / "models").mkdir()
    (folder / "models" / "0.safetensors").touch()
    assert read_run(folder).ended_early == early
    write_report(folder)
    assert f"\n- rounds: {said}\n" in (folder / "models.md").read_text()
    assert f"{rounds} of 3 rounds" in (folder / "report.html").read_text()


def test_runs_with_other_metrics_are_shown_with_their_names(make_run, tmp_path):
    one, other = make_run("one"), make_run("other")
    summary = other / "summary.json"
    summary.write_text(summary.read_text().replace('"metric": "accuracy"', '"metric": "auc"'))
    page = Page(compare_folders([one, other], tmp_path / "both.html").read_text(encoding="utf-8"))
    assert [row[2] for row in page.rows if row[:1] in (["one"], ["other"])] == ["accuracy", "auc"]
    assert "accuracy or auc" in page.text


def test_further_metrics_of_one_global_model_are_in_the_report(tmp_path):
    """The server's evaluation has one number for each metric."""
    settings = {"clients": 2, "rounds": 1, "test-on": "global", "metrics": "macro-f1"}
    settings |= {"preset": "fedavg/digits", "architectures": "mlp", "workers": 1}
    done = fedhet.run(settings, out=tmp_path / "run", progress=False)
    f1 = done.history[-1]["common"]["received"]["further/macro-f1"]
    assert done.summary["further"]["macro-f1"] == {"weighted": f1, "mean": f1, "std": 0.0, "min": f1, "max": f1}
    assert done.summary["personal_accuracy"]["std"] == 0.0
    page = Page(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert ["macro-f1", *(f"{value:.3f}" for value in (f1, f1, 0.0, f1, f1))] in page.rows
