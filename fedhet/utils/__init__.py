"""Files, text, random streams, signals and the machine: what every room uses."""
