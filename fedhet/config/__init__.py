"""Configuration: resolve settings from files, the command line and Python to one valid `Config`."""
