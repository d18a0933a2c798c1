"""Helpers that every layer uses; they import only the package's errors.

``checks`` validates arguments, ``urls`` handles addresses, ``event_loop`` runs the
coroutines behind synchronous calls, ``blocking`` runs the user's functions beside a
loop, and ``user_code`` keeps what they raise their own failure.
"""
