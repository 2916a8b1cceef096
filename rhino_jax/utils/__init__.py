"""Small tools that know nothing of programs, plans or hardware."""
