"""Measure what a round costs a client under every method of the registry, and write the table of README.md.

    python run_configs/grid/costs.py           # adds to costs.csv what it lacks, and writes the table
    python run_configs/grid/costs.py --table   # only writes the table

The clients are four of `digits-72-iid` in `settings.json` with equal networks. Measured is what the last but one does
for the message of the second round (of a one-shot method the first), in three runs: seconds that the process
computed; multiplications, half of what `torch.utils.flop_counter` counts; and memory, the peak of what torch allocates
while a ClientApp that has just started answers the message, its network included. A half is the client with half the
width (the first two of four blocks), of a federation in which every second one has it. What NumPy, SciPy and
scikit-learn do is in the seconds only.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedhet import registry
from fedhet.client.app import make_client_app
from fedhet.engines.local import run_locally
from fedhet.errors import FedhetError
from fedhet.flower import ClientApp, Context, Message, MessageType, read_request
from fedhet.machine import peak_memory
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config
from fedhet.registry import module_of

HERE = Path(__file__).resolve().parent
PAGE, TABLE = HERE / "README.md", HERE / "costs.csv"
BEGIN, END = "<!-- made by costs.py -->\n", "<!-- end of costs -->\n"
COLUMNS = ("method", "part", "bytes_up", "bytes_down", "multiplications", "memory", "seconds", "reason")

grid = module_of(str(HERE / "grid.py"))
marks = module_of(str(HERE.parent / "marks.py"))
PLAN = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))

SIZES = {
    "heterofl": {"heterofl.widths": "1,0.5"},
    "fedrolex": {"fedrolex.widths": "1,0.5"},
    "fjord": {"fjord.widths": "1,0.5"},
    "depthfl": {"depthfl.depths": "4,2"},
}
"""Keys with which every second client has a half, for methods whose clients have parts of a network."""

PARTS = {2: "whole", 3: "half"}
"""The clients that are measured, after others have warmed up the process, and the parts of a network that they have."""


@dataclass
class Meter(Observer):
    """Measures how clients answer the message of a round, and ends the run after it.

    Attributes:
        what: `seconds`, `multiplications` or `memory`.
        last: the round.
        clients: the partition ids of those that are measured.
        values: what was measured, by partition id.
        bytes: up and down in the round, by client.
    """

    what: str
    last: int
    clients: Container[int]
    app: ClientApp = field(default_factory=make_client_app)
    values: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, as the ClientApp does."""
        client = int(context.node_config["partition-id"])
        trains = message.metadata.message_type == MessageType.TRAIN
        if not trains or read_request(message.content)[0].round != self.last or client not in self.clients:
            return self.app(message, context)
        if self.what == "seconds":
            start = time.process_time()
            reply = self.app(message, context)
            self.values[client] = time.process_time() - start
        elif self.what == "multiplications":
            with FlopCounterMode(display=False) as counter:
                reply = self.app(message, context)
            self.values[client] = counter.get_total_flops() / 2
        else:
            app, replies = make_client_app(), list[Message]()
            self.values[client] = peak_memory(lambda: replies.append(app(message, context)))
            (reply,) = replies
        return reply

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """A round is over."""
        if report.row["failures"]:
            raise RuntimeError(report.row["failures"])
        if report.row["round"] == self.last:
            self.bytes = {int(row.client): (row.bytes_up, row.bytes_down) for row in report.clients}
            run.state.stopped = self.last


def measured(config: Config, what: str, clients: Container[int]) -> Meter:
    """Run the first rounds of a federation, and measure some of its clients in the last of them."""
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(what, min(2, config.rounds), clients)
        run_locally(config.but(workers=1), Path(folder) / "run", observers=[meter], app=meter)  # type: ignore[arg-type]
    return meter


def settings_of(method: str) -> Config:
    """The settings of the four clients with a method."""
    cell = next(cell for cell in grid.cells(PLAN, None) if (cell.setting, cell.networks) == ("digits-72-iid", "equal"))
    keys = {**cell.keys, "clients": 4, "evaluate-every": 10, "report": False, **SIZES.get(method, {})}
    config: Config = grid.shared(replace(cell, keys=keys), method, [0]).settings(method, 0)
    return config


def measured_rows(method: str) -> list[dict[str, Any]]:
    """A method's rows of the csv: one, or a second one for half a network, or one with the reason why there is none."""
    try:
        config = settings_of(method)
        meters = [measured(config, what, PARTS) for what in ("seconds", "multiplications", "memory")]
    except FedhetError as error:
        return [{"method": method, "part": "", "reason": grid.one_line(error)}]
    parts = PARTS if method in SIZES else {min(PARTS): ""}
    return [
        {
            "method": method,
            "part": part,
            **dict(zip(("bytes_up", "bytes_down"), meters[0].bytes[client], strict=True)),
            **{meter.what: f"{meter.values[client]:.3g}" for meter in meters},
        }
        for client, part in parts.items()
    ]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """The table of the page."""
    lines = [
        "| method | part of the network | bytes up | bytes down | multiplications | memory | seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [f"`{row['method']}`", row["part"], row["reason"], "", "", "", ""]
        if not row["reason"]:
            cells[2:4] = (f"{int(row[name]):,}" for name in ("bytes_up", "bytes_down"))
            sizes = f"{float(row['multiplications']) / 1e6:.1f} M", f"{float(row['memory']) / 1e3:,.0f} kB"
            cells[4:] = *sizes, row["seconds"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str, rows: Sequence[Mapping[str, str]]) -> str:
    """The page with the table written anew."""
    return str(marks.between(text, BEGIN, END, table(rows)))


def main() -> None:
    """Complete the csv, and write the table."""
    parser = argparse.ArgumentParser(description="Measure what a round costs a client under every method.")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    costs = grid.Table(TABLE, COLUMNS, 2)
    known = {method for method, _ in costs.rows}
    for method in (*grid.CONTROLS, *sorted({*registry.own_methods()} - {*grid.CONTROLS})):
        if not given.table and method not in known:
            for row in measured_rows(method):
                costs.add(row)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), list(costs.rows.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
