"""Rates of hardware: measured where it is, or fitted to what was compiled for it.

In: devices that are here; or results as `rhino_jax.bench.records` has them.
Out: a hardware file, or lines for one.
Order: `measure` (rates of devices) and `measured_file` (as a file), `fit` (efficiencies
and overlap).
"""
