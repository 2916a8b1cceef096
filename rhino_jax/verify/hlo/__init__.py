"""Reading compiled HLO: what a program moves, holds, computes and takes."""
