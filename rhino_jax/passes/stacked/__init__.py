"""Isomorphic work on leaves of one shape, computed as one batched chain.

An optimizer that multiplies each weight's matrices (Muon's orthogonalization, roots of
Shampoo and SOAP) runs one chain of products per leaf: sharded, every product
communicates, and unsharded, every device repeats it. Stacked, the chains of all leaves
are one chain with a leading dim, over which devices share them: they communicate where
leaves enter the stack and leave it, and nowhere between.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"sizes": [8, 16]}`.
Out: a closed jaxpr of the same arguments and results.
Order: `sites` (isomorphic ops), `emit` (ops before and after that join them; the new
program, and the pass).
"""

from rhino_jax.passes.stacked.emit import PASS


__all__ = ["PASS"]
