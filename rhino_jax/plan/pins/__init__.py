"""Layouts that the user fixes, checked before any search.

In: pins as users write them: by tree path, source line or scope, or as trees of specs.
Out: `resolve.ResolvedPins`: a spec by position of an input, of an output, by value.
Order: `trees` (pytrees → paths), `interior` (`rhino.pin`, lines and scopes inside the
program), `resolve` (paths and globs → positions, on one mesh).
"""
