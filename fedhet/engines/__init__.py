"""Engines: where a run's clients are. In this process, on Ray, or behind a SuperLink."""
