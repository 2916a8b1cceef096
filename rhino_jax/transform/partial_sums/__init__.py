"""Partial sums that stay open past linear ops and loops."""
