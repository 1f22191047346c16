"""Federated learning among clients whose neural networks differ, as a Flower app."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout (and in a Flower app bundle) `strategies/` and `client_apps/` lie beside this folder; a wheel has
# them inside it. Either way their modules have one name: `fedhet.strategies.X`, `fedhet.client_apps.X`.
_BESIDE = Path(__file__).resolve().parent.parent
if (_BESIDE / "strategies").is_dir() and (_BESIDE / "client_apps").is_dir():
    __path__.append(str(_BESIDE))
