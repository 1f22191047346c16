"""The client sides of the methods, one file each."""
