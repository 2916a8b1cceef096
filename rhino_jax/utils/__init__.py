"""Small tools that are independent of programs, plans and hardware."""
