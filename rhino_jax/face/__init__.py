"""What users hold of plans and of what is found on them: the data, and what acts."""
