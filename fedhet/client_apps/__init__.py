"""The methods' client sides: in a wheel in this folder, in a checkout in `client_apps` beside the package."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "client_apps")]
