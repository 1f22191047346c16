"""Configuration: from files, the command line and a user's functions to one valid `Config`."""
