"""Several processes of one gateway: the user's has the sessions, workers serve HTTP.

The process that the gateway was made in (the owner) has all that users read and set,
and the engine. Workers read requests, render, tokenize, parse and stream; what they
need of the engine and where turns are kept, they ask of the owner over a socket pair.
A session is served by one worker.
"""
