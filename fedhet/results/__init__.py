"""The files of a run directory, and the tables, figures and reports that are made from them."""
