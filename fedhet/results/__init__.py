"""The files of a run, and the tables, figures and reports made of them."""
