"""The server halves of the methods, one file each."""
