"""The client sides of the methods, one file for each method."""
