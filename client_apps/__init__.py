"""The client halves of the methods, one file each."""
