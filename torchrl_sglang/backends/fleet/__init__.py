"""The servers of one engine: who they are, which of them generate, with which weights.

``membership`` holds the state; ``follower`` and ``supervisor`` keep it true; ``sleep``
and ``revive`` change it on request.
"""
