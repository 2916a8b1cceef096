"""What several programs share, as the processes that plan them send it."""

from __future__ import annotations

import json

from rhino_jax.plan.shared import SharedLayout
from rhino_jax.utils.codec import from_json, to_json


def test_a_layout_is_the_same_after_it_was_sent() -> None:
    specs = ({0: ((0, 1), ()), 3: ()}, {}, {1: ((), (1,))})
    layout = SharedLayout((("data", 4), ("model", 2)), specs, 0.1 + 0.2)
    sent = json.loads(json.dumps(to_json(layout)))
    assert from_json(SharedLayout, sent) == layout
    assert from_json(SharedLayout, to_json(layout)) == layout
