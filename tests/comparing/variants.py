"""Variants of a comparison with made-up accuracies."""

from pathlib import Path
from types import SimpleNamespace

from fedhet.comparing.measures import MEASURES, RunOutcome, VariantResult
from fedhet.config import configuration
from fedhet.results.history import RunFiles


def result(method, accuracies, refused=None, diverged=None, **settings):
    config = configuration.resolve({"method": method, **{key.replace("_", "-"): v for key, v in settings.items()}})
    failures = [{"client": client, "reason": reason} for client, reason in (refused or {}).items()]
    rows = [{"round": 1, "participants": [], "failures": failures}]
    for client, reason in (diverged or {}).items():  # in the first round all is well, and in the second it is not
        rows[0]["participants"].append(client)
        rows.append({"round": 2, "failures": [{"client": client, "reason": reason}], "participants": []})
        rows[-1]["trained"] = {"accuracy": {"weighted": 1.0}, "clients": 1}
    runs = [
        RunOutcome(
            SimpleNamespace(seed=seed, settings=config),
            RunFiles(Path(), {}, {}, rows=rows, summary={}),
            dict.fromkeys(MEASURES) | {"personal_accuracy": accuracy, "labelled": 1440, "forwards": 28800},
        )
        for seed, accuracy in accuracies.items()
    ]
    return VariantResult(method, len(runs), runs, False)
