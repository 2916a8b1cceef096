"""The search's core problem on its own: nodes that choose, pairs that cost, memory."""
