"""The benchmark: every plan is compiled, and the compiled program is the judge."""
