"""What the user sees of a run: live table, final table, report, web page and trace."""
