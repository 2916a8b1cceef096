"""Which values wait in memory for a second reading, and which are made again for it.

Every value is made once, early. Late readers read it again: it waits until then, or it
is made once more when it is first needed, of other values that are there then, or it
waits elsewhere and is fetched. The cheapest choice whose memory fits at all times is
found by CP-SAT.

Variables   k[i]        value i waits
            o[i]        it waits elsewhere
            m[i, p]     it is made again, or fetched, at the late time p
            a[i, p]     it is there at p
Subject to  k[i] + Σ_p m[i, p] ≤ 1;  Σ_p m[i, p] = 1 where o[i]
            a[i, p] ≤ a[i, p-1] + m[i, p],  a[i, before all late times] = k[i]
            a[i, p] = 1 where i is read at p;  a[j, p] ≥ m[i, p] - o[i] where i needs j
            base[p] + Σ_i bytes[i]·a[i, p] + always[i]·k[i] + sent[i]·o[i] ≤ budget
            at every time p
Minimise    Σ seconds, with max(0, Σ_i link[i]·o[i] - beside)
Like values of equal layers do alike, but that the first layers may do otherwise.

Source: the model is that of Jain et al., Checkmate (MLSys 2020), with one more making
of each value.
"""
