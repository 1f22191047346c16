"""Each client's data and network: built from the configuration, or by the functions that a user passes in Python."""
