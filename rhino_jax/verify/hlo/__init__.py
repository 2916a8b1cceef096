"""Read compiled HLO: a program's collectives, memory use, work and step time.

In: `records.Compilation`, with the text of a compiled program, and a `Target`.
Out: `records.Reading`: collectives, memory and predicted seconds of what was compiled.
Order: `locations` (the user's lines) and `module` (text → instructions), `loops` (how
often they run), `collectives` (what is sent), `work` (what is computed), `schedule` and
`timing` (seconds), `rates` (how near the peak), `pricing`, `reading` (all of it).
"""
