"""What makes choices, and makes them better."""
