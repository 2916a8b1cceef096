"""Plans for people: one line, text tables, HTML, and a line of progress."""
