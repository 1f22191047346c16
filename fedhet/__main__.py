"""The command `python -m fedhet`, which does the same as `fedhet`."""

from fedhet.cli import main

main()
