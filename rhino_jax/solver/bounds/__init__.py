"""Lower bounds on the objective: messages, and Lagrange multipliers of memory."""
