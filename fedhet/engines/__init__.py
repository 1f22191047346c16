"""Engines, which run a configuration on this machine, on Ray, or through a Flower SuperLink."""
