"""The batch cut in time: one loop over micro-batches, and what is done around it."""
