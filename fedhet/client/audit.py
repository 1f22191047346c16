"""A node's audit file, `state-dir`/audit.jsonl: what each message asked for and what was sent, as lines of JSON."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fedhet.errors import ConfigError, Refused
from fedhet.flower import Message
from fedhet.flower.insides import hash_of_app
from fedhet.utils.files import locked, private_files, writing

FILE = "audit.jsonl"
DAYS = {"today": 0, "yesterday": 1}
NOTHING = {**dict.fromkeys(("time", "client", "run", "flower-run", "app"), "?"), "sent": {}, "epsilon": 0.0}
FAILED = "the client failed; the reason is in its node's log, since it could disclose data"


def in_words(sizes: Mapping[str, int]) -> str:
    """Return kinds and bytes of what was sent, for the log."""
    return ", ".join(f"{kind} ({size} bytes)" if size else kind for kind, size in sizes.items())


def keep(folder: Path, message: Message, *, check: Callable[[Path], None] | None = None, **entry: Any) -> str:
    """Append an entry about a message to the audit file in `folder`; return time, Flower's run and app for the log.

    No other process appends one between `check`, a function of `folder` that may raise an error, and this entry.

    The entry has the client's name, what was `asked`, fedhet's `run`, and either bytes `sent` by kind, which are 0 for
    other values than arrays, and the node's `epsilon`, or the reason why the message was `refused`. Raises a WriteError
    if the file cannot be written, so that no reply is sent without an entry.
    """
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = {"time": now, "flower-run": message.metadata.run_id, "app": hash_of_app()}
    with private_files(), writing(folder / FILE), locked(folder, wait=True):
        if check:
            check(folder)
        with (folder / FILE).open("ab") as file:
            file.write(json.dumps(origin | entry).encode() + b"\n")
    return f" [{now}, Flower's run {origin['flower-run']}, app {origin['app']}]"


def refuse(
    folder: Path, message: Message, reason: str, *, check: Callable[[Path], None], **entry: Any
) -> tuple[str, str]:
    """Append an entry about a refusal (see `keep`); return the reason for the server, and time, run and app.

    The reason is that of `check`, if this raises `Refused` for a message that failed.
    """
    try:
        return reason, keep(folder, message, check=check if reason == FAILED else None, **entry, refused=reason)
    except Refused as error:  # others were answered meanwhile
        return refuse(folder, message, str(error), check=check, **entry)
    except OSError:  # a full disk can be the reason
        return reason, ""


def entries(folder: Path, begin: datetime) -> Iterator[dict[str, Any]]:
    """Yield the entries of the audit file in `folder` from a time on."""
    path = folder / FILE
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            if datetime.fromisoformat(entry["time"]) >= begin:
                yield NOTHING | entry
        except (ValueError, LookupError, TypeError):  # the machine stopped while it was written
            yield NOTHING | {"client": f"unknown (a line of {path} is damaged)"}


def answered(folder: Path, begin: datetime) -> int:
    """Return how many messages the node answered since `begin`, also by `FAILED`, which can depend on an example."""
    return sum(bool(entry["sent"]) or entry.get("refused") == FAILED for entry in entries(folder, begin))


def summary(folder: Path, begin: datetime) -> list[str]:
    """Return two lines for each run since `begin`: whose it is, and kinds, bytes and epsilon of all that was sent."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for entry in entries(folder, begin):
        origin = f"run {entry['run']} (Flower's {entry['flower-run']}), app {entry['app']}"
        runs.setdefault(f"client {entry['client']}, {origin}", []).append(entry)
    lines = []
    for heading, answers in runs.items():
        sizes = Counter[str]()
        for entry in answers:
            sizes.update(entry["sent"])
        refused = sum("refused" in entry for entry in answers)
        epsilon = max(entry["epsilon"] for entry in answers)
        spent = f"; epsilon {epsilon:.4g} over all runs of the node" if epsilon else ""
        lines.append(heading)
        lines.append(
            f"  {answers[0]['time']} to {answers[-1]['time']}: {len(answers)} messages, of which {refused} were "
            f"refused; sent {in_words(sizes) or 'nothing'}{spent}"
        )
    return lines


def since(text: str) -> datetime:
    """Return the beginning of a day: `today`, `yesterday` or a date such as 2026-11-28; raises a ConfigError else."""
    if text in DAYS:
        day = datetime.now() - timedelta(days=DAYS[text])
        return day.replace(hour=0, minute=0, second=0, microsecond=0).astimezone()
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ConfigError(f"--since {text}: write today, yesterday or a date such as 2026-11-28") from None
