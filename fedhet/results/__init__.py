"""What a run leaves behind: its files, and the tables, figures, reports and comparisons made of them."""
