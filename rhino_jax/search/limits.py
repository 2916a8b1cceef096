"""How far the search goes: what it leaves out, and where it stops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Attributes:
    most_meshes: meshes whose models are kept, as candidates for the compiler.
    most_cells: pairs of options of the folded problem beyond which meshes of three and
        more axes are not tried unasked; a third axis makes 18 times as many. A U-Net
        (unet-base, 16 devices) has 5 million on two axes: on three, `fast` takes 146 s
        and 6 GB, not 56 s and 0.7 GB. ResNet-50 has 1.1 million: 17 s and 1.6 GB, not
        8 s. Two towers, and GPT, Llama and MoE with unrolled layers have 0.4 to 1.0
        million.
    axis_gain: share of the step that meshes of one more axis must have gained over
        those of fewer, before meshes of yet another axis are tried.
    recipe_worth: a recipe is not searched to the end once its plan is this many times
        as slow as the best recipe's so far. It cannot be the user's choice then, only
        a line of comparison: the step that the plan's table gives for it is up to an
        eighth longer than that of the recipe searched to the end (ResNet-50).
    recipes_share: share of the time left that may go into recipes, where time is
        limited. The search starts from them, and finds plans that they exclude.
    prediction_error: how far the ratio of two plans' predicted steps may be from that
        of what the compiler makes of them: plans whose predicted step is further than
        this above the best one's are not compiled to compare them.
    communication_weights: factors on the price of communication, with which the plans
        beside the best are searched that the compiler is asked about.
    most_pins: pins that are dropped one by one to say which is in the way; each costs
        a search for the smallest peak.
    most_visited: values looked at to find the update that a gradient is for; one that
        is farther away is not named after its parameter.
    least_rounds: steps around a node that must look alike before it is folded with
        another. After two, the plan of a ViT is 0.5 % slower than unfolded; after
        three it is the same.
    most_orbits: rounds of folding go on while there are no more orbits than this, and
        programs of fewer nodes are not folded: in a chain of six small layers what
        happens at its ends reaches the middle, and nothing is a repeat.
    """

    most_meshes: int = 3
    most_cells: int = 1_500_000
    axis_gain: float = 0.01
    recipe_worth: float = 1.25
    recipes_share: float = 0.4
    prediction_error: float = 0.3
    communication_weights: tuple[float, ...] = (2.0, 0.5)
    most_pins: int = 8
    most_visited: int = 64
    least_rounds: int = 3
    most_orbits: int = 900


LIMITS = Limits()
