"""The files of a run, and tables, figures and reports from them."""
