"""Several processes, one plan: what they tell each other through JAX's coordination
service before anything is compiled."""
