"""Engines run a configuration: on this machine, on Ray, or on a SuperLink."""
