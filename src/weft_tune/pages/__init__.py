"""Pages, pictures and tables of tuned formats."""
