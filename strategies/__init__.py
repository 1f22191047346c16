"""The server sides of the methods, one file each."""
