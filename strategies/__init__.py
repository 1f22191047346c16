"""The server side of each method, in one file; `client_apps` and `fedhet/methods` have files of the same names."""
