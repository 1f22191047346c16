"""The server sides of the methods, one file each; client_apps and fedhet/methods have files of the same names."""
