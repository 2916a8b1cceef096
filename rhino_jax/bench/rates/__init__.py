"""Rates of hardware: measured on devices, or fitted to programs compiled for it.

In: devices that are present; or results as in `rhino_jax.bench.records`.
Out: a hardware file, or lines for one.
Order: `measure` (rates of devices) and `measured_file` (as a file), `fit` (efficiencies
and overlap).
"""
