"""Read compiled HLO: a program's collectives, memory use, work and step time.

In: `records.Compilation`, with the text of a compiled program, and a `Target`.
Out: `records.Reading`: collectives, memory and predicted seconds of what was compiled.
Order: `module` (text → instructions and the user's lines), `loops` (how often they
run), `collectives` (what is sent), `instruction_cost`, `libraries` and `work` (what is
computed), `schedule` (what compute hides), `records`, `reading` (all of it).
"""
