"""What no choice is below: messages, and prices of memory."""
