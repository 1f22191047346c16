"""Utilities for all packages: files, text, random streams, signals and the machine."""
