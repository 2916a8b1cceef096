"""What the compiler made of a plan, read from the text of compiled HLO."""
