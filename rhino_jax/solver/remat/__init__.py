"""Rematerialization: which residuals are saved, recomputed, or offloaded.

Every value is computed once, early (forward). Late (backward) readers read it again: it
is saved until then, or recomputed when it is first needed, from other values that are
live then, or offloaded and fetched. The cheapest choice whose memory fits at all times
is found by CP-SAT.

Variables   k[i]        value i is saved
            o[i]        it is offloaded
            m[i, p]     it is recomputed, or fetched, at the late time p
            a[i, p]     it is live at p
Subject to  k[i] + Σ_p m[i, p] ≤ 1;  Σ_p m[i, p] = 1 where o[i]
            a[i, p] ≤ a[i, p-1] + m[i, p],  a[i, before all late times] = k[i]
            a[i, p] = 1 where i is read at p;  a[j, p] ≥ m[i, p] - o[i] where i needs j
            base[p] + Σ_i bytes[i]·a[i, p] + always[i]·k[i] + sent[i]·o[i] ≤ budget
            at every time p
Minimise    Σ seconds, with max(0, Σ_i link[i]·o[i] - beside)

Corresponding values of equal layers have equal choices, except that the first layers
may differ from the rest.

Source: the model is that of Jain et al., Checkmate (MLSys 2020), with at most one
recomputation of each value.
"""
