"""Exact removal of nodes and options, and restoration of full assignments."""
